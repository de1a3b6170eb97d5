"""What every test here may ask for."""

from file_cases import old

__all__ = ["old"]
