"""Runs a model with MXNet on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from engine.artifacts import Artifact
from engine.backends import Ids, Logits
from engine.errors import OutOfMemory
from engine.models.gpt2_mxnet import GPT2, KVCache
from engine.mxnet_compat import CPU_WORKERS, mx

MAX_ROWS = 32


class MXNetModel:
    """`engine.backends.BackendModel` on `engine.models.gpt2_mxnet`."""

    max_rows = MAX_ROWS

    def __init__(self, artifact: Artifact, ctx: mx.Context) -> None:
        self.config = artifact.config
        self.weight_bytes = artifact.fp32_bytes
        self.kv_bytes_per_token = artifact.config.kv_bytes_per_token
        self._ctx = ctx
        self._model = GPT2(artifact.config)
        self._model.collect_params().setattr("grad_req", "null")  # no room for gradients
        for name, parameter in self._model._collect_params_with_prefix().items():
            if name in artifact.weights:  # the tied projection is the embedding itself
                parameter.initialize(mx.init.Zero(), ctx=ctx)
                parameter.set_data(mx.nd.array(artifact.weights[name], dtype="float32", ctx=ctx))
        if ctx.device_type == "cpu":
            self._model.shard(_shards(artifact.config.num_heads, CPU_WORKERS))
        self._cache = KVCache(artifact.config, ctx, self._model.num_shards)

    def add_row(self) -> int:
        return self._cache.add_row()

    def extend(self, row: int, ids: Ids) -> Logits:
        logits: Logits = self._run(row, row + 1, ids[None, :])[0]
        return logits

    def decode(self, ids: Ids) -> Logits:
        return self._run(0, len(ids), ids[:, None])

    def _run(self, begin: int, end: int, ids: Ids) -> Logits:
        self._cache.select(begin, end)
        try:
            logits = self._model(mx.nd.array(ids, ctx=self._ctx), self._cache, True)
            result: Logits = logits.asnumpy()
        except mx.MXNetError as error:
            if "memory" not in str(error).lower():
                raise
            raise OutOfMemory(f"{self._ctx} has no room for {end - begin} more rows") from error
        return result

    def move_row(self, source: int, target: int) -> None:
        self._cache.move_row(source, target)

    def remove_last_row(self) -> None:
        self._cache.remove_last_row()

    def length(self, row: int) -> int:
        return self._cache.lengths[row]

    def kv_bytes_for(self, lengths: Sequence[int]) -> int:
        return self._cache.num_bytes_for(lengths)

    @property
    def kv_bytes(self) -> int:
        return self._cache.num_bytes

    def close(self) -> None:
        del self._model, self._cache
        self._ctx.empty_cache()


def _shards(heads: int, cores: int) -> int:
    """As many as there are cores, but so that each has the same number of heads."""
    return max(n for n in range(1, min(heads, cores) + 1) if heads % n == 0)


def load(artifact: Artifact, *, device: str = "cpu") -> MXNetModel:
    """Loads the weights onto `device`, `cpu` or `gpu`. Raises `OutOfMemory`."""
    try:
        return MXNetModel(artifact, mx.gpu(0) if device == "gpu" else mx.cpu())
    except mx.MXNetError as error:
        if "memory" not in str(error).lower():
            raise
        raise OutOfMemory(
            f"{device} has no room for {artifact.fp32_bytes} bytes of weights"
        ) from error
