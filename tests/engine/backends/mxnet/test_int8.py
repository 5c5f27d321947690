"""MXNet with int8 weights: how far it is from fp32, what it keeps on the disk, and its products on
lesser processors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engine import accuracy
from benchmarks.random_model import demo
from engine import backends
from engine.artifacts.artifact import Artifact
from engine.artifacts.open import open_artifact
from engine.backends.interface import BackendModel
from engine.prepared import int8
from tests.engine.models import make_artifact

ROOT = Path(__file__).resolve().parents[4]
IDS = np.arange(2, 90)


def logits(model: BackendModel) -> Any:
    """After a prompt and after two steps."""
    found = [model.extend(model.add_row(), IDS)]
    found += [model.decode(np.array([token]))[0].copy() for token in (7, 8)]
    model.remove_last_row()
    model.close()
    return np.stack(found)


def answer(artifact: Artifact, cache: Path | None = None) -> Any:
    return logits(backends.load(artifact, "mxnet", "int8", cache_dir=cache))


@pytest.mark.parametrize(
    "shape",
    [{"heads": 4}, {"activation": "gelu_new", "dtype": "float16"}, {"units": 60, "vocab": 501}],
    ids=str,
)
def test_the_logits_are_close_to_those_of_fp32(tmp_path: Path, shape: dict[str, Any]) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "모델", **{"heads": 2, **shape}))
    exact = logits(backends.load(artifact, "mxnet", "fp32"))
    assert np.square(answer(artifact) - exact).mean() < 0.06**2 * exact.var()


def test_a_second_load_maps_what_the_first_wrote(tmp_path: Path) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "model", vocab=20_000))
    cache = tmp_path / "준비된"
    first = answer(artifact, cache)
    written = {path: (path.stat().st_ino, path.stat().st_size) for path in cache.glob("*.bin")}
    assert len(written) == 2  # the embedding, which is the head, and the rest

    model = backends.load(artifact, "mxnet", "int8", cache_dir=cache)
    assert sum(length for _, length in model.mapped) == model.weight_bytes
    sizes = sum(size for _, size in written.values())
    assert model.weight_bytes == sizes < 1.2 * artifact.config.num_parameters
    # Admission knows it before, but for what aligns it.
    known = backends.weight_bytes(artifact.config, "mxnet", "int8")
    assert 0 <= sizes - known < 64 * 40
    np.testing.assert_array_equal(logits(model), first)
    assert {path: (path.stat().st_ino, path.stat().st_size) for path in written} == written


@pytest.mark.parametrize("suffix", [".bin", ".json"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, suffix: str) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "model"))
    whole = answer(artifact, tmp_path / "cache")
    for path in (tmp_path / "cache").glob(f"*{suffix}"):
        os.truncate(path, path.stat().st_size // 2)
    np.testing.assert_array_equal(answer(artifact, tmp_path / "cache"), whole)


def test_what_two_models_share_is_stored_once_and_other_weights_are_others(tmp_path: Path) -> None:
    shape = {"vocab": 20_000, "embedding_seed": 5}
    one, other = (make_artifact(tmp_path / name, seed=i, **shape) for i, name in enumerate("가나"))
    found = [answer(open_artifact(path), tmp_path / "cache") for path in (one, other)]
    assert not np.array_equal(*found)
    sizes = sorted(path.stat().st_size for path in (tmp_path / "cache").glob("*.bin"))
    assert [size > int8.OWN_FILE_BYTES for size in sizes] == [False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dongju", "sowol"])
def test_a_fine_tune_writes_as_in_fp32(tmp_path: Path, name: str) -> None:
    prompts = ["나 보기가", "별 하나에 추억과", "산에는 꽃 피네", "죽는 날까지 하늘을"]
    folder = str(demo(name, tmp_path))
    found = accuracy.compare(folder, "mxnet", "int8", prompts, 16)
    assert found["top1_agreement"] >= 0.95
    assert found["relative_logit_error"] < 0.06


# In a process of its own: oneDNN looks at the processor once.
PRODUCTS = """
import numpy as np
from engine.backends.mxnet.int8_products import Product, Scratch, steps

rng = np.random.default_rng(0)
print(steps())
for wide, size in ((768, 1152), (3072, 768), (768, 8001), (36, 54), (64, 501)):
    q = rng.integers(-127, 128, (size, wide), dtype=np.int8)
    scale, bias = (rng.random(size, dtype=np.float32) for _ in range(2))
    weights = {"w.q": q, "w.scale": scale, "w.bias": bias}
    weights["w.sum"] = q.sum(axis=1).astype(np.float32) * scale
    product = Product(weights, "w", Scratch(33, wide, size))
    x = rng.standard_normal((33, wide), dtype=np.float32)
    x[3], x[4] = 0, 1e-20
    expected = x @ (q * scale[:, None]).T + bias
    alone = np.concatenate([product(row[None]) for row in x])
    assert np.std(alone - expected) < 0.025 * np.std(expected), (wide, size)
    np.testing.assert_array_equal(alone[3], bias)
    for count in (2, 7, 16, 33):
        which = rng.permutation(33)[:count]
        np.testing.assert_array_equal(product(x[which]), alone[which], f"{count} of {wide}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["ALL", "AVX512_CORE", "AVX2", "SSE41"])
def test_products_are_exact_sums_on_any_processor(isa: str) -> None:
    environment = os.environ | {"DNNL_MAX_CPU_ISA": isa}
    command = [sys.executable, "-W", "ignore", "-c", PRODUCTS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, timeout=300, capture_output=True, text=True
    )
    assert int(done.stdout) == 127 or isa == "ALL"
