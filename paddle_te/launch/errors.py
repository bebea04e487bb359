"""The error of all that the launcher refuses."""


class LaunchError(ValueError):
    """What is wrong, by the argument's name, and what it may be: one line."""
