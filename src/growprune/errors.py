"""The errors that are for users: what was given, what is allowed, what to do. Anything else is a bug."""


class GrowpruneError(ValueError):
    """Something given to growprune is invalid. The command line shows it as one line."""

    def __str__(self) -> str:
        return shorten(super().__str__())


def shorten(text: str, limit: int = 1000) -> str:
    """A text of bearable length: of a longer one, the beginning and the end, where what is allowed stands.

    >>> shorten("sparsity is 0000000000000000, but must be below 1", limit=40)
    'sparsity is 00000 ... t must be below 1'
    """
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
