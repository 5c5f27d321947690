"""Import hooks that patch MXNet, gluonnlp and the toolkit when a script imports them.

A script that does not import them does not pay for their memory and load time.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from common import numpy_aliases


def install() -> None:
    """Install the hooks; do nothing if an image's sitecustomize has installed them."""
    if not any(isinstance(finder, _PatchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchFinder())


class _PatchFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "mxnet":
            numpy_aliases.restore()
            return None
        patch = _PATCHES.get(fullname)
        if patch is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            _patch_after(spec.loader, patch)
        return spec


def _patch_after(loader: Any, patch: Callable[[Any], None]) -> None:
    """Make the loader of one module patch the module after its execution."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        patch(module)

    loader.exec_module = exec_module


def _disable_sampling(transforms: Any) -> None:
    """Make `SentencepieceTokenizer(path)` return the best segmentation.

    For its `num_best=0, alpha=1.0` sentencepiece up to 0.1.86 returned that; later versions sample
    single characters or raise.
    """
    tokenizer = transforms.SentencepieceTokenizer
    sampled = tokenizer.__call__

    def call(self: Any, sample: str) -> list[str]:
        if self._nbest in (0, 1):
            pieces: list[str] = self._processor.EncodeAsPieces(sample)
        else:
            pieces = sampled(self, sample)
        return pieces

    tokenizer.__call__ = call


def _disable_pickle(decoder: Any) -> None:
    """Make the toolkit read NPY without pickle, by which a client could run code."""

    def npy_to_numpy(data: bytes) -> Any:
        import io

        import numpy

        return numpy.load(io.BytesIO(data), allow_pickle=False)

    decoder._npy_to_numpy = npy_to_numpy
    decoder._decoder_map[decoder.content_types.NPY] = npy_to_numpy


_PATCHES: dict[str, Callable[[Any], None]] = {
    "gluonnlp.data.transforms": _disable_sampling,
    "sagemaker_inference.decoder": _disable_pickle,
}
