"""Errors that are meant for users: mistakes they can mend, told in one message without traceback.

Each says what was given, what is needed and what to change. Any other error is a fault of the
program, or of a user's own code, and is shown with its traceback.
"""


class UserError(ValueError):
    """A mistake in options, data or files."""


class MissingKeyError(UserError, KeyError):
    """A name or an option that is not there."""

    __str__ = Exception.__str__  # a KeyError would put the message in quotes


class ArgumentError(UserError, TypeError):
    """Arguments that a component does not take, or lacks."""


class MissingPackageError(UserError, ImportError):
    """An optional package that is not installed."""


class NonFiniteError(UserError, FloatingPointError):
    """Losses, gradients or weights that are not finite."""


def image_error(path: str, message: str) -> UserError:
    """The error of an image, or a pair, that cannot be used; ``filename`` tells as for OSError."""
    error = UserError(message)
    error.filename = path  # pyright: ignore[reportAttributeAccessIssue] (ValueError has a dict)
    return error
