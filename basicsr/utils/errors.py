"""User errors: mistakes that users can fix, reported in one message without a traceback.

Each states what was given, what is needed and what to change. Any other error is a bug in the
program, or in a user's own code, and is shown with its traceback.
"""


class UserError(ValueError):
    """A mistake in options, data or files."""


class MissingKeyError(UserError, KeyError):
    """A name or an option that does not exist."""

    __str__ = Exception.__str__  # a KeyError would put the message in quotes


class ArgumentError(UserError, TypeError):
    """Arguments that a component does not take, or required ones that are missing."""


class CheckError(UserError, AssertionError):
    """Sizes or numbers that do not match, where BasicSR 1.x has an ``assert``."""


class MissingPackageError(UserError, ImportError):
    """An optional package that is not installed."""


class NonFiniteError(UserError, FloatingPointError):
    """Non-finite losses, gradients or weights."""


def image_error(path: str, message: str) -> UserError:
    """The error for an unreadable image or pair; ``filename`` is set as in an OSError."""
    error = UserError(message)
    error.filename = path  # pyright: ignore[reportAttributeAccessIssue] (ValueError has a dict)
    return error
