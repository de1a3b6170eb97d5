"""Warnings that name the user's line."""

import warnings


def warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
