"""Errors that a command shows in one sentence."""

from __future__ import annotations


class Problem(Exception):
    """Wrong usage: the command ends with 2."""


class Failed(Exception):
    """A failure of a correct command line: the command ends with 1."""
