"""What every test here may ask for."""

from segmentation_cases import folder, fresh_caches

__all__ = ["folder", "fresh_caches"]
