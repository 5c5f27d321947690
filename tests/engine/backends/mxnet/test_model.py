"""MXNet's model for GPUs on a CPU: memory that runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import OutOfMemory
from engine.artifacts.artifact import Artifact
from engine.artifacts.open import open_artifact
from engine.backends import dense
from tests.engine.backends.running import address_space, append, greedy
from tests.engine.models import make_artifact
from tests.lazy import mx, mxnet_model

# Bytes of address space: plenty for everything but an array of `HUGE`. With 1 GiB, MXNet's OpenBLAS
# now and then finds no buffer for a thread of its own, and calls address 0.
FREE = 3 << 30
HUGE = (1 << 31) - 256  # float32, near the most elements of an array of MXNet's


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return open_artifact(make_artifact(tmp_path / "model"))


@pytest.fixture
def limited() -> Iterator[None]:
    """An array of `HUGE` does not fit into this process's address space."""
    with address_space(FREE):
        yield
    with contextlib.suppress(mx.MXNetError):  # else raised once more when the process ends
        mx.nd.waitall()


@pytest.mark.usefixtures("limited")
def test_weights_that_do_not_fit_fail(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """MXNet's own failure to allocate, which its threads meet after the call that asked for it."""
    model = mxnet_model.load(artifact, mx.cpu())
    with monkeypatch.context() as patched:
        patched.setattr(mxnet_model.GPT2, "_array", lambda *_: mx.nd.zeros((HUGE,)))
        with pytest.raises(OutOfMemory, match=r"cpu\(0\) has no room for \d+ bytes of weights"):
            mxnet_model.load(artifact, mx.cpu())
    other = mxnet_model.load(artifact, mx.cpu())
    assert greedy(other, [1, 2, 3], 5) == greedy(model, [1, 2, 3], 5)


@pytest.mark.usefixtures("limited")
def test_a_cache_that_cannot_grow_fails(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mxnet_model.load(artifact, mx.cpu())
    expected = greedy(model, [1, 2, 3], 5)
    rows = [model.open_row() for _ in range(2)]
    append(model, rows[0], [1, 2, 3])
    with monkeypatch.context() as patched:
        huge = (2, HUGE // (4 * artifact.config.units))
        patched.setattr(dense.DenseCache, "shape_for", lambda *_: huge)
        with pytest.raises(OutOfMemory, match="has no room for 65 more tokens"):
            append(model, rows[1], [0] * (dense.BLOCK + 1))
    for row in rows[::-1]:
        model.close_row(row)
    assert greedy(model, [1, 2, 3], 5) == expected


def test_a_pass_that_fails_at_its_end_appends_nothing(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXNet's operators fail where their result is waited for. The pass is run again then."""
    model = mxnet_model.load(artifact, mx.cpu())
    expected = append(model, model.open_row(), [1, 2, 3])
    row = model.open_row()

    def asnumpy(_: mx.nd.NDArray) -> None:
        raise mx.MXNetError("Check failed: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(mx.nd.NDArray, "asnumpy", asnumpy)
        with pytest.raises(OutOfMemory):
            append(model, row, [1, 2, 3])
    assert row.length == 0
    assert (append(model, row, [1, 2, 3]) == expected).all()
