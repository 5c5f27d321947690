"""Whole fine-tunes are computed as deltas of their base: beside it, and as exact as in int8."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from common.errors import ArtifactError, InvalidRequest, OutOfMemory
from engine import residency
from engine.artifacts.artifact import Artifact
from engine.artifacts.open import open_artifact
from engine.backends.interface import Piece
from engine.engine import Engine
from engine.model import Core
from engine.native import delta as deltas
from engine.native import library
from engine.native import prepared as of_wholes
from engine.native.adapter import NativeAdapter, load_adapter
from engine.native.delta import Delta, NoDelta, open_delta
from engine.native.model import NativeModel
from engine.native.prepared import Stored, prepared
from engine.prepared.manifest import Manifests
from engine.sandbox.reading import Reading
from tests.engine.adapters import make_adapter
from tests.engine.backends.running import logits_of
from tests.engine.conftest import NewEngine
from tests.engine.deltas import fine_tuned, with_more_tokens
from tests.engine.engines import Pause, Request, make_talkative, settle
from tests.engine.hugging_face import make_hugging_face, train_tokenizer
from tests.engine.models import make_artifact, params_of, write_params

PROMPT = "오늘은 날씨가"
NEW = 24
IDS = np.random.default_rng(0).integers(4, 150, 60).tolist()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative(tmp_path_factory.mktemp("base") / "바탕", seed=7)


@pytest.fixture(scope="module")
def wholes(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("wholes")
    return [fine_tuned(root / f"시 {i}", base, seed=i, size=0.02 + 0.003 * i) for i in range(4)]


@pytest.fixture
def engine(new_engine: NewEngine) -> Engine:
    return new_engine(memory_mib=64, backend="native")


def ask(engine: Engine, name: str) -> Request:
    return Request(engine, name, PROMPT, max_new_tokens=NEW)


# --- The library ----------------------------------------------------------------------------------


def in_numpy(matrix: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """A matrix (n, k) as `pack_rest` rounds it, by its description in product.h and pass.c."""
    most = 2**bits - 1
    step = {1: 0.7979, 2: 0.4979, 3: 0.2930}[bits] * np.sqrt(np.square(matrix).mean(1))[:, None]
    odd = 2 * np.clip(np.floor(matrix / (2 * step) + (most + 1) / 2), 0, most) - most
    return odd * (np.square(matrix).sum(1) / (matrix * odd).sum(1))[:, None]


def unpack(packed: NDArray[np.uint8], n: int, k: int, bits: int) -> NDArray[np.float32]:
    """The matrix (n, k) that is packed as product.h says."""
    width = -(-k // 64) * 64
    groups = packed.reshape(-(-n // 16), -1)
    scales = groups[:, -64:].copy().view(np.float32).reshape(-1)[:n]
    depths = groups[:, :-64].reshape(len(groups), width // 64, -1)
    numbers = np.zeros((len(groups) * 16, width), np.int64)
    for column in range(len(groups) * 16):
        for i in range(width):
            depth, four, byte = depths[column // 16, i // 64], i % 64 // 4, column % 16 * 4 + i % 4
            if bits & 2:
                numbers[column, i] = depth[four // 4 * 64 + byte] >> four % 4 * 2 & 3
            if bits & 1:
                lowest = depth[(256 if bits & 2 else 0) + four // 8 * 64 + byte] >> four % 8 & 1
                numbers[column, i] = 2 * numbers[column, i] + lowest
    return (2 * numbers[:n, :k] - (2**bits - 1)) * scales[:, None]


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (33, 100), (5, 200)])
def test_few_bits_are_packed_as_documented(bits: int, n: int, k: int) -> None:
    matrix = np.random.default_rng(n).standard_normal((n, k), np.float32) * np.float32(0.03)
    packed = np.empty(library.rest_bytes(n, k, bits), np.uint8)
    library.pack_rest(matrix.ctypes.data, n, k, bits, packed.ctypes.data)
    np.testing.assert_allclose(unpack(packed, n, k, bits), in_numpy(matrix, bits), rtol=1e-5)
    rounded = unpack(packed, n, k, bits)
    np.testing.assert_allclose((rounded * matrix).sum(1), np.square(matrix).sum(1), rtol=1e-4)


def test_a_matrix_of_zeros_has_zeros_in_few_bits() -> None:
    matrix = np.zeros((16, 64), np.float32)
    packed = np.empty(library.rest_bytes(16, 64, 2), np.uint8)
    library.pack_rest(matrix.ctypes.data, 16, 64, 2, packed.ctypes.data)
    assert not unpack(packed, 16, 64, 2).any()


def test_the_largest_directions_are_those_of_the_singular_values() -> None:
    rng = np.random.default_rng(1)
    sizes = np.float32(10) * np.float32(0.5) ** np.arange(40, dtype=np.float32)
    left, right = (np.linalg.qr(rng.standard_normal((n, 40)))[0] for n in (90, 70))
    matrix = ((left * sizes) @ right.T).astype(np.float32)
    up, down = deltas.largest_directions(matrix, 8)
    error = np.linalg.norm(matrix - up @ down)
    assert error < 1.01 * np.linalg.norm(sizes[8:])
    again = deltas.largest_directions(matrix, 8)
    assert all((a == b).all() for a, b in zip((up, down), again, strict=True))


# --- Exactness ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(
    base: Path, wholes: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[NativeModel, list[Delta]]]:
    cache, of_base = tmp_path_factory.mktemp("cache"), open_artifact(base)
    found = [open_delta(open_artifact(path), of_base, cache) for path in wholes]
    with closing(NativeModel(prepared(of_base, "int8", cache))) as model:
        yield model, found


def kl(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
        x = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))

    p, q = log_softmax(expected), log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def in_fp32_and_int8(
    whole: Artifact, ids: list[int], cache: Path
) -> tuple[NDArray[np.float32], float]:
    """A model's logits in fp32, and the KL of those in int8."""
    with closing(NativeModel(prepared(whole, "fp32", cache))) as exact:
        expected = logits_of(exact, ids)
    with closing(NativeModel(prepared(whole, "int8", cache))) as int8:
        return expected, kl(logits_of(int8, ids), expected)


def test_a_delta_is_as_exact_as_the_whole_model_in_int8(
    opened: tuple[NativeModel, list[Delta]], wholes: list[Path], tmp_path: Path
) -> None:
    model, found = opened
    for delta, path in zip(found, wholes, strict=True):
        expected, error = in_fp32_and_int8(open_artifact(path), IDS, tmp_path)
        assert kl(logits_of(model, IDS), expected) > 10 * error  # the base is another model
        assert kl(logits_of(model, IDS, delta.load()), expected) < 1.5 * error


def test_a_token_is_the_same_beside_rows_of_any_fine_tune(
    opened: tuple[NativeModel, list[Delta]], base: Path, tmp_path: Path
) -> None:
    model, found = opened
    lora = make_adapter(tmp_path / "lora", base)
    adapter = load_adapter(Manifests().open_adapter(lora), open_artifact(base), "int8")
    kinds = [None, adapter, *(delta.load() for delta in found)]
    alone = [logits_of(model, IDS, kind) for kind in kinds]
    assert len({logits.tobytes() for logits in alone}) == len(kinds)
    rng = np.random.default_rng(3)
    for _ in range(10):
        of_rows = [int(i) for i in rng.integers(0, len(kinds), 9)]
        rows, done = [model.open_row() for _ in of_rows], [0] * len(of_rows)
        while min(done) < len(IDS):
            order = [i for i in rng.permutation(len(rows)) if done[i] < len(IDS)]
            counts = [int(min(rng.integers(1, 20), len(IDS) - done[i])) for i in order]
            logits = model.run(
                [
                    Piece(rows[i], IDS[done[i] : done[i] + n], n, kinds[of_rows[i]])
                    for i, n in zip(order, counts, strict=True)
                ]
            )
            at = 0
            for i, n in zip(order, counts, strict=True):
                expected = alone[of_rows[i]][done[i] : done[i] + n]
                assert logits[at : at + n].tobytes() == expected.tobytes()
                done[i], at = done[i] + n, at + n
        for row in rows:
            model.close_row(row)


def test_a_delta_that_is_prepared_twice_has_the_same_bits(
    base: Path, wholes: list[Path], tmp_path: Path
) -> None:
    paths = []
    for name in ("하나", "둘"):
        delta = open_delta(open_artifact(wholes[0]), open_artifact(base), tmp_path / name)
        paths.append(delta.file.path)
        delta.close()
    assert paths[0].read_bytes() == paths[1].read_bytes()


# --- In the engine --------------------------------------------------------------------------------


def test_fine_tunes_share_the_weights_and_steps_of_their_base(
    engine: Engine, base: Path, wholes: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        models = [engine.load(path.name, str(path), base=str(base)) for path in wholes]
    assert re.search(r"시 0 is a delta of its base: 0.1 MB; matrices: \d+ of rank 8, ", caplog.text)
    assert len({model.core for model in models}) == 1
    assert all(model.describe()["base"] == str(base) for model in models)
    assert all("whole_because" not in model.describe() for model in models)
    alone = [ask(engine, path.name).wait().ids() for path in wholes]
    assert len(set(map(tuple, alone))) > 1
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda path: ask(engine, path.name).wait().ids(), wholes * 4))
    assert together == alone * 4


def test_what_a_delta_adds_is_counted_and_returned(
    engine: Engine, base: Path, wholes: list[Path]
) -> None:
    engine.load("바탕", str(base))
    before = engine.budget.weight_bytes
    for _ in range(20):
        model = engine.load("시", str(wholes[0]), base=str(base))
        assert model.held()["reserved_bytes"] > model.own_bytes > 0
        assert ask(engine, "시").wait().ids()
        engine.unload("시")
    assert engine.budget.weight_bytes == before
    gc.collect()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert not [name for name in mapped if name.startswith(str(wholes[0]))]


def test_a_delta_whose_base_does_not_fit_leaves_nothing(
    new_engine: NewEngine, base: Path, wholes: list[Path]
) -> None:
    engine = new_engine(memory_mib=64, backend="native")
    size = engine.load("시", str(wholes[0]), base=str(base)).own_bytes
    core = engine._models["시"].core
    engine.unload("시")
    engine.budget.total_bytes = core.row_bytes + size + core.reserved_bytes - 1
    engine.budget.overcommit = 1
    mapped = files_mapped()
    with pytest.raises(OutOfMemory, match="the model needs"):
        engine.load("시", str(wholes[0]), base=str(base))
    assert (engine.budget.declared_bytes, engine.budget.weight_bytes) == (0, 0)
    assert files_mapped() == mapped


def files_mapped() -> int:
    gc.collect()
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    return sum(".prepared" in line for line in lines)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_what_is_no_delta_is_whole_and_says_why(
    engine: Engine, base: Path, wholes: list[Path], tmp_path: Path, precision: str
) -> None:
    other = make_talkative(tmp_path / "남", seed=99)  # no fine-tune of the base
    expected = {"fp32": "its precision is fp32", "int8": "too far from its base"}[precision]
    model = engine.load("남", str(other), base=str(base), precision=precision)
    assert expected in model.describe()["whole_because"]
    assert "base" not in model.describe()
    alone = engine.load("혼자", str(other), precision=precision)
    assert ask(engine, "남").wait().ids() == ask(engine, "혼자").wait().ids()
    assert alone.core is not model.core


def test_a_delta_that_is_too_large_is_whole(
    base: Path, wholes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = unprepared(wholes[0], tmp_path)
    artifacts = open_artifact(whole), open_artifact(base)
    with closing(open_delta(*artifacts, tmp_path / "cache")) as delta:
        size = sum(entry.num_bytes for entry in layout(delta))
    monkeypatch.setattr(deltas, "MOST_BYTES", size)
    open_delta(*artifacts, tmp_path / "fits").close()
    monkeypatch.setattr(deltas, "MOST_BYTES", size - 1)
    for _ in range(2):  # again, from what is known by then
        with pytest.raises(NoDelta, match=f"would have {size} bytes of at most {size - 1}"):
            open_delta(*artifacts, tmp_path / "too large")


def layout(delta: Delta) -> list[Stored]:
    choices = deltas.choices_of(delta.file.metadata)
    return list(deltas.layout(delta.whole.config, choices, delta.more))


def test_a_model_of_another_shape_is_no_delta(engine: Engine, base: Path, tmp_path: Path) -> None:
    other = make_artifact(tmp_path / "남", layers=1, units=64, vocab=160)
    described = engine.load("남", str(other), base=str(base)).describe()
    assert re.fullmatch(r"its \w+ is \d+, that of its base \d+", described["whole_because"])


def test_a_base_that_is_replaced_while_its_deltas_answer_serves_them_on(
    engine: Engine, base: Path, wholes: list[Path], tmp_path: Path
) -> None:
    own = shutil.copytree(base, tmp_path / "바탕")
    first = engine.load("시", str(wholes[0]), base=str(own))
    before = ask(engine, "시").wait().ids()
    params = params_of(own)
    params["_embed.weight"] = params["_embed.weight"] * np.float32(1.1)
    params["_logits_proj.weight"] = params["_embed.weight"]
    write_params(own / "new.params", params)
    (own / "new.params").replace(own / "kogpt2.params")
    assert ask(engine, "시").wait().ids() == before
    # What is loaded now is a delta of the new base: another core, and about the same text.
    again = engine.load("시 다시", str(wholes[0]), base=str(own))
    assert again.core is not first.core
    assert ask(engine, "시 다시").wait().ids()
    assert ask(engine, "시").wait().ids() == before


def test_a_bases_file_that_is_cut_off_while_a_delta_is_prepared_is_noticed(
    base: Path, wholes: list[Path], tmp_path: Path
) -> None:
    artifacts = [open_artifact(unprepared(path, tmp_path)) for path in (wholes[0], base)]
    with closing(prepared(artifacts[1], "int8", tmp_path / "cache")) as of_base:
        path = of_base.file.path
    whole = path.read_bytes()

    def cut_off() -> None:
        os.truncate(path, len(whole) // 2)

    with pytest.raises(ArtifactError, match="overwritten while it was read"):
        open_delta(*artifacts, tmp_path / "cache", progress=cut_off)
    path.write_bytes(whole)
    open_delta(*artifacts, tmp_path / "cache").close()


class Interrupted(Reading):
    """Calls `meanwhile` before a sandbox does its work, when the files have been checked."""

    def __init__(self, target: Any, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._target, self._meanwhile = target, meanwhile

    def run(self, target: Any, *arguments: Any, **options: Any) -> Any:
        if target is self._target:
            self._meanwhile()
        return super().run(target, *arguments, **options)


@pytest.mark.parametrize("replaced", ["시", "바탕"])
@pytest.mark.parametrize("work", [deltas.build, of_wholes.build])
def test_files_that_change_while_a_delta_is_prepared_leave_no_wrong_file(
    engine: Engine, base: Path, wholes: list[Path], tmp_path: Path, replaced: str, work: Any
) -> None:
    """As a new version is moved in, and back: what is prepared has the hash of one of them."""
    copies = {"시": unprepared(wholes[0], tmp_path), "바탕": unprepared(base, tmp_path)}
    expected = ask(engine_with(engine, wholes[0], base), "시").wait().ids()
    engine.unload("시")
    params = copies[replaced] / "kogpt2.params"
    old = params.rename(tmp_path / "old.params")

    def replace_weights() -> None:
        weights = params_of(tmp_path / "old")
        for name in weights:
            weights[name] = weights[name] * np.float32(1.05)
        write_params(tmp_path / "new.params", weights)
        (tmp_path / "new.params").replace(params)

    (tmp_path / "old").mkdir()
    shutil.copy(old, tmp_path / "old" / "kogpt2.params")
    shutil.copy(old, params)
    reading = Interrupted(work, replace_weights)
    with pytest.raises(ArtifactError, match="changed since they were read"):
        engine.load("시", str(copies["시"]), base=str(copies["바탕"]), reading=reading)
    shutil.copy(old, params)
    assert ask(engine_with(engine, copies["시"], copies["바탕"]), "시").wait().ids() == expected


def unprepared(folder: Path, parent: Path) -> Path:
    """A copy of a model without its prepared files."""
    ignored = shutil.ignore_patterns(".prepared")
    return shutil.copytree(folder, parent / folder.name, ignore=ignored)


def engine_with(engine: Engine, whole: Path, base: Path) -> Engine:
    engine.load("시", str(whole), base=str(base))
    return engine


def test_a_damaged_file_is_made_again(base: Path, tmp_path: Path) -> None:
    own, cache = fine_tuned(tmp_path / "시", base), tmp_path / "cache"
    delta = open_delta(open_artifact(own), open_artifact(base), cache)
    path, whole = delta.file.path, delta.file.path.read_bytes()
    delta.close()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    damaged = ("[8, 9]", "[-1, 2]", "[Infinity, 2]", "5")
    for choices in ("[]", "{", "{}", *(f'{{"0.qkv": {choice}}}' for choice in damaged)):
        header["__metadata__"]["choices"] = choices
        text = json.dumps(header).encode().ljust(length)
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
        open_delta(open_artifact(own), open_artifact(base), cache).close()
        assert path.read_bytes() == whole


# --- Memory ---------------------------------------------------------------------------------------


@pytest.fixture
def crowded(
    engine: Engine, base: Path, wholes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """Four deltas of a base, named 시 0 to 시 3, of which two fit beside it and a row."""
    monkeypatch.setattr(residency, "LARGE_ADAPTER_BYTES", 1)
    models = [engine.load(whole.name, str(whole), base=str(base)) for whole in wholes]
    assert hot(engine) == {whole.name for whole in wholes}
    fit(engine, models[0].core, 2)
    return engine


def fit(engine: Engine, core: Core, deltas: int) -> None:
    most = max(model.own_bytes for model in core.models)
    engine.budget.total_bytes = core.reserved_bytes + core.row_bytes + deltas * most


def hot(engine: Engine) -> set[str]:
    return {str(model["name"]) for model in engine.models() if model["residency"] == "hot"}


def test_deltas_count_as_in_memory_until_they_are_parked_for_others(
    crowded: Engine, wholes: list[Path]
) -> None:
    names, budget = [whole.name for whole in wholes], crowded.budget
    first = {name: ask(crowded, name).wait().ids() for name in names}
    core = crowded._models[names[0]].core
    for name in [*names, *names[:1] * 4, *names[1:]]:
        assert ask(crowded, name).wait().ids() == first[name]
        settle(crowded)
        deltas = [crowded._models[name].own_bytes for name in hot(crowded)]
        assert name in hot(crowded)
        assert budget.weight_bytes == core.reserved_bytes + sum(deltas)
        assert budget.weight_bytes + core.row_bytes <= budget.total_bytes
    assert hot(crowded) == {names[0], names[-1]}  # the likeliest, and the last
    for name in names:
        crowded.unload(name)
    assert (budget.weight_bytes, budget.kv_bytes, budget.declared_bytes) == (0, 0, 0)


def test_keys_and_values_take_the_place_of_a_deltas_weights(
    crowded: Engine, wholes: list[Path]
) -> None:
    busy, idle = wholes[0].name, wholes[1].name
    for name in (idle, busy):
        ask(crowded, name).wait()
    settle(crowded)
    assert hot(crowded) == {busy, idle}
    model = crowded._models[busy]
    rows = crowded.budget.free_bytes // model.core.row_bytes + 1
    options = {"max_new_tokens": model.config.max_length, "ignore_eos": True}
    with Pause(crowded):
        long = [Request(crowded, busy, PROMPT, **options) for _ in range(rows)]
    assert [request.wait().finish_reason() for request in long] == ["length"] * rows
    assert hot(crowded) == {busy}


def test_more_deltas_than_fit_are_all_answered_at_once(crowded: Engine, wholes: list[Path]) -> None:
    first = [ask(crowded, whole.name).wait().ids() for whole in wholes]
    fit(crowded, crowded._models[wholes[0].name].core, 0)  # they are read from their files
    with Pause(crowded):
        requests = [ask(crowded, whole.name) for whole in wholes * 3]
    assert [request.wait().ids() for request in requests] == first * 3


# --- More tokens than the base --------------------------------------------------------------------

ADDED = ["<질문>", "<대답>", "<끝>"]
QUESTION = "<질문>오늘은 날씨가<대답>"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder whose vocabulary is what its tokenizer has, and no multiple of 16."""
    size = train_tokenizer("metaspace").get_vocab_size()
    assert size % library.LINE
    return make_hugging_face(tmp_path_factory.mktemp("theirs") / "바탕", units=128, vocab=size)


def ids_of(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def test_a_head_of_its_own_is_a_delta_of_the_tied_one(theirs: Path, tmp_path: Path) -> None:
    """As an adapter with a trained head is merged: the embedding stays, the head is untied."""
    path = with_more_tokens(tmp_path / "시", theirs, [], tied=False)
    untied, tied = open_artifact(path), open_artifact(theirs)
    assert set(deltas.matrices(untied.config)) == {*deltas.matrices(tied.config), "head"}
    ids = ids_of(theirs, "오늘은 날씨가")
    expected, error = in_fp32_and_int8(untied, ids, tmp_path)
    with (
        closing(NativeModel(prepared(tied, "int8", tmp_path))) as model,
        closing(open_delta(untied, tied, tmp_path).load()) as adapter,
    ):
        assert kl(logits_of(model, ids, adapter), expected) < 1.5 * error
    with pytest.raises(NoDelta, match="tie_word_embeddings is True"):
        open_delta(tied, untied, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_that_the_base_lacks_have_rows_of_their_own(
    theirs: Path, tmp_path: Path, tied: bool
) -> None:
    path = with_more_tokens(tmp_path / "시", theirs, ADDED, tied=tied)
    whole, base = open_artifact(path), open_artifact(theirs)
    ids = ids_of(path, QUESTION + "비가 온다<끝>" + QUESTION)
    added = range(base.config.vocab_size, base.config.vocab_size + len(ADDED))
    assert set(added) < set(ids)
    expected, error = in_fp32_and_int8(whole, ids, tmp_path)
    with (
        closing(NativeModel(prepared(base, "int8", tmp_path))) as model,
        closing(open_delta(whole, base, tmp_path).load()) as adapter,
    ):
        logits = logits_of(model, ids, adapter)
        with pytest.raises(InvalidRequest, match=f"from 0 to {added[0] - 1}"):
            logits_of(model, ids)
    assert logits.shape == expected.shape == (len(ids), added[-1] + 1)
    assert kl(logits, expected) < 1.5 * error
    errors = np.abs(logits - expected)
    assert errors[:, list(added)].mean() < 1.2 * errors.mean() < 0.02 * np.std(expected)


def test_a_token_is_the_same_beside_rows_with_more_tokens(theirs: Path, tmp_path: Path) -> None:
    more = [f"<표시 {i}>" for i in range(40)]
    paths = [with_more_tokens(tmp_path / str(i), theirs, more[:i], seed=i) for i in (0, 3, 40)]
    base = open_artifact(theirs)
    size = base.config.vocab_size
    with (
        closing(NativeModel(prepared(base, "int8", tmp_path))) as model,
        ExitStack() as opened,
    ):
        kinds: list[NativeAdapter | None] = [None]
        for path in paths:
            delta = open_delta(open_artifact(path), base, tmp_path)
            kinds.append(opened.enter_context(closing(delta.load())))
        sizes = [size, size, size + 3, size + 40]
        rng = np.random.default_rng(1)
        ids = [rng.integers(0, n, 20).tolist() for n in sizes]
        alone = [logits_of(model, *of) for of in zip(ids, kinds, strict=True)]
        assert [logits.shape for logits in alone] == [(20, n) for n in sizes]
        for _ in range(5):
            order = rng.permutation(len(kinds))
            rows = [model.open_row() for _ in order]
            pieces = [Piece(row, ids[i], 20, kinds[i]) for row, i in zip(rows, order, strict=True)]
            logits = model.run(pieces)
            for at, i in enumerate(order):
                of_piece = logits[20 * at : 20 * (at + 1), : pieces[at].vocab_size(model.config)]
                assert of_piece.tobytes() == alone[i].tobytes()
            for row in rows:
                model.close_row(row)


def test_fine_tunes_with_tokens_of_their_own_share_a_step(
    engine: Engine, theirs: Path, tmp_path: Path
) -> None:
    """Greedy, drawn and with log-probabilities: the same beside others, with and without more."""
    names = {"셋": ADDED, "하나": ADDED[:1], "없음": []}
    models = [
        engine.load(name, str(with_more_tokens(tmp_path / name, theirs, tokens)), base=str(theirs))
        for name, tokens in names.items()
    ]
    assert len({model.core for model in models}) == 1
    assert all("whole_because" not in model.describe() for model in models)
    options: list[dict[str, Any]] = [
        {"do_sample": False, "logprobs": 5},
        {"do_sample": True, "temperature": 2.0, "seed": 3},
        {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 4},
    ]

    def answer(of: tuple[str, dict[str, Any]]) -> list[int]:
        return Request(engine, of[0], QUESTION, max_new_tokens=NEW, **of[1]).wait().ids()

    last = open_artifact(theirs).config.vocab_size + 2
    kinds = [(name, how) for name in names for how in options]
    kinds.append(("셋", {**options[1], "logit_bias": {str(last): 8}}))
    alone = [answer(kind) for kind in kinds]
    assert last in alone[-1]
    with ThreadPoolExecutor(len(kinds)) as pool:
        assert list(pool.map(answer, kinds * 2)) == alone * 2


def test_a_smaller_vocabulary_is_whole(engine: Engine, theirs: Path, tmp_path: Path) -> None:
    more = with_more_tokens(tmp_path / "바탕", theirs, ADDED)
    described = engine.load("시", str(theirs), base=str(more)).describe()
    size = open_artifact(theirs).config.vocab_size
    assert described["whole_because"] == f"its vocab_size is {size}, that of its base {size + 3}"
