"""Runs a model with MXNet on a GPU."""

from __future__ import annotations

from common.errors import InvalidRequest
from common.mxnet_compat import mx
from engine.artifacts.artifact import Artifact
from engine.backends import nvidia
from engine.backends.dense import DenseModel, Ids
from engine.backends.interface import Logits
from engine.backends.mxnet.gpt2 import GPT2
from engine.backends.mxnet.kv_cache import MXNetKVCache, out_of_memory


class MXNetModel(DenseModel):
    """A model on `engine.backends.mxnet.gpt2`."""

    _cache: MXNetKVCache

    def __init__(self, artifact: Artifact, ctx: mx.Context) -> None:
        super().__init__()
        self.config = artifact.config
        self.weight_bytes = artifact.fp32_bytes
        self._ctx = ctx
        self._model = GPT2(artifact.config, artifact.weights, ctx)
        self._model.wait()  # so that a load fails, not the first request
        self._cache = MXNetKVCache(artifact.config, ctx)

    def compute(self, begin: int, ids: Ids) -> Logits:
        self._cache.select(begin, begin + len(ids))
        with out_of_memory(self._ctx, f"{ids.size} more tokens"):
            logits: Logits = self._model(mx.nd.array(ids, ctx=self._ctx), self._cache).asnumpy()
        return logits

    def close(self) -> None:
        del self._model, self._cache
        self._ctx.empty_cache()  # MXNet does not return freed memory to the GPU by itself


def _first_gpu() -> mx.Context:
    """Return the first GPU. Raises `InvalidRequest` with what is missing."""
    if not mx.runtime.Features().is_enabled("CUDA"):
        raise InvalidRequest(
            f"the mxnet {mx.__version__} that is installed cannot use a GPU: pip uninstall mxnet,"
            f" then pip install mxnet-cu117=={mx.__version__}"
        )
    nvidia.memory_bytes()
    return mx.gpu(0)


def load(artifact: Artifact, ctx: mx.Context | None = None) -> MXNetModel:
    """Load onto the first GPU, or another `ctx`. Raises `OutOfMemory`, `InvalidRequest`."""
    ctx = ctx or _first_gpu()
    with out_of_memory(ctx, f"{artifact.fp32_bytes} bytes of weights"):
        return MXNetModel(artifact, ctx)
