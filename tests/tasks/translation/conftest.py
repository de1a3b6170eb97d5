"""What every test here may ask for."""

from translation_cases import cache, data

__all__ = ["cache", "data"]
