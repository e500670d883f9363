"""The two errors a user meets. Each message names the thing, its value and what would be accepted."""


class FimaqError(Exception):
    """Work that was asked for correctly could not be done (exit code 1)."""


class InputError(FimaqError):
    """The request itself cannot be met: a bad value, file or folder (exit code 2). Nothing was changed."""
