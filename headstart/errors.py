"""Errors that speak to the user."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right: says what is wrong, where, and what to do.

    The command line prints the message alone and exits with code 2; in Python it is an ordinary exception.
    """
