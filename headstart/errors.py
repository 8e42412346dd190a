"""Errors that speak to the user, and what they might have meant."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right: says what is wrong, where, and what to do.

    The command line prints the message alone and exits with code 2; in Python it is an ordinary exception.
    """


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like `name`, for `did you mean …?`; None if none is near."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), 1, 0.6)), None)


def first_line(error: BaseException) -> str:
    """What an error says in its first line; the name of its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
