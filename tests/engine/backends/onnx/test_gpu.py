"""The onnxruntime backend for GPUs, all of it on the CPU provider: its precision, memory, and the
engine on it. `test_contract` compares its rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError
from engine import backends
from engine.artifacts.artifact import EMBEDDING, OUTPUT, Artifact
from engine.artifacts.open import open_artifact
from engine.backends.interface import BackendModel, Piece
from engine.backends.onnx import gpu
from engine.backends.onnx.device import CPU, buffers
from engine.backends.onnx.gpu import OnnxGpuModel
from engine.engine import Engine
from engine.text.sentencepiece import SentencePieceTokenizer
from testbed import random_model
from tests.engine.backends.running import append, greedy, single, some_ids
from tests.engine.conftest import NewEngine
from tests.engine.engines import Request
from tests.engine.hugging_face import make_hugging_face
from tests.engine.models import make_artifact, params_of, write_params
from tests.processes import python

pytestmark = pytest.mark.slow

LINES = ("나 보기가 역겨워", "산에는 꽃 피네", "죽는 날까지 하늘을 우러러")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return open_artifact(make_artifact(tmp_path_factory.mktemp("model")))


def fp32_model(artifact: Artifact) -> BackendModel:
    return backends.load(artifact, "native", "fp32")


@pytest.fixture
def model(artifact: Artifact) -> Iterator[OnnxGpuModel]:
    made = gpu.load(artifact, CPU)
    yield made
    made.close()


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"activation": "gelu_new"},
        {"dtype": "float16"},
        {"units": 60, "heads": 6, "layers": 1},  # heads of 10
        {"tie_word_embeddings": True},  # of Hugging Face's, in bfloat16
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_fp16_is_close_to_fp32(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Within 0.5% of the logits' spread: a rounding to fp16 is off by 2^-12 at most on average, and
    a logit sees some ten of them in a row, of weights and of products."""
    if "tie_word_embeddings" in sizes:
        artifact = open_artifact(make_hugging_face(tmp_path, dtype="bfloat16", config=sizes))
        assert artifact.config.tie_word_embeddings is sizes["tie_word_embeddings"]
    else:
        artifact = open_artifact(make_artifact(tmp_path / "model", **sizes))
    half, fp32 = gpu.load(artifact, CPU), fp32_model(artifact)
    calls = [some_ids(70), [7], [8]]
    for ours, theirs in zip(single(half, calls), single(fp32, calls), strict=True):
        assert 0 < (ours - theirs).std() < 0.005 * theirs.std()
    assert half.weight_bytes < 0.6 * 4 * artifact.config.num_parameters  # padding, LayerNorms
    half.close()
    fp32.close()


@pytest.mark.parametrize("name", ["sowol", "dongju"])
def test_real_text_is_that_of_fp32(tmp_path: Path, name: str) -> None:
    artifact = open_artifact(random_model.demo(name, tmp_path))
    tokenizer = SentencePieceTokenizer(artifact.tokenizer_file)
    half, fp32 = gpu.load(artifact, CPU), fp32_model(artifact)
    for line in LINES:
        prompt = tokenizer.encode(line)
        assert greedy(half, prompt, 60) == greedy(fp32, prompt, 60)
    half.close()
    fp32.close()


def test_the_cache_takes_what_admission_counted(model: OnnxGpuModel) -> None:
    for lengths in ([1], [64], [65], [128, 3], [1] * 5, [100, 2, 128]):
        needed = model.kv_bytes_for(lengths)
        rows = [model.open_row() for _ in lengths]
        for row, length in zip(rows, lengths, strict=True):
            append(model, row, some_ids(length))
        assert model.kv_bytes == needed == model.kv_bytes_for(lengths)
        for row in rows:
            model.close_row(row)
        assert model.kv_bytes == model.kv_bytes_for([]) == 0


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [3, 1, 2]])
def test_no_order_of_the_rows_takes_more_than_admission_counted(
    model: OnnxGpuModel, order: list[int]
) -> None:
    """Where all rows of the cache are taken, none is free to swap two others."""
    texts = [some_ids(9 + i, seed=i) for i in range(4)]
    expected = [single(model, [ids[:-1], ids[-1:]])[-1] for ids in texts]
    rows = [model.open_row() for _ in texts]
    for row, ids in zip(rows, texts, strict=True):
        append(model, row, ids[:-1])
    needed = model.kv_bytes_for([len(ids) for ids in texts])
    logits = model.run([Piece(rows[i], texts[i][-1:]) for i in order])
    assert model.kv_bytes == needed == model.kv_bytes_for([64] * 4)
    for i, found in zip(order, logits, strict=True):
        np.testing.assert_allclose(found, expected[i], atol=5e-3, rtol=0)
    for row in rows:
        model.close_row(row)


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
    fp32 = fp32_model(open_artifact(path))
    for request in requests:
        request.wait()
        assert request.error is None
        assert request.ids() == greedy(fp32, request.prompt, len(request.ids()))
    assert engine.models()[0]["steps"] < sum(len(r.ids()) for r in requests) / 2
    assert engine.statistics()["kv_bytes"] == 0
    fp32.close()
