"""The onnxruntime backend for GPUs, all of it on the CPU provider: memory, and the engine on it.

`test_contract` compares its logits, rows, and what they take.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.errors import ArtifactError
from engine import backends
from engine.artifacts.artifact import EMBEDDING, OUTPUT
from engine.artifacts.open import open_artifact
from engine.backends.onnx import gpu
from engine.backends.onnx.device import CPU, buffers
from engine.engine import Engine
from testbed import random_model
from tests.engine.adapters import make_adapter
from tests.engine.backends.running import greedy
from tests.engine.conftest import NewEngine
from tests.engine.engines import Request
from tests.engine.hugging_face import make_hugging_face
from tests.engine.models import make_artifact, params_of, write_params
from tests.processes import python

pytestmark = pytest.mark.slow

LINES = ("나 보기가 역겨워", "산에는 꽃 피네", "죽는 날까지 하늘을 우러러")


def test_buffers_grow_from_the_corner_and_are_zero_elsewhere() -> None:
    moved = buffers(CPU, 1)
    rng = np.random.default_rng(0)
    # Every pattern of bits, NaNs as well: they are two fp16 each, not numbers.
    old = rng.integers(0, 2**32, (2, 3, 4, 5), dtype=np.uint32).view(np.float32)
    new = moved.grow(moved.grow(old, (2, 3, 4, 5)), (4, 3, 6, 5)).numpy().view(np.uint32)
    np.testing.assert_array_equal(new[:2, :, :4], old.view(np.uint32))
    assert not new[2:].any()
    assert not new[:, :, 4:].any()


# In a process of its own: the arena that it bounds is one for a whole process.
SHORT_OF_MEMORY = """
import sys
import numpy as np
from dataclasses import replace
from engine.artifacts.open import open_artifact
from engine.backends.onnx import gpu
from engine.backends.onnx.device import CPU
from common.errors import OutOfMemory
from tests.engine.backends.running import append

provider = replace(CPU, limit_bytes=52 << 20)
first, second = (gpu.load(open_artifact(sys.argv[1]), provider) for _ in range(2))
rows = [first.open_row(), second.open_row()]
expected = append(first, rows[0], list(range(100)))
append(second, rows[1], list(range(50)))

more = []
try:
    while True:
        more.append(second.open_row())
        append(second, more[-1], list(range(300)))
except OutOfMemory as error:
    print(error.message)
print("rows", 0 < len(more) < 32, "within", second.kv_bytes <= provider.limit_bytes)

# Its rows are closed, as the engine does, and both go on.
for row in [*more, rows[1]]:
    second.close_row(row)
step = append(first, rows[0], [1])
row = second.open_row()
same = np.array_equal(append(second, row, list(range(100))), expected)
print("same", same, np.array_equal(append(second, row, [1]), step))

# Pieces of many sizes lie free in the arena now. One of nearly all of it needs them joined.
first.close_row(rows[0])
second.close_row(row)
rows = [first.open_row() for _ in range(16)]
for row in rows:
    append(first, row, [0, 1, 2])
for _ in range(10):
    append(first, rows[0], list(range(50)))
print("large", first.kv_bytes > 0.6 * provider.limit_bytes)
"""


def test_memory_that_runs_out_is_an_error_of_its_own_and_ends_nothing_else(tmp_path: Path) -> None:
    path = make_artifact(tmp_path / "model", layers=4, units=256, heads=4, max_length=1024)
    result = python("-c", SHORT_OF_MEMORY, str(path))
    assert result.returncode == 0, result.stderr
    message, *rest = result.stdout.splitlines()
    assert "no memory" in message
    assert rest == ["rows True within True", "same True True", "large True"]


def test_weights_beyond_fp16_are_refused(tmp_path: Path) -> None:
    path = make_artifact(tmp_path / "model")
    weights = params_of(path)
    weights[EMBEDDING][7, 7] = weights[OUTPUT][7, 7] = 70_000
    write_params(path / "kogpt2.params", weights)
    with pytest.raises(ArtifactError, match=r"_embed\.weight.* 65504, .* use the mxnet backend"):
        gpu.load(open_artifact(path), CPU)


# The engine on it


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, new_engine: NewEngine) -> Engine:
    """An engine as with ENGINE_DEVICE=gpu, on the CPU provider."""
    load = gpu.load
    monkeypatch.setattr(gpu, "load", lambda artifact: load(artifact, CPU))
    return new_engine(backend="onnxruntime", device="gpu", memory_mib=8, max_rows=8, overcommit=1)


def test_the_engine_batches_requests_in_fp16(engine: Engine, tmp_path: Path) -> None:
    path = random_model.demo("sowol", tmp_path)
    model = engine.load("model", str(path)).core
    assert model.compute is not None
    fp16_bytes = 2 * model.compute.config.num_parameters
    assert (model.precision, model.reserved_bytes) == ("fp16", fp16_bytes)
    assert model.compute.weight_bytes <= 1.05 * fp16_bytes
    requests = [
        Request(engine, "model", line[: 4 + i], max_new_tokens=8 + 4 * i)
        for i, line in enumerate(LINES * 5)
    ]
    fp32 = backends.load(open_artifact(path), "native", "fp32")
    for request in requests:
        request.wait()
        assert request.error is None
        assert request.ids() == greedy(fp32, request.prompt, len(request.ids()))
    assert engine.models()[0]["steps"] < sum(len(r.ids()) for r in requests) / 2
    assert engine.statistics()["kv_bytes"] == 0
    fp32.close()


def test_a_classifier_is_refused_whole_and_as_an_adapter_and_leaves_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    whole = make_hugging_face(tmp_path / "감정", labels=["부정", "긍정"])
    base = make_hugging_face(tmp_path / "글")
    head = {"base_model.model.score.weight": np.eye(2, 64, dtype=np.float32)}
    adapter = make_adapter(
        tmp_path / "글-감정", base, config={"task_type": "SEQ_CLS"}, weights=head
    )
    engine.load("글", str(base))
    before = engine.statistics()
    for path, of_base in ((whole, None), (adapter, str(base))):
        with pytest.raises(ArtifactError, match="is a classifier, which needs a CPU"):
            engine.load(path.name, str(path), base=of_base)
    assert engine.statistics() | {"longest_step_s": 0} == before | {"longest_step_s": 0}
    assert len(Request(engine, "글", "산에는 꽃 피네", max_new_tokens=4).wait().ids()) == 4
