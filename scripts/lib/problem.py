"""The one error that scripts show to people."""

from __future__ import annotations


class Problem(Exception):
    """What is wrong with what the caller gave, in one sentence."""
