"""What every test here may ask for."""

from classification_cases import data, files

__all__ = ["data", "files"]
