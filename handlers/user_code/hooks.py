"""What a script's imports need changed here, done as the modules are imported.

numpy and the others cost memory and time, so nothing is imported that the script does not import.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from common import numpy_aliases


def install() -> None:
    """Once a process: an image's sitecustomize has done it, too."""
    if not any(isinstance(finder, _Hooks) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Hooks())


class _Hooks(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "mxnet":
            numpy_aliases.restore()
            return None
        change = _CHANGES.get(fullname)
        if change is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader, change)
        return spec


class _Changed(Loader):
    """Changes a module once it is there."""

    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _best_pieces(transforms: Any) -> None:
    """`SentencepieceTokenizer(path)` samples by default (`num_best=0, alpha=1.0`). sentencepiece up
    to 0.1.86 took that for its best pieces, later ones give single characters or refuse it."""
    tokenizer = transforms.SentencepieceTokenizer
    sampled = tokenizer.__call__

    def call(self: Any, sample: str) -> list[str]:
        if self._nbest in (0, 1):
            pieces: list[str] = self._processor.EncodeAsPieces(sample)
        else:
            pieces = sampled(self, sample)
        return pieces

    tokenizer.__call__ = call


def _no_pickles(decoder: Any) -> None:
    """The toolkit reads NPY with `allow_pickle=True`: a client could run code."""

    def npy_to_numpy(data: bytes) -> Any:
        import io

        import numpy

        return numpy.load(io.BytesIO(data), allow_pickle=False)

    decoder._npy_to_numpy = npy_to_numpy
    decoder._decoder_map[decoder.content_types.NPY] = npy_to_numpy


_CHANGES: dict[str, Callable[[Any], None]] = {
    "gluonnlp.data.transforms": _best_pieces,
    "sagemaker_inference.decoder": _no_pickles,
}
