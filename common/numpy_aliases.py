"""The six numpy aliases of Python's own types that MXNet 1.9.1 uses and numpy 1.24 removed."""

from __future__ import annotations


def restore() -> None:
    """Restore the aliases that numpy lacks. Call this before MXNet is imported."""
    import numpy

    for kind in (bool, object, float, int, complex, str):
        if kind.__name__ not in numpy.__dict__:
            setattr(numpy, kind.__name__, kind)
