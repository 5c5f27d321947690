"""The MXNet backend as a GPU uses it, as far as a CPU can show it, and memory that runs out."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidRequest
from common.memory import return_freed_memory
from common.mxnet_compat import mx
from engine import backends
from engine.artifacts.open import open_artifact
from engine.backends.mxnet.model import MXNetModel
from tests.engine.backends.onnx.test_cpu import status_bytes
from tests.engine.models import make_artifact

ROOT = Path(__file__).resolve().parents[4]


def batch_of_three(model: MXNetModel) -> list[Any]:
    """The logits of rows that join, grow beyond their buffers, move and leave."""
    rng = np.random.default_rng(0)
    found = []
    for length in (60, 9, 33):
        found.append(model.extend(model.add_row(), rng.integers(0, 500, length)))
    found.extend(model.decode(rng.integers(0, 500, 3)).copy() for _ in range(6))
    model.move_row(2, 0)
    model.remove_last_row()
    model.copy_row(0, model.add_row(), 33)
    model.remove_last_row()
    found.extend(model.decode(rng.integers(0, 500, 2)).copy() for _ in range(3))
    model.remove_last_row()
    model.remove_last_row()
    return found


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_weights_as_a_gpu_has_them_compute_what_shards_do(tmp_path: Path, activation: str) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "model", heads=4, activation=activation))
    whole, cut = MXNetModel(artifact, mx.cpu()), MXNetModel(artifact, mx.cpu(), shards=2)
    for ours, theirs in zip(batch_of_three(whole), batch_of_three(cut), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    assert whole.kv_bytes == 0
    whole.close()
    cut.close()


@pytest.fixture(params=["fp32", "int8"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("length", [1, 64, 70])
def test_a_copied_row_goes_on_as_the_other_would_have(
    tmp_path: Path, length: int, precision: str
) -> None:
    model = backends.load(open_artifact(make_artifact(tmp_path / "model")), "mxnet", precision)
    ids = np.random.default_rng(0).integers(0, 500, 100)

    model.extend(model.add_row(), ids[:length])
    alone = [model.decode(np.array([token]))[0].copy() for token in (3, 4, 5)]
    model.remove_last_row()
    model.extend(model.add_row(), ids[:length])
    model.extend(0, ids[length:])
    model.copy_row(0, model.add_row(), length)
    assert [model.length(row) for row in range(2)] == [100, length]
    for token, then in zip((3, 4, 5), alone, strict=True):
        np.testing.assert_array_equal(model.decode(np.array([7, token]))[1], then)
    model.close()


def test_a_row_that_begins_with_kept_pieces_goes_on_bit_for_bit(
    tmp_path: Path, precision: str
) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "model", max_length=512))
    model = backends.load(artifact, "mxnet", precision)
    piece = model.piece
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 500, 3 * piece), rng.integers(0, 500, 4 * piece + 5)
    second[: 2 * piece] = first[: 2 * piece]

    def extend(row: int, ids: Any) -> Any:
        for begin in range(0, len(ids), piece):
            logits = model.extend(row, ids[begin : begin + piece])
        return logits

    model.add_row()
    alone = extend(0, second)
    step = model.decode(np.array([9]))[0].copy()
    model.remove_last_row()
    for row in range(2):
        model.add_row()
        extend(row, first)
    kept = model.keep_row(1, 3 * piece)
    assert kept.num_bytes >= 3 * piece * model.kv_bytes_per_token
    model.remove_last_row()
    model.fill_row(model.add_row(), kept, 2 * piece, last=False)
    assert model.length(1) == 2 * piece
    np.testing.assert_array_equal(extend(1, second[2 * piece :]), alone)
    np.testing.assert_array_equal(model.decode(np.array([3, 9]))[1], step)
    model.close()


# Prompts' lengths lie on both sides of where oneDNN takes another kernel, and of the blocks in
# which keys and values grow.
PROMPTS = (7, 1, 15, 16, 17, 40, 2, 64, 65, 3, 33, 200, 12, 5, 90)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"vocab": 51_201, "units": 768, "heads": 12, "layers": 1},
        {"vocab": 51_200, "units": 96, "heads": 4},
        {"vocab": 50_000, "units": 128, "heads": 4},
        {"vocab": 501, "units": 60, "heads": 3},
        {"vocab": 163, "units": 36, "heads": 2, "activation": "gelu_new"},
    ],
    ids=str,
)
def test_a_row_has_the_same_logits_alone_and_beside_any_others(
    tmp_path: Path, shape: dict[str, Any], precision: str
) -> None:
    """Bit for bit: rows of all lengths, up to the most, that join while others run, and leave."""
    artifact = open_artifact(make_artifact(tmp_path / "model", max_length=250, **shape))
    model = backends.load(artifact, "mxnet", precision)
    rng = np.random.default_rng(0)
    prompts = PROMPTS[: model.max_rows]
    texts = [rng.integers(0, shape["vocab"], length + 2 * len(prompts)) for length in prompts]
    found: list[list[Any]] = [[] for _ in texts]  # logits after the prompt, and after each step

    def prefill(text: int) -> Any:
        return model.extend(model.add_row(), texts[text][: PROMPTS[text]])

    def decode(rows: list[int], at: list[int]) -> Any:
        ids = [texts[text][PROMPTS[text] + i] for text, i in zip(rows, at, strict=True)]
        return model.decode(np.array(ids)).copy()

    rows: list[int] = []  # which text each row is

    def step() -> None:
        logits = decode(rows, [len(found[text]) - 1 for text in rows])
        for text, row in zip(rows, logits, strict=True):
            found[text].append(row)

    for text in range(len(texts)):
        found[text].append(prefill(text))
        rows.append(text)
        step()
    while rows:
        step()
        gone = int(rng.integers(len(rows)))
        model.move_row(len(rows) - 1, gone)
        rows[gone] = rows[-1]
        rows.pop()
        model.remove_last_row()

    for text, together in enumerate(found):
        alone = [prefill(text)]
        alone += [decode([text], [at])[0] for at in range(len(together) - 1)]
        model.remove_last_row()
        np.testing.assert_array_equal(together, alone)
    model.close()


def test_closing_a_model_frees_it_at_once(tmp_path: Path, precision: str) -> None:
    """Python's collector, which does not see a GPU's memory, is not waited for."""
    artifact = open_artifact(make_artifact(tmp_path / "model", units=256, heads=4, vocab=20_000))

    def cycle() -> int:
        model = backends.load(artifact, "mxnet", precision)
        model.extend(model.add_row(), np.arange(9))
        model.close()
        return_freed_memory()
        return status_bytes("RssAnon")

    cycle()
    gc.collect()
    gc.disable()
    try:
        before = cycle()
        after = [cycle() for _ in range(8)][-1]
    finally:
        gc.enable()
    # One model's worth of holes may stay in the heaps of MXNet's threads, not eight.
    assert after - before < 2 * artifact.fp32_bytes


# In a process of its own: MXNet's CPU memory is bounded for all of a process.
SHORT_OF_MEMORY = """
import gc, resource, sys
import numpy as np
from engine.artifacts.open import open_artifact
from engine.backends.mxnet import model as mxnet_model
from common.errors import OutOfMemory
from common.memory import return_freed_memory
from tests.engine.backends.onnx.test_cpu import status_bytes

wide, large = map(open_artifact, sys.argv[1:])
model = mxnet_model.load(wide)
expected = model.extend(model.add_row(), np.arange(1100) % 500)
gc.disable()

def short(room, call):
    before = status_bytes("RssAnon")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + room, limits[1]))
    try:
        call()
    except OutOfMemory as error:
        print(error.message)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return_freed_memory()
    return status_bytes("RssAnon") - before

large.weights  # they are mapped, which is memory of its own
kept = short(large.fp32_bytes // 2, lambda: mxnet_model.load(large))
print("kept", kept < large.fp32_bytes / 4)
for row in range(1, 8):
    model.extend(model.add_row(), np.arange(3))
# A ninth row doubles the buffers, to 76 MB in all: the thread that makes one meets the limit, and
# whoever waits for the logits is told.
row = model.add_row()
short(16 << 20, lambda: model.extend(row, np.arange(3)))
for _ in range(9):
    model.remove_last_row()
again = model.extend(model.add_row(), np.arange(1100) % 500)
print("same", np.array_equal(expected, again))
other = mxnet_model.load(large)
print("loads", other.extend(other.add_row(), np.arange(3)).shape)
"""


@pytest.mark.slow
def test_memory_that_runs_out_is_an_error_of_its_own_and_harms_nobody(tmp_path: Path) -> None:
    wide = make_artifact(tmp_path / "wide", units=512, heads=8, max_length=2048, layers=1)
    large = make_artifact(tmp_path / "large", units=512, heads=8, vocab=40_000)
    command = [sys.executable, "-W", "ignore", "-c", SHORT_OF_MEMORY, wide, large]
    # What glibc holds back for a thread's heap counts already: an array that found room there would
    # not meet the limit. So there is one heap, and large arrays are mapped.
    env = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    # stderr has MXNet's complaint at the end of the process about an error that it told before.
    loading, kept, computing, *rest = result.stdout.splitlines()
    assert "bytes of weights" in loading
    assert "3 more tokens" in computing
    assert [kept, *rest] == ["kept True", "same True", "loads (40000,)"]


@pytest.mark.skipif(mx.runtime.Features().is_enabled("CUDA"), reason="this MXNet has CUDA")
def test_an_mxnet_without_cuda_says_what_to_install(tmp_path: Path) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "model"))
    with pytest.raises(InvalidRequest, match=r"pip install mxnet-cu117==1\.9\.1"):
        backends.load(artifact, "mxnet", "fp32", device="gpu")


def test_on_a_gpu_mxnet_has_fp32_only(tmp_path: Path) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "model"))
    with pytest.raises(InvalidRequest, match="must be one of fp32 for backend mxnet on the gpu"):
        backends.load(artifact, "mxnet", "int8", device="gpu")
