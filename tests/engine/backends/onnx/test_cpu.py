"""The onnxruntime backend against the MXNet one, and the rows of a batch against single runs."""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidRequest, OutOfMemory, PromptTooLong
from common.memory import return_freed_memory
from engine import backends
from engine.artifacts.artifact import Artifact
from engine.artifacts.open import open_artifact
from engine.backends import mapping
from engine.backends.interface import CHUNK, BackendModel
from engine.backends.mapped_kv_cache import MAX_ROWS, PAGE, MappedKVCache
from engine.backends.onnx import cpu, gpu, int8_kv
from engine.backends.onnx.cpu import PIECE
from engine.backends.onnx.device import CPU
from tests.engine.models import make_artifact

VOCAB = 500
KV8 = (
    pytest.mark.slow,
    pytest.mark.skipif(not int8_kv.is_supported(), reason="onnxruntime lacks it"),
)
INT8 = ("int8", pytest.param("int8-kv8", marks=KV8))
PRECISIONS = ("fp32", *INT8, "fp16")
SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"activation": "gelu_new"},
    {"dtype": "float16"},
    {"units": 192, "heads": 4, "prefix": "kogpt2."},  # heads of 48
    {"units": 60, "heads": 6, "layers": 1},  # heads of 10, a width that no block divides
)


@dataclass
class Models:
    """Small models made once for each size; all that were loaded are closed at the end."""

    folder: Path
    loaded: list[BackendModel] = field(default_factory=list)

    def artifact(self, **sizes: Any) -> Artifact:
        path = self.folder / "-".join(["model", *(f"{k}{v}" for k, v in sizes.items())])
        return open_artifact(path if path.exists() else make_artifact(path, **sizes))

    def load(self, precision: str, **sizes: Any) -> BackendModel:
        artifact = self.artifact(**sizes)
        model: BackendModel
        if precision == "fp16":  # what runs on a GPU, on the CPU
            model = gpu.load(artifact, CPU)
        else:
            model = cpu.load(artifact, precision, cache_dir=self.folder / "cache")
        self.loaded.append(model)
        return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("models"))
    yield made
    for model in made.loaded:
        model.close()


def assert_same(now: Any, then: Any, precision: str) -> None:
    """Bit for bit; in fp16 but for roundings, of logits that differ by units: neither cuBLAS nor
    onnxruntime's CPU adds up the same way for every number of rows there."""
    if precision == "fp16":
        np.testing.assert_allclose(now, then, atol=5e-3, rtol=0)
    else:
        np.testing.assert_array_equal(now, then)


def some_ids(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def single(model: BackendModel, calls: list[list[int]]) -> list[Any]:
    """The logits after each call in a batch of one: lists of one id are decode steps."""
    row = model.add_row()
    assert row == 0
    logits = []
    for i, ids in enumerate(calls):
        prefill = i == 0 or len(ids) > 1
        answer = model.extend(0, np.array(ids)) if prefill else model.decode(np.array(ids))[0]
        logits.append(answer.copy())
    model.remove_last_row()
    return logits


def greedy(model: BackendModel, ids: Any, steps: int) -> list[int]:
    model.add_row()
    tokens = [int(model.extend(0, ids).argmax())]
    while len(tokens) < steps:
        tokens.append(int(model.decode(np.array(tokens[-1:]))[0].argmax()))
    model.remove_last_row()
    return tokens


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MXNet meets old names of numpy's
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fp32_equals_the_mxnet_backend(models: Models, sizes: dict[str, Any]) -> None:
    from engine.backends.mxnet import model as mxnet_model

    model, reference = models.load("fp32", **sizes), mxnet_model.load(models.artifact(**sizes))
    calls = [some_ids(9).tolist(), *([t] for t in some_ids(8, seed=1).tolist())]
    for ours, theirs in zip(single(model, calls), single(reference, calls), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    assert greedy(model, some_ids(9), 64) == greedy(reference, some_ids(9), 64)
    reference.close()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("precision", INT8)
def test_int8_is_close_to_fp32(models: Models, precision: str, sizes: dict[str, Any]) -> None:
    """Within 5% of the logits' spread.

    A block of 64 normal numbers has its maximum near 2.5 sigma, so a step is 0.02 sigma and the
    rounding error 0.006 sigma, of weights and of inputs: 0.8% for a product. A logit sees up to
    nine products in a row: 2.4%, and 5% leaves a factor of two.
    """
    calls = [some_ids(40).tolist(), [7], [8]]
    for int8, fp32 in zip(
        single(models.load(precision, **sizes), calls),
        single(models.load("fp32", **sizes), calls),
        strict=True,
    ):
        assert 0 < (int8 - fp32).std() < 0.05 * fp32.std()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_does_not_depend_on_who_shares_its_batch(
    models: Models, precision: str, sizes: dict[str, Any]
) -> None:
    model = models.load(precision, **sizes)
    prompts = [
        some_ids(length, seed=length).tolist() for length in (3, 40, 1, 17, 90, 5, 64, 33, 2)
    ]
    steps = [some_ids(len(prompts), seed=100 + i) for i in range(5)]
    alone = [
        single(model, [prompt, *([int(ids[row])] for ids in steps)])
        for row, prompt in enumerate(prompts)
    ]
    for row, prompt in enumerate(prompts):
        assert model.add_row() == row
        assert_same(model.extend(row, np.array(prompt)), alone[row][0], precision)
    for i, ids in enumerate(steps):
        together = model.decode(ids)
        for row in range(len(prompts)):
            assert_same(together[row], alone[row][i + 1], precision)
    for _ in prompts:
        model.remove_last_row()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_prefill_in_chunks_equals_prefill_at_once(models: Models, precision: str) -> None:
    model = models.load(precision)
    ids = some_ids(100).tolist()
    whole = single(model, [ids, [1], [2]])
    for cuts in ([1], [32, 64, 96], [99], [7, 8, 50]):
        edges = [0, *cuts, len(ids)]
        model.add_row()
        for begin, end in itertools.pairwise(edges):
            logits = model.extend(0, np.array(ids[begin:end]))
        atol = 5e-3 if precision == "fp16" else 1e-5
        np.testing.assert_allclose(logits, whole[0], atol=atol, rtol=0)
        for i, token in enumerate((1, 2)):
            np.testing.assert_allclose(
                model.decode(np.array([token]))[0], whole[i + 1], atol=atol, rtol=0
            )
        assert model.length(0) == len(ids) + 2
        model.remove_last_row()


@pytest.mark.parametrize("length", [1, 17, 100])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_copied_row_goes_on_as_the_other_would_have(
    models: Models, precision: str, length: int
) -> None:
    model = models.load(precision)
    prompt = some_ids(100).tolist()
    alone = single(model, [prompt[:length], [7], [8], [9]])
    for _ in range(2):
        model.add_row()
    model.extend(0, np.array(prompt[:length]))
    model.extend(0, np.array([*prompt[length:], 3]))
    model.copy_row(0, 1, length)
    assert [model.length(row) for row in range(2)] == [101, length]
    for token, then in zip((7, 8, 9), alone[1:], strict=True):
        assert_same(model.decode(np.array([3, token]))[1], then, precision)
    for _ in range(2):
        model.remove_last_row()
    assert model.kv_bytes == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_join_leave_and_move_in_any_order(models: Models, precision: str, seed: int) -> None:
    """What each row answered is what a fresh batch of one answers."""
    rng = np.random.default_rng(seed)
    model, fresh = models.load(precision), models.load(precision)
    calls: list[list[list[int]]] = []  # of each row
    answers: list[list[Any]] = []
    left: list[tuple[list[list[int]], list[Any]]] = []
    for _ in range(120):
        action = rng.choice(["join", "prefill", "decode", "decode", "decode", "leave"])
        if action == "join" and len(calls) < 7:
            assert model.add_row() == len(calls)
            calls.append([])
            answers.append([])
        if action in ("join", "prefill") and calls:
            # A row is prefilled behind those that decode, or goes on with a second chunk.
            row, ids = len(calls) - 1, rng.integers(0, VOCAB, rng.integers(2, 13)).tolist()
            calls[row].append(ids)
            answers[row].append(model.extend(row, np.array(ids)).copy())
        elif action == "decode" and calls:
            ids = rng.integers(0, VOCAB, rng.integers(1, len(calls) + 1)).tolist()
            for row, logits in enumerate(model.decode(np.array(ids))):
                calls[row].append([ids[row]])
                answers[row].append(logits.copy())
        elif action == "leave" and calls:
            row, last = int(rng.integers(len(calls))), len(calls) - 1
            left.append((calls[row], answers[row]))
            if row != last:
                model.move_row(last, row)
                calls[row], answers[row] = calls[last], answers[last]
            model.remove_last_row()
            del calls[last], answers[last]
        assert [model.length(row) for row in range(len(calls))] == [
            sum(map(len, chunks)) for chunks in calls
        ]
    assert len(left) > 5
    for row_calls, row_answers in [*left, *zip(calls, answers, strict=True)]:
        for now, then in zip(single(fresh, row_calls), row_answers, strict=True):
            assert_same(now, then, precision)


def test_memory_of_keys_and_values_follows_the_lengths_and_is_given_back() -> None:
    cache = MappedKVCache(buffers=24, heads=12, head_size=64, max_length=1024)
    before = anonymous_bytes()
    for row, length in enumerate((200, 1, 1024, 30)):
        cache.add_row()
        cache.array[:, row, :, :length] = 1
        cache.lengths[row] = length
    slack = 4 << 20
    in_use = cache.num_bytes
    assert in_use == 24 * 12 * PAGE * (13 + 1 + 64 + 2)  # 16 tokens of a head are a page
    assert abs(anonymous_bytes() - before - in_use) < slack
    cache.move_row(3, 2)
    cache.remove_last_row()
    assert cache.lengths == [200, 1, 30]
    assert (cache.array[:, 2, :, :30] == 1).all()
    assert cache.num_bytes == 24 * 12 * PAGE * (13 + 1 + 2)
    assert abs(anonymous_bytes() - before - cache.num_bytes) < slack
    for _ in range(3):
        cache.remove_last_row()
    assert cache.num_bytes == 0
    assert abs(anonymous_bytes() - before) < slack


@pytest.mark.parametrize("can_move", [True, False])
def test_a_kept_rows_memory_goes_with_it(monkeypatch: pytest.MonkeyPatch, can_move: bool) -> None:
    """Also on a kernel that moves no pages."""
    if not can_move:
        monkeypatch.setattr(mapping, "move", lambda *_: False)
    cache = MappedKVCache(buffers=24, heads=12, head_size=64, max_length=1024)
    before, slack = anonymous_bytes(), 8 << 20

    def fill(row: int, length: int, value: float) -> None:
        cache.array[:, row, :, :length] = value
        cache.lengths[row] = length

    def in_use() -> int:
        return anonymous_bytes() - before

    for row, length in enumerate((200, 300)):
        cache.add_row()
        fill(row, length, row + 1)
    kept = cache.keep_row(0, 160)
    assert kept.num_bytes == 24 * 12 * 10 * PAGE
    assert cache.num_bytes == 24 * 12 * 19 * PAGE
    assert abs(in_use() - kept.num_bytes - cache.num_bytes) < slack
    assert not cache.array[:, 0].any()

    fill(0, 20, 7)
    cache.move_row(0, 0)
    cache.move_row(1, 0)
    assert (cache.array[:, 0, :, :300] == 2).all()
    cache.fill_row(1, kept, 100, last=False)
    assert (cache.array[:, 1, :, :100] == 1).all()
    assert (kept.array[:, :, :160] == 1).all()
    assert abs(in_use() - kept.num_bytes - cache.num_bytes) < slack

    cache.remove_last_row()
    cache.add_row()
    cache.fill_row(1, kept, 96, last=True)
    del kept
    assert (cache.array[:, 1, :, :96] == 1).all()
    assert not cache.array[:, 1, :, 96:].any()
    assert cache.lengths == [300, 96]
    assert abs(in_use() - cache.num_bytes) < slack
    for _ in range(2):
        cache.remove_last_row()
    assert abs(in_use()) < slack


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("precision", ["fp32", *INT8])
def test_a_row_that_begins_with_kept_pieces_goes_on_bit_for_bit(
    models: Models, precision: str, last: bool
) -> None:
    model = models.load(precision, units=192, heads=4, prefix="kogpt2.")
    piece = PIECE
    assert model.piece == piece, "this processor's kernels add up in several orders"
    first, second = some_ids(5 * piece, seed=1), some_ids(7 * piece + 5, seed=2)
    second[: 3 * piece] = first[: 3 * piece]

    def extend(row: int, ids: Any) -> Any:
        """As the engine does it: each time from a multiple of a piece."""
        left = list(ids)
        while left:
            logits = model.extend(row, np.array(left[: CHUNK["cpu"]]))
            del left[: CHUNK["cpu"]]
        return logits

    model.add_row()
    alone = extend(0, second)
    step = model.decode(np.array([9]))[0].copy()
    model.remove_last_row()
    for row in range(2):
        model.add_row()
        extend(row, first)
    kept = model.keep_row(0, 4 * piece)
    model.move_row(1, 0)
    model.fill_row(1, kept, 3 * piece, last)
    assert model.length(1) == 3 * piece
    np.testing.assert_array_equal(extend(1, second[3 * piece :]), alone)
    np.testing.assert_array_equal(model.decode(np.array([3, 9]))[1], step)
    for _ in range(2):
        model.remove_last_row()


@pytest.mark.parametrize("precision", ["fp32", *INT8])
def test_where_a_prompts_chunks_end_changes_no_bit(models: Models, precision: str) -> None:
    """Far beyond what `_find_piece` tries."""
    model = models.load(precision, units=192, heads=4, max_length=512)
    ids, random = some_ids(512), np.random.default_rng(3)

    def found(edges: list[int]) -> tuple[Any, Any]:
        row = model.add_row()
        for begin, end in itertools.pairwise(edges):
            logits = model.extend(row, ids[begin:end])
        values = model._cache.array[:, row].copy()
        model.remove_last_row()
        return values, logits.copy()

    values, logits = found(list(range(0, 513, CHUNK["cpu"])))
    for most in (6, 20, 64, 64):
        edges = np.cumsum(random.integers(2, most + 1, 512))
        others = found([0, *edges[edges < 511].tolist(), 512])
        np.testing.assert_array_equal(others[0], values)
        np.testing.assert_array_equal(others[1], logits)


def test_kv_bytes_are_those_of_the_rows_in_use(models: Models) -> None:
    model = models.load("fp32")
    assert model.kv_bytes == 0
    model.add_row()
    model.extend(0, some_ids(33))  # two layers' keys and values of two heads, 32 tokens a page
    assert model.kv_bytes == 2 * 2 * 2 * 2 * PAGE
    model.remove_last_row()
    assert model.kv_bytes == 0


@KV8[1]
def test_keys_and_values_in_int8_take_a_quarter(models: Models) -> None:
    taken = {}
    for precision in ("int8", "int8-kv8"):
        model = models.load(precision)
        model.add_row()
        model.extend(0, some_ids(128))
        taken[precision] = model.kv_bytes
        row = backends.row_bytes(model.config, precision)
        assert row == model.kv_bytes_for([model.config.max_length])
        model.remove_last_row()
    assert taken["int8"] == 4 * taken["int8-kv8"]


def test_keys_and_values_in_int8_are_refused_where_onnxruntime_lacks_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.onnx_session.VERSION", "1.23.2")
    with pytest.raises(InvalidRequest, match=r"needs onnxruntime 1\.31.*Python 3\.11"):
        backends.check("onnxruntime", "int8-kv8", "cpu")


def test_a_model_that_is_opened_keeps_no_memory_that_only_opening_took(tmp_path: Path) -> None:
    wide = Models(tmp_path)
    sizes: dict[str, Any] = {"units": 512, "heads": 8, "layers": 4}
    wide.load("int8", **sizes)
    return_freed_memory()
    wide.load("int8", **sizes)
    held = anonymous_bytes()
    return_freed_memory()
    assert held - anonymous_bytes() < 1 << 20
    for model in wide.loaded:
        model.close()


def test_loading_and_closing_again_and_again_leaves_memory_where_it_was(models: Models) -> None:
    artifact = models.artifact(units=256, heads=4, vocab=20_000)

    def cycle() -> None:
        model = cpu.load(artifact, "int8", cache_dir=models.folder / "cache")
        model.add_row()
        model.extend(0, some_ids(16))
        model.decode(np.array([1]))
        model.close()

    for _ in range(3):
        cycle()
    before = resident_bytes()
    for _ in range(30):
        cycle()
    assert resident_bytes() - before < 10 * artifact.fp32_bytes


def test_what_cannot_be_computed_is_refused(models: Models) -> None:
    model = models.load("fp32")
    model.add_row()
    with pytest.raises(InvalidRequest, match="from 0 to 499"):
        model.extend(0, np.array([1, -1]))
    with pytest.raises(InvalidRequest, match="from 0 to 499"):
        model.extend(0, np.array([500]))
    with pytest.raises(PromptTooLong, match="129"):
        model.extend(0, some_ids(129))
    model.extend(0, some_ids(128))
    with pytest.raises(PromptTooLong, match="129"):
        model.decode(np.array([1]))
    assert model.length(0) == 128
    for _ in range(MAX_ROWS - 1):
        model.add_row()
    with pytest.raises(OutOfMemory, match="32 rows"):
        model.add_row()
    for _ in range(MAX_ROWS):
        model.remove_last_row()


def test_a_failed_allocation_is_out_of_memory_and_the_model_lives_on(models: Models) -> None:
    model = models.load("fp32", units=256, heads=4, layers=1, max_length=30_000)
    model.add_row()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    room = 100 << 20  # enough for x, 31 MB, but not for q, k and v after it, 92 MB
    resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + room, limits[1]))
    try:
        with pytest.raises(OutOfMemory, match="memory"):
            model.extend(0, some_ids(30_000))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert model.length(0) == 0
    assert model.extend(0, some_ids(20)).shape == (VOCAB,)
    model.remove_last_row()


def anonymous_bytes() -> int:
    return status_bytes("RssAnon")


def resident_bytes() -> int:
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


FIRST_LOADS = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import common.onnx_session as session
from engine.registry import Engine
from engine.settings import Settings

seen = []

def slow_count():
    seen.append(1)
    time.sleep(0.3 if len(seen) == 1 else 1.3)  # the second comes when the first has a session
    return 1

session.cpu_count = slow_count
engine = Engine(Settings(backend="onnxruntime", precision="fp32", memory_mib=64))
with ThreadPoolExecutor(2) as pool:
    print([m.name for m in pool.map(lambda p: engine.load(p, p), sys.argv[1:])] == sys.argv[1:])
engine.close()
"""


def test_the_first_two_loads_of_a_process_may_come_at_once(tmp_path: Path) -> None:
    paths = [str(make_artifact(tmp_path / f"m{seed}", seed=seed)) for seed in range(2)]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LOADS, *paths],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "True\n", done.stderr
