"""Runs a model with MXNet on a CPU or a GPU."""

from __future__ import annotations

from common.errors import InvalidRequest
from common.mxnet_compat import CPU_WORKERS, mx
from engine.artifacts.artifact import Artifact
from engine.backends import nvidia
from engine.backends.interface import CHUNK, BackendModel, Ids, Logits
from engine.backends.mxnet.gpt2 import GPT2
from engine.backends.mxnet.kv_cache import ShardedKVCache, out_of_memory
from engine.backends.mxnet.rows import row_counts

MAX_ROWS = 32  # on a GPU


class MXNetModel(BackendModel):
    """On `engine.backends.mxnet.gpt2`."""

    _cache: ShardedKVCache

    def __init__(self, artifact: Artifact, ctx: mx.Context, shards: int = 0) -> None:
        """`shards` side by side, see `GPT2`; 0: the weights as they are, as a GPU wants."""
        self.config = artifact.config
        self.piece, self.keeps = CHUNK[ctx.device_type], True
        self.weight_bytes = artifact.fp32_bytes
        self.kv_bytes_per_token = artifact.config.kv_bytes_per_token
        self.max_rows = row_counts()[-1] if ctx.device_type == "cpu" else MAX_ROWS
        self._ctx = ctx
        self._model = GPT2(artifact.config, artifact.weights, ctx, shards)
        self._model.wait()  # now, not at the first request, it fails if it does
        self._cache = ShardedKVCache(artifact.config, ctx, self._model.num_shards)

    def extend(self, row: int, ids: Ids) -> Logits:
        logits: Logits = self._run(row, row + 1, ids[None, :])[0]
        return logits

    def decode(self, ids: Ids) -> Logits:
        return self._run(0, len(ids), ids[:, None])

    def _run(self, begin: int, end: int, ids: Ids) -> Logits:
        self._cache.select(begin, end)
        with out_of_memory(self._ctx, f"{ids.size} more tokens"):
            logits = self._model(mx.nd.array(ids, ctx=self._ctx), self._cache, True)
            result: Logits = logits.asnumpy()
        return result

    def close(self) -> None:
        del self._model, self._cache
        self._ctx.empty_cache()  # MXNet keeps a GPU's freed memory, for itself


def _shards(heads: int, cores: int) -> int:
    """As many as there are cores, but so that each has the same number of heads."""
    return max(n for n in range(1, min(heads, cores) + 1) if heads % n == 0)


def _first_gpu() -> mx.Context:
    """Raises `InvalidRequest` that says what is missing."""
    if not mx.runtime.Features().is_enabled("CUDA"):
        raise InvalidRequest(
            f"the mxnet {mx.__version__} that is installed cannot use a GPU: pip uninstall mxnet,"
            f" then pip install mxnet-cu117=={mx.__version__}"
        )
    nvidia.memory_bytes()
    return mx.gpu(0)


def load(artifact: Artifact, *, device: str = "cpu") -> MXNetModel:
    """Loads the weights onto `device`, `cpu` or `gpu`.

    Raises `OutOfMemory`, and `InvalidRequest` where there is no GPU or no MXNet that can use it.
    """
    on_cpu = device == "cpu"
    ctx = mx.cpu() if on_cpu else _first_gpu()
    shards = _shards(artifact.config.num_heads, CPU_WORKERS) if on_cpu else 0
    with out_of_memory(ctx, f"{artifact.fp32_bytes} bytes of weights"):
        return MXNetModel(artifact, ctx, shards)
