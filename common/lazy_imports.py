"""Delays an import until an attribute of the module is used."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class _Lazy(ModuleType):
    """A stand-in for a module, which imports the module when an attribute is used."""

    def __getattr__(self, attribute: str) -> Any:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{self.__name__}.{attribute}")
        return getattr(importlib.import_module(self.__name__), attribute)


@contextlib.contextmanager
def lazily_imported(*names: str) -> Iterator[None]:
    """Make imports of `names` in the block return stand-ins, which import the modules when used.

    Used for the SageMaker Inference Toolkit, which imports numpy and scipy (20 MB and 0.1 s) for
    formats that the built-in handler does not use, and boto3 (0.2 s) for a package index.
    """
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = _Lazy(name)
    try:
        yield
    finally:
        for name in absent:
            if isinstance(sys.modules.get(name), _Lazy):
                del sys.modules[name]
