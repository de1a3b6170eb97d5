"""The errors that are for users: what was given, what is allowed, what to do. Anything else is a bug."""


class GrowpruneError(ValueError):
    """Something given to growprune is invalid. The command line shows it as one line."""
