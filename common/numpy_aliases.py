"""The six numpy aliases of Python's own types that MXNet 1.9.1 uses and numpy 1.24 removed."""

from __future__ import annotations

ALIASES = {
    "bool": bool,
    "object": object,
    "float": float,
    "int": int,
    "complex": complex,
    "str": str,
}


def restore() -> None:
    """Restore the missing ones; called before MXNet is imported."""
    import numpy

    for name, kind in ALIASES.items():
        if name not in numpy.__dict__:
            setattr(numpy, name, kind)
