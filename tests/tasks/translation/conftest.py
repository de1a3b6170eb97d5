"""What every test here may ask for."""

from translation_cases import data

__all__ = ["data"]
