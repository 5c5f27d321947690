"""The errors that commands show to people, in one sentence."""

from __future__ import annotations


class Problem(Exception):
    """What is wrong with what the caller gave. The command ends with 2."""


class Failed(Exception):
    """What was given could have worked, and did not. The command ends with 1."""
