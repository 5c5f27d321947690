"""MXNet's model for GPUs on a CPU: memory that runs out, and what is said without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import InvalidRequest
from common.mxnet_compat import mx
from engine import backends
from engine.artifacts.open import open_artifact
from tests.engine.models import make_artifact

ROOT = Path(__file__).resolve().parents[4]

# In a process of its own: MXNet's CPU memory is bounded for all of a process.
SHORT_OF_MEMORY = """
import gc, resource, sys
import numpy as np
from engine.artifacts.open import open_artifact
from engine.backends.mxnet import model as mxnet_model
from common.errors import OutOfMemory
from common.memory import return_freed_memory
from common.mxnet_compat import mx
from tests.engine.backends.running import append, status_bytes

wide, large = map(open_artifact, sys.argv[1:])
load = lambda artifact: mxnet_model.load(artifact, mx.cpu())
model = load(wide)
prompt = [i % 500 for i in range(1100)]
expected = append(model, model.open_row(), prompt)
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
kept = short(large.fp32_bytes // 2, lambda: load(large))
print("kept", kept < large.fp32_bytes / 4)
rows = [model.open_row() for _ in range(7)]
for row in rows:
    append(model, row, [0, 1, 2])
# A ninth row doubles the buffers, to 76 MB in all: the thread that makes one meets the limit, and
# whoever waits for the logits is told.
rows.append(model.open_row())
short(16 << 20, lambda: append(model, rows[-1], [0, 1, 2]))
for row in model._rows[::-1]:
    model.close_row(row)
again = append(model, model.open_row(), prompt)
print("same", np.array_equal(expected, again))
other = load(large)
print("loads", append(other, other.open_row(), [0, 1, 2]).shape)
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
