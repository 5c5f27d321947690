"""The contract of all backends, those for GPUs on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from common.errors import InvalidRequest, PromptTooLong
from common.memory import return_freed_memory
from engine import backends
from engine.artifacts.artifact import Artifact
from engine.artifacts.open import open_artifact
from engine.backends.interface import BackendModel, Piece
from engine.backends.onnx import gpu
from engine.backends.onnx.device import CPU
from tests.engine.backends.running import append, greedy, single, some_ids, status_bytes
from tests.engine.engines import uncached_model
from tests.engine.hugging_face import make_hugging_face
from tests.engine.models import make_artifact
from tests.lazy import mx, mxnet_model

Load = Callable[[Artifact], BackendModel]

LOADS: dict[str, Load] = {
    "native int8": lambda artifact: backends.load(artifact, "native", "int8"),
    "native fp32": lambda artifact: backends.load(artifact, "native", "fp32"),
    "mxnet int8": lambda artifact: backends.load(artifact, "mxnet", "int8"),
    "mxnet gpu": lambda artifact: mxnet_model.load(artifact, mx.cpu()),
    "onnxruntime gpu": partial(gpu.load, provider=CPU),
}
# Of logits that differ by units: on a GPU the number of rows changes the order of sums. The others
# are the same, bit for bit.
TOLERANCE = {"mxnet gpu": 1e-4, "onnxruntime gpu": 5e-3}
# Of logits, by their spread, from those of a pass in fp32 over the whole text. int8: a block of
# 64 normal numbers has its maximum near 2.5 sigma, so a step is 0.02 sigma and the rounding error
# 0.006 sigma, of weights and of inputs: 0.8% for a product. A logit sees up to nine products in a
# row: 2.4%, and 5% leaves a factor of two. fp16: a rounding is off by 2^-12 at most on average, and
# a logit sees some ten of them in a row, of weights and of products.
ROUNDING = {"native int8": 0.05, "mxnet int8": 0.05, "onnxruntime gpu": 0.005}
EXACT = 1e-5
SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"activation": "gelu_new", "dtype": "float16"},
    {"units": 192, "heads": 4},  # heads of 48
    {"units": 60, "heads": 6, "layers": 1},  # heads of 10
    {"tied": True, "dtype": "bfloat16"},  # of Hugging Face's
    {"tied": False, "dtype": "bfloat16"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def artifact_of(folder: Path, **sizes: Any) -> Artifact:
    path = folder / "-".join(["model", *(f"{k}{v}" for k, v in sizes.items())])
    if path.exists():
        return open_artifact(path)
    if "tied" not in sizes:
        return open_artifact(make_artifact(path, **sizes))
    config = {"tie_word_embeddings": sizes.pop("tied")}
    return open_artifact(make_hugging_face(path, config=config, **sizes))


@pytest.fixture(params=LOADS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, folder: Path) -> Iterator[BackendModel]:
    made = LOADS[name](artifact_of(folder))
    yield made
    made.close()


def assert_same(now: Any, then: Any, name: str) -> None:
    np.testing.assert_allclose(now, then, atol=TOLERANCE.get(name, 0), rtol=0)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_logits_are_those_of_a_pass_over_the_whole_text(
    name: str, folder: Path, sizes: dict[str, Any]
) -> None:
    artifact, ids = artifact_of(folder, **sizes), some_ids(72)
    whole = uncached_model(artifact.path)(mx.nd.array(np.array(ids)[None])).asnumpy()[0]
    with closing(LOADS[name](artifact)) as model:
        found = np.array(single(model, [ids[:70], [ids[70]], [ids[71]]]))
    error = (found - whole[69:]).std() / whole[69:].std()
    assert error < ROUNDING.get(name, EXACT)
    assert name not in ROUNDING or error > EXACT


def test_a_row_is_the_same_alone_and_beside_others(model: BackendModel, name: str) -> None:
    """Rows of all lengths, which join while others run, and leave."""
    rng = np.random.default_rng(0)
    texts = [some_ids(length + 12, seed=length) for length in (3, 40, 1, 17, 64, 33, 2)]
    open_rows: dict[int, Any] = {}
    found: list[list[Any]] = [[] for _ in texts]
    for begun in range(len(texts) + 8):
        pieces = {i: Piece(r, [texts[i][r.length]]) for i, r in open_rows.items()}
        if begun < len(texts):
            open_rows[begun] = row = model.open_row()
            pieces[begun] = Piece(row, texts[begun][:-12])
        logits = model.run(list(pieces.values()))
        for i, of_row in zip(pieces, logits, strict=True):
            found[i].append(of_row.copy())
        if begun >= 5 and open_rows:
            gone = int(rng.choice(list(open_rows)))
            model.close_row(open_rows.pop(gone))
    for row in open_rows.values():
        model.close_row(row)
    assert model.kv_bytes == 0
    for text, together in zip(texts, found, strict=True):
        calls = [text[:-12], *([token] for token in text[-12:])][: len(together)]
        for now, then in zip(together, single(model, calls), strict=True):
            assert_same(now, then, name)


def test_logits_of_all_tokens_are_those_of_each(model: BackendModel, name: str) -> None:
    ids = some_ids(9)
    row, other = model.open_row(), model.open_row()
    together = model.run([Piece(other, [5]), Piece(row, ids, len(ids))]).copy()[1:]
    model.close_row(other)
    model.close_row(row)
    for now, then in zip(together, single(model, [[token] for token in ids]), strict=True):
        assert_same(now, then, name)


@pytest.mark.parametrize("length", [1, 16, 40])
def test_a_row_begins_like_another_one(model: BackendModel, name: str, length: int) -> None:
    first, second = some_ids(50), some_ids(50, seed=1)
    source = model.open_row()
    append(model, source, first)
    row = model.open_row(source, length)
    assert row.length == length
    pieces = [Piece(source, second[:3]), Piece(row, second[3:6])]
    logits = [of_row.copy() for of_row in model.run(pieces)]
    model.close_row(source)
    last = append(model, row, [7])
    model.close_row(row)
    assert_same(logits[0], single(model, [first, second[:3]])[1], name)
    expected = single(model, [first[:length], second[3:6], [7]])
    assert_same(logits[1], expected[1], name)
    assert_same(last, expected[2], name)


def test_a_truncated_row_goes_on_from_there(model: BackendModel, name: str) -> None:
    ids = some_ids(40)
    row = model.open_row()
    append(model, row, ids)
    model.truncate(row, 21)
    assert_same(append(model, row, [7, 8]), single(model, [ids[:21], [7, 8]])[1], name)
    model.close_row(row)


def test_what_cannot_be_computed_is_refused_and_changes_no_row(model: BackendModel) -> None:
    row, other = model.open_row(), model.open_row()
    for ids in ([1, -1], [500], [1 << 40]):
        with pytest.raises(InvalidRequest, match="from 0 to 499"):
            model.run([Piece(other, [3]), Piece(row, ids)])
    append(model, row, some_ids(128))
    with pytest.raises(PromptTooLong, match="129"):
        model.run([Piece(other, [3]), Piece(row, [1])])
    assert (row.length, other.length) == (128, 0)
    model.close_row(row)
    model.close_row(other)


def test_rows_take_what_admission_counted(model: BackendModel) -> None:
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
    model: BackendModel, name: str, order: list[int]
) -> None:
    """Where all rows of a GPU's cache are taken, none is free to swap two others."""
    texts = [some_ids(9 + i, seed=i) for i in range(4)]
    expected = [single(model, [ids[:-1], ids[-1:]])[-1] for ids in texts]
    rows = [model.open_row() for _ in texts]
    for row, ids in zip(rows, texts, strict=True):
        append(model, row, ids[:-1])
    needed = model.kv_bytes_for([len(ids) for ids in texts])
    logits = model.run([Piece(rows[i], texts[i][-1:]) for i in order])
    assert model.kv_bytes == needed
    for i, found in zip(order, logits, strict=True):
        assert_same(found, expected[i], name)
    for row in rows:
        model.close_row(row)


def test_closing_a_model_frees_it_at_once(name: str, tmp_path: Path) -> None:
    """Python's collector, which does not see a GPU's memory, is not waited for."""
    path = make_artifact(tmp_path / "model", units=256, heads=4, vocab=20_000)
    artifact = open_artifact(path)

    def cycle() -> int:
        model = LOADS[name](open_artifact(path))
        greedy(model, some_ids(16), 3)
        model.close()
        return_freed_memory()
        return status_bytes("RssAnon")

    for _ in range(2):
        cycle()
    gc.collect()
    gc.disable()
    try:
        before = cycle()
        after = [cycle() for _ in range(4)][-1]
    finally:
        gc.enable()
    assert after - before < 2 * artifact.fp32_bytes  # not four models


@pytest.mark.parametrize(
    ("backend", "precision", "device", "message"),
    [
        ("mxnet", "fp32", "gpu", r"pip install mxnet-cu117==1\.9\.1"),
        ("mxnet", "int8", "gpu", "must be one of fp32 for backend mxnet on the gpu"),
        ("mxnet", "int8-kv8", "cpu", "precision is 'int8-kv8'"),
        ("onnxruntime", "fp16", "gpu", r"pip install 'onnxruntime-gpu\[cuda,cudnn\]==\d"),
        ("onnxruntime", "int8", "gpu", "must be one of fp16 for backend onnxruntime"),
        ("onnxruntime", "fp32", "cpu", "must be one of mxnet, native on the cpu"),
    ],
)
def test_a_backend_that_is_not_installed_or_a_wrong_precision_is_refused(
    folder: Path, backend: str, precision: str, device: str, message: str
) -> None:
    on_gpus = {
        "mxnet": mx.runtime.Features().is_enabled("CUDA"),
        "onnxruntime": "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
    }
    if "pip install" in message and on_gpus[backend]:
        pytest.skip("it is a build for GPUs")
    with pytest.raises(InvalidRequest, match=message):
        backends.load(artifact_of(folder), backend, precision, device=device)
