"""Adapters share their base's weights and steps, and answer as the merged models do."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import (
    ArtifactError,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelAlreadyLoaded,
    ModelNotFound,
)
from engine.artifacts.artifact import EMBEDDING, Artifact
from engine.artifacts.merged import merge
from engine.artifacts.open import open_artifact
from engine.backends.interface import Piece
from engine.backends.page_cache import Span, present
from engine.engine import Engine
from engine.generation import Generation
from engine.native.adapter import LowRank, NativeAdapter, load_adapter
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from engine.prepared.manifest import Manifests
from engine.sequence import State
from engine.text import texts
from engine.text.child import source_of
from engine.text.texts import Texts
from tests.engine.adapters import make_adapter, merged
from tests.engine.backends.running import logits_of
from tests.engine.conftest import NewEngine
from tests.engine.engines import Gate, Pause, Request, make_talkative
from tests.engine.hugging_face import make_hugging_face
from tests.engine.sentences import SENTENCES
from tests.processes import eventually

PROMPT = "오늘은 날씨가"
NEW = 24
# One option of adapters each.
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"modules": ["attn.c_attn"], "rank": 16},
    "projections": {"modules": ["attn.c_proj", "mlp.c_proj"], "rank": 17},
    "one layer": {"layers": [1], "rank": 1},
    "biases": {"bias": True, "rank": 8},
    "halves": {"dtype": "float16", "rank": 5},
}


TRAINED_ROWS = "base_model.model.transformer.wte.token_adapter.trainable_tokens_delta"
Paths = dict[str, Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative(tmp_path_factory.mktemp("base") / "바탕", seed=7)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Paths:
    root = tmp_path_factory.mktemp("adapters")
    return {
        kind: make_adapter(root / kind, base, seed=seed, **options)
        for seed, (kind, options) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="module")
def wholes(base: Path, adapters: Paths, tmp_path_factory: pytest.TempPathFactory) -> Paths:
    root = tmp_path_factory.mktemp("wholes")
    return {kind: merged(root / kind, base, path) for kind, path in adapters.items()}


@pytest.fixture
def engine(request: pytest.FixtureRequest, new_engine: NewEngine) -> Engine:
    backend = getattr(request, "param", "native")
    return new_engine(memory_mib=64, backend=backend, precision="fp32")


@pytest.fixture
def native(new_engine: NewEngine) -> Engine:
    return new_engine(memory_mib=64, backend="native")


@pytest.fixture
def loaded(engine: Engine, base: Path, adapters: Paths) -> Engine:
    """The engine with all adapters."""
    for kind, path in adapters.items():
        engine.load(kind, str(path), base=str(base))
    return engine


def ask(engine: Engine, name: str, new: int = NEW, prompt: str = PROMPT, **given: Any) -> Request:
    return Request(engine, name, prompt, max_new_tokens=new, **given)


IDS = np.random.default_rng(0).integers(4, 150, 60).tolist()
Packed = tuple[str, NativeModel, dict[str, NativeAdapter]]


@pytest.fixture(params=["fp32", "int8"])
def packed(request: pytest.FixtureRequest, base: Path, adapters: Paths) -> Iterator[Packed]:
    """A precision, the base in it, and the adapters."""
    precision, of_base = request.param, Manifests().open(base)
    opened = {kind: Manifests().open_adapter(path) for kind, path in adapters.items()}
    with closing(NativeModel(prepared(of_base, precision, None))) as model:
        yield precision, model, {k: load_adapter(a, of_base, precision) for k, a in opened.items()}


def test_logits_are_those_of_merged_models(packed: Packed, wholes: Paths) -> None:
    precision, model, adapters = packed
    alone = logits_of(model, IDS)
    for kind, adapter in adapters.items():
        found = logits_of(model, IDS, adapter)
        with closing(NativeModel(prepared(Manifests().open(wholes[kind]), "fp32", None))) as whole:
            wanted = logits_of(whole, IDS)
        error = np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std()
        assert error < (1e-5 if precision == "fp32" else 0.08), kind
        assert np.abs(found - alone).max() > 0.5 * wanted.std()  # it changes something


def test_a_row_is_the_same_bits_beside_others(packed: Packed) -> None:
    _, model, adapters = packed
    rng, kinds = np.random.default_rng(1), [None, *adapters.values()]
    rows = [(rng.integers(4, 150, 100).tolist(), kinds[i % len(kinds)]) for i in range(14)]
    alone = [logits_of(model, ids, adapter) for ids, adapter in rows]
    opened, done = [model.open_row() for _ in rows], [0] * len(rows)
    while any(count < 100 for count in done):
        chosen = [i for i in rng.permutation(len(rows)).tolist() if done[i] < 100]
        chosen = chosen[: rng.integers(1, len(chosen) + 1)]
        pieces = []
        for i in chosen:
            count = min(int(rng.choice([1, 1, 2, 30, 60])), 100 - done[i])
            ids, adapter = rows[i]
            pieces.append(Piece(opened[i], ids[done[i] : done[i] + count], count, adapter))
        logits, at = model.run(pieces), 0
        for i, piece in zip(chosen, pieces, strict=True):
            count = len(piece.ids)
            same = alone[i][done[i] : done[i] + count]
            assert logits[at : at + count].tobytes() == same.tobytes()
            done[i], at = done[i] + count, at + count


@pytest.mark.parametrize("engine", ["mxnet", "native"], indirect=True)
def test_adapters_and_their_base_answer_together_as_merged_models_do(
    loaded: Engine, base: Path, wholes: Paths
) -> None:
    """In the same passes, also with forms and labels."""
    loaded.load("base", str(base))
    for kind, path in {**wholes, "base": base}.items():
        loaded.load(f"whole {kind}", str(path), precision="fp32")
    labels = ["날씨가 참 좋습니다", "한국어 모델", "날씨가"]
    options: list[dict[str, Any]] = [
        *({"prompt": sentence} for sentence in SENTENCES[:2]),
        {"choice": labels, "choice_logprobs": True, "new": 60},
        {"choice": labels, "new": 60},
        {"regex": "[가-힣]{2,4} (책|물)", "new": 60},
    ]

    def ask_all(prefix: str) -> dict[tuple[str, int], Request]:
        with Pause(loaded):
            requests = {
                (name, i): ask(loaded, prefix + name, **given)
                for name in (*KINDS, "base")
                for i, given in enumerate(options)
            }
        return {key: request.wait() for key, request in requests.items()}

    wanted = ask_all("whole ")
    for key, request in ask_all("").items():
        assert request.error is None
        assert request.text() == wanted[key].text()
        found, expected = (dict(r.tokens[-1].choices) for r in (request, wanted[key]))
        assert found == pytest.approx(expected, abs=1e-3)
        assert len(found) == (len(labels) if key[1] == 2 else 0)
    assert len({wanted[name, 0].text() for name in (*KINDS, "base")}) == len(KINDS) + 1


def test_labels_with_characters_of_no_token_are_refused(engine: Engine, base: Path) -> None:
    """All such characters are one token, with which two labels would be as likely."""
    engine.load("base", str(base))
    with pytest.raises(InvalidRequest, match="has no tokens that write '긍정뷁'"):
        ask(engine, "base", choice=["날씨가", "긍정뷁"], choice_logprobs=True)


def test_rows_of_adapters_share_each_step(loaded: Engine) -> None:
    [core] = {model.core for model in loaded._models.values()}
    passes: list[int] = []
    run = core.compute.run

    def counted(pieces: Any) -> Any:
        passes.append(len(pieces))
        return run(pieces)

    core.compute.run = counted  # type: ignore[method-assign]
    with Pause(loaded):
        requests = [ask(loaded, kind) for kind in KINDS]
    assert [len(request.wait().ids()) for request in requests] == [NEW] * len(KINDS)
    assert (len(passes), max(passes)) == (NEW, len(KINDS))


def test_a_base_goes_with_its_last_adapter_and_is_counted_once(loaded: Engine) -> None:
    sizes = {model["name"]: model["weight_bytes"] for model in loaded.models()}
    core = loaded._models["all"].core
    assert core.compute is not None
    whole = core.compute.weight_bytes
    assert all(whole < size < 1.5 * whole for size in sizes.values())
    own = sum(model.own_bytes for model in loaded._models.values())
    assert loaded.budget.declared_bytes == core.reserved_bytes + own
    assert loaded.budget.weight_bytes == core.reserved_bytes
    running = ask(loaded, "all")
    for kind in list(KINDS)[1:]:
        loaded.unload(kind)
    assert len(running.wait().ids()) == NEW  # another adapter's end does not concern it
    assert loaded.budget.declared_bytes == core.reserved_bytes + loaded._models["all"].own_bytes
    loaded.unload("all")
    assert (loaded.budget.declared_bytes, loaded.budget.weight_bytes) == (0, 0)
    assert core.compute is None
    assert not loaded._cores.by_name


def test_an_unload_ends_the_requests_of_its_adapter_alone(
    loaded: Engine, base: Path, adapters: Paths
) -> None:
    with Pause(loaded):
        ended, others = ask(loaded, "all", 100), [ask(loaded, kind) for kind in list(KINDS)[1:]]
    loaded.unload("all")
    assert isinstance(ended.wait().error, ModelNotFound) or len(ended.ids()) == 100
    assert [len(other.wait().ids()) for other in others] == [NEW] * len(others)
    with pytest.raises(ModelNotFound):
        ask(loaded, "all")
    loaded.load("all", str(adapters["all"]), base=str(base))
    assert len(ask(loaded, "all").wait().ids()) == NEW


@pytest.mark.parametrize("kept", [0, 5000])
def test_an_adapter_whose_file_is_cut_off_is_lost_and_neither_its_base_nor_another_adapter(
    native: Engine, base: Path, tmp_path: Path, kept: int
) -> None:
    paths = {name: make_adapter(tmp_path / name, base, seed=i) for i, name in enumerate("가나")}
    for name, path in paths.items():
        native.load(name, str(path), base=str(base))
    right = {name: ask(native, name).wait().ids() for name in paths}
    (file,) = (paths["가"] / ".prepared").glob("*.safetensors")
    with Pause(native):
        lost, other = ask(native, "가"), ask(native, "나")
        os.truncate(file, kept)
    assert isinstance(lost.wait().error, EngineUnavailable)
    assert not lost.tokens
    assert other.wait().ids() == right["나"]
    assert [model["name"] for model in native.models()] == ["나"]
    native.load("가", str(paths["가"]), base=str(base))
    assert ask(native, "가").wait().ids() == right["가"]
    os.truncate(file, kept)  # the next request's thread reads it first
    assert isinstance(ask(native, "가").wait().error, EngineUnavailable)


def test_no_request_is_lost_that_is_queued_while_another_model_of_the_core_is_unloaded(
    native: Engine, base: Path, adapters: Paths
) -> None:
    for kind in ("all", "biases"):
        native.load(kind, str(adapters[kind]), base=str(base))
    came: list[Request] = []

    class Watched(Generation):
        @property  # type: ignore[misc]
        def state(self) -> State:  # type: ignore[override]
            """Queue a request wherever the queue is read and the lock is free."""
            if threading.current_thread() is native._loop._thread and len(came) < 3:
                queuing = threading.Thread(target=queue)
                queuing.start()
                queuing.join()
            return State(self.__dict__["state"])

        @state.setter
        def state(self, value: State) -> None:
            self.__dict__["state"] = value

    def queue() -> None:
        if native._changed.acquire(blocking=False):
            native._changed.release()
            came.append(ask(native, "biases"))

    with ThreadPoolExecutor() as pool, Pause(native) as pause:
        ended = ask(native, "all")
        ended.sequences[0].__class__ = Watched
        unloading = pool.submit(native.unload, "all")
        eventually(lambda: native._unloading and native._loop._commands)
        pause.go_on()
        assert unloading.result()
    assert isinstance(ended.wait().error, ModelNotFound)
    came.append(ask(native, "biases"))
    assert [len(request.wait().ids()) for request in came] == [NEW] * len(came)
    native.unload("biases")
    assert (native.budget.declared_bytes, native.budget.kv_bytes) == (0, 0)


def test_a_load_that_fails_as_the_last_on_its_base_waits_for_the_step(
    native: Engine, base: Path, adapters: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another adapter's unload has begun, but its rows are still computed."""
    core = native.load("all", str(adapters["all"]), base=str(base)).core
    gate = Gate()

    def fail(texts: Texts) -> None:
        gate()
        raise ArtifactError("the tokenizer is unusable")

    monkeypatch.setattr(Texts, "ready", fail)
    with ThreadPoolExecutor() as pool, Pause(native) as pause:
        failing = pool.submit(native.load, "biases", str(adapters["biases"]), base=str(base))
        gate.reached()
        unloading = pool.submit(native.unload, "all")
        eventually(lambda: native._unloading and native._loop._commands)
        gate.open()
        eventually(lambda: failing.done() or len(native._loop._commands) == 2)
        assert core.compute is not None
        pause.go_on()
        with pytest.raises(ArtifactError, match="unusable"):
            failing.result()
        assert unloading.result()
    assert core.compute is None
    assert (native.budget.declared_bytes, native.budget.weight_bytes) == (0, 0)


def test_no_token_waits_while_an_adapters_tokenizer_is_read(
    native: Engine, base: Path, adapters: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.load("all", str(adapters["all"]), base=str(base))
    gate = Gate()

    def read_slowly(artifact: Artifact) -> Any:
        gate()
        return source_of(artifact)

    monkeypatch.setattr(texts, "source_of", read_slowly)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(native.load, "biases", str(adapters["biases"]), base=str(base))
        gate.reached()
        answer = pool.submit(ask, native, "all")
        try:
            eventually(lambda: answer.done() and answer.result().done)
        finally:
            gate.open()
        assert loading.result().core is native._models["all"].core


def test_a_lost_base_does_not_hide_the_one_that_was_loaded_in_its_place(
    native: Engine, base: Path, adapters: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = native.load("all", str(adapters["all"]), base=str(base)).core
    gate, ready = Gate(), Texts.ready
    gates = [gate]
    monkeypatch.setattr(Texts, "ready", lambda t: (gates and gates.pop()(), ready(t))[1])
    with ThreadPoolExecutor() as pool:
        failing = pool.submit(native.load, "biases", str(adapters["biases"]), base=str(base))
        gate.reached()
        native._loop.call(lambda: native._lose(lost, EngineError("a fault")))
        core = native.load("all", str(adapters["all"]), base=str(base)).core
        gate.open()
        with pytest.raises(EngineError, match="a step failed while the model was loaded"):
            failing.result()
    assert core is not lost
    assert native._cores.by_name == {core.name: core}
    assert native.load("halves", str(adapters["halves"]), base=str(base)).core is core
    native.unload("all")
    native.unload("halves")
    assert (native.budget.declared_bytes, native.budget.weight_bytes) == (0, 0)


def test_an_adapter_stays_mapped_while_a_thread_reads_it_in(
    base: Path, adapters: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests, was = Manifests(), []
    adapter = load_adapter(manifests.open_adapter(adapters["all"]), manifests.open(base), "int8")

    def unload_then_read(spans: list[Span]) -> None:
        adapter.close()
        was.extend(present(*span).size for span in spans)  # raises where nothing is mapped

    monkeypatch.setattr("engine.native.adapter.read_in", unload_then_read)
    adapter.read_in()
    adapter.read_in()  # nothing is mapped any more
    assert len(was) == 1


def test_prefixes_are_shared_among_the_rows_of_one_adapter_only(loaded: Engine) -> None:
    prompt = " ".join(SENTENCES)[:150]
    first, other, again = (ask(loaded, kind, 2, prompt).wait() for kind in ("all", "biases", "all"))
    cached = [request.sequences[0].cached_tokens for request in (first, other, again)]
    assert cached == [0, 0, len(again.prompt) - 1]
    assert again.ids() == first.ids()
    with Pause(loaded):
        requests = {kind: ask(loaded, kind, 2, prompt + "밤") for kind in KINDS}
    hits = [k for k, request in requests.items() if request.wait().sequences[0].cached_tokens]
    assert hits == ["all", "biases"]


def test_a_model_that_is_the_base_of_an_adapter_shares_its_weights(
    loaded: Engine, base: Path, adapters: Paths
) -> None:
    core = loaded._models["all"].core
    assert loaded.load("base", str(base)).core is core
    loaded.unload("base")
    assert len(ask(loaded, "all").wait().ids()) == NEW
    assert loaded.load("base", str(base)).core is core
    with pytest.raises(ModelAlreadyLoaded):
        loaded.load("all", str(adapters["biases"]), base=str(base))


def test_a_whole_model_with_a_base_is_loaded_or_refused_for_its_own_files(
    engine: Engine, tmp_path: Path, base: Path
) -> None:
    tuned = make_talkative(tmp_path / "파인튜닝", seed=8)
    described = engine.load("a", str(tuned), base=str(base)).describe()
    assert described.get("base", described.get("whole_because"))
    assert engine.load("a", str(tuned), base=str(base)) is engine._models["a"]
    for missing, why in ((tmp_path / "없음", "no such"), (tmp_path, "the folder holds no model")):
        with pytest.raises(ArtifactError, match=why):
            engine.load("b", str(missing), base=str(base))


def test_an_error_of_a_base_says_that_it_is_the_bases_and_names_no_folder(
    engine: Engine, tmp_path: Path, base: Path
) -> None:
    adapter = make_adapter(tmp_path / "어댑터", base, seed=4)
    broken = Path(shutil.copytree(base, tmp_path / "바탕"))
    (broken / "kogpt2.spiece").unlink()
    with pytest.raises(ArtifactError, match=r"^its base: the folder holds no \*\.spiece"):
        engine.load("a", str(adapter), base=str(broken))
    (adapter / "adapter_config.json").write_text('{"r": 1', "utf-8")
    with pytest.raises(ArtifactError, match=r"^adapter_config\.json"):
        engine.load("a", str(adapter), base=str(base))
    (adapter / "adapter_model.safetensors").unlink()
    for folder, other in ((adapter, base), (broken, None)):
        with pytest.raises(ArtifactError) as raised:
            engine.load("a", str(folder), base=None if other is None else str(other))
        assert folder.name not in raised.value.message


def test_a_base_that_is_replaced_is_that_of_later_loads(engine: Engine, tmp_path: Path) -> None:
    base = make_talkative(tmp_path / "base", seed=1)
    old, new = (make_adapter(tmp_path / name, base, seed=4) for name in ("old", "new"))
    engine.load("old", str(old), base=str(base))
    before = ask(engine, "old").wait().ids()
    make_talkative(base, seed=2)
    engine.load("new", str(new), base=str(base))
    with Pause(engine):
        both = [ask(engine, name) for name in ("old", "new")]
    assert both[0].wait().ids() == before != both[1].wait().ids()


# Adapters that are merged into their base; tests/oracle compares their values with PEFT's


def test_trained_rows_replace_those_of_the_embedding(base: Path, tmp_path: Path) -> None:
    contents, trained = set(), np.random.default_rng(5).standard_normal((3, 64)).astype("f4")
    weights = {TRAINED_ROWS: trained}
    for name, ids in (("a", [9, 149, 30]), ("b", [9, 149, 31])):  # the same matrices
        config = {"trainable_token_indices": ids}
        path = make_adapter(tmp_path / name, base, weights=weights, config=config)
        found = merge(Manifests().open(base), Manifests().open_adapter(path))
        np.testing.assert_array_equal(found.weights[EMBEDDING][ids], trained)
        contents.add(found.content)
    assert len(contents) == 2


def test_an_adapter_may_bring_a_vocabulary_of_its_own(native: Engine, tmp_path: Path) -> None:
    base = make_hugging_face(tmp_path / "base", vocab=700)
    embedding = np.array(open_artifact(base).weights[EMBEDDING])
    embedding = np.concatenate([embedding, embedding[:30] + embedding[30:60]])
    tensors = {
        "base_model.model.transformer.wte.weight": embedding,
        "base_model.model.lm_head.weight": embedding,
    }
    adapter = make_adapter(tmp_path / "a", base, weights=tensors)
    with pytest.raises(ArtifactError, match=r"brings a vocabulary of 730 instead of 700"):
        native.load("a", str(adapter), base=str(base))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / name).write_bytes((base / name).read_bytes())
    model = native.load("a", str(adapter), base=str(base))
    assert model.adapter is not None, model.whole_because
    assert (model.config.vocab_size, model.adapter.more) == (700, 30)
    assert len(ask(native, "a", 4).wait().ids()) > 0
    biased = {"max_new_tokens": 4, "logit_bias": {"729": 100}}
    assert Request(native, "a", "오늘", **biased).wait().ids() == [729] * 4
    native.load("base", str(base))
    assert native._models["base"].core is model.core
    with pytest.raises(InvalidRequest, match="token 729, but the model's vocabulary ends at 699"):
        Request(native, "base", "오늘", **biased)
    for name in ("a", "base"):
        native.unload(name)
    assert (native.budget.declared_bytes, native.budget.weight_bytes) == (0, 0)


# Bad input


def refused(engine: Engine, path: Path, base: Path) -> str:
    before = engine.budget.declared_bytes
    with pytest.raises((ArtifactError, InvalidRequest)) as caught:
        engine.load("bad", str(path), base=str(base))
    assert engine.budget.declared_bytes == before
    assert "bad" not in engine._models
    return caught.value.message


def lora(name: str, *shape: int, value: float = 0.5, dtype: Any = np.float32) -> dict[str, Any]:
    return {f"base_model.model.transformer.{name}": np.full(shape, value, dtype)}


def rows(ids: list[int] | None, count: int, units: int = 64) -> dict[str, Any]:
    """An adapter of trained tokens, which is said to have `ids`."""
    return {
        "config": {"trainable_token_indices": ids},
        "weights": {TRAINED_ROWS: np.zeros((count, units), np.float32)},
    }


IDS_OF = "must be token ids, or token ids of wte and lm_head, is "
A, B = "h.{}.attn.c_attn.lora_A.weight", "h.{}.attn.c_attn.lora_B.weight"
# By what the refusal says, what `make_adapter` is given. tests/oracle has what PEFT itself saves.
BAD: dict[str, dict[str, Any]] = {
    "0.qkv.up times its scale of the adapter holds numbers that are too large for fp16": {
        "modules": ["attn.c_attn"],
        "scale": 1e30,
    },
    "not finite: 0.qkv.up times its scale holds": {"modules": ["attn.c_attn"], "scale": 1e39},
    "no matrices": {"modules": []},
    "the trained rows of _embed.weight must be (1, 64) instead of (2, 64)": rows([9], 2),
    "the trained rows of _embed.weight must be (1, 64) instead of (1, 63)": rows([9], 1, 63),
    "trainable_token_indices has 100000, but the vocabulary has": rows([100000], 1),
    "adapter_config.json lacks the trainable_token_indices of": rows(None, 1),
    **{
        message: {"config": config}
        for message, config in {
            "peft_type is None": {"peft_type": None},
            IDS_OF + "{'c_attn'": {"trainable_token_indices": {"c_attn": [1]}},
            IDS_OF + "[-1]": {"trainable_token_indices": [-1]},
            "rank 9": {"r": 9},
            "rank 3": {"rank_pattern": {"c_attn": 3}},
            "lora_alpha is viel": {"lora_alpha": "viel"},
            "lora_alpha is 1000": {"lora_alpha": 10**400},
            "lora_alpha is True": {"lora_alpha": True},
            "alpha_pattern has the key '(('": {"alpha_pattern": {"((": 3}},
            "rank_pattern must be": {"rank_pattern": [1]},
            "its patterns take more than 1 s": {"rank_pattern": {"(.*)*x": 3}},
            "target_modules has the key '*'": {"target_modules": "*"},
            "target_modules must be a list of names": {"target_modules": {"c_attn": 1}},
            # PEFT follows the configuration, whatever the file holds.
            "mlp.c_fc, which is not in target_modules": {
                "target_modules": ["c_attn", "attn.c_proj", "mlp.c_proj"]
            },
            "c_proj, which is not in target_modules": {"target_modules": r".*\.(c_attn|c_fc)"},
            "attn.c_proj, which is not in target_modules": {"target_modules": None},
            "c_attn, which is in exclude_modules": {"exclude_modules": ["h.1.attn.c_attn"]},
            "h.0.attn.c_attn, which is in exclude_modules": {"exclude_modules": r".*c_attn"},
            "h.1.mlp.c_fc, which is in modules_to_save": {"modules_to_save": ["1.mlp"]},
            "h.1.attn.c_proj, which is not in layers_to_transform": {"layers_to_transform": 0},
            "h.0.attn.c_proj, which is not in layers_to_transform": {
                **{"layers_to_transform": [0, 1], "layers_pattern": "layers"}
            },
            "use_dora true, but adapter_model.safetensors lacks": {"use_dora": True},
            "lora_bias true, but adapter_model.safetensors lacks": {"lora_bias": True},
        }.items()
    },
    **{
        message: {"weights": weights}
        for message, weights in {
            "layer 2, but its base has 2": lora(A.format(2), 4, 64) | lora(B.format(2), 192, 4),
            "down of qkv in layer 0 must be (4, 64) instead of (4, 65)": lora(A.format(0), 4, 65),
            "up of ffn_out in layer 1 must be (64, 4)": lora("h.1.mlp.c_proj.lora_B.weight", 63, 4),
            "of different ranks": lora(A.format(0), 5, 64),
            "lacks lora_B of transformer.h.3.attn.c_attn": lora(A.format(3), 4, 64),
            "_embed.weight must be (5, 64) instead of (5, 63)": lora("wte.weight", 5, 63),
            "of different sizes": lora("wte.weight", 5, 64),
            "_attn_ln.0.beta must be (64,) instead of (63,)": lora("h.0.ln_1.bias", 63),
            "holds base_model.model.transformer.ln_x.weight": lora("ln_x.weight", 64),
            "holds NaN or infinity": lora(A.format(0), 4, 64, value=np.nan),
            "use_dora false, but adapter_model.safetensors has": lora(
                "h.0.attn.c_attn.lora_magnitude_vector", 192
            ),
            "lora_bias false, but adapter_model.safetensors has": lora(
                "h.0.attn.c_attn.lora_B.bias", 192
            ),
            "has the shape (4,)": lora(A.format(0), 4),
            "is int32": lora(A.format(0), 4, 64, value=1, dtype=np.int32),
        }.items()
    },
}


def test_adapters_that_do_not_fit_are_refused_and_concern_no_other(
    native: Engine, base: Path, adapters: Paths, tmp_path: Path
) -> None:
    native.load("good", str(adapters["all"]), base=str(base))
    for i, (message, options) in enumerate(BAD.items()):
        path = make_adapter(tmp_path / f"나쁜 {i}", base, **options)
        assert message in refused(native, path, base)
    bare = make_adapter(tmp_path / "bare", base)
    (bare / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refused(native, bare, base)
    (bare / "adapter_config.json").write_text("{", encoding="utf-8")
    assert "adapter_config.json" in refused(native, bare, base)
    good = make_adapter(tmp_path / "good", base)
    assert "adapter" in refused(native, good, good)  # a base that is an adapter itself
    assert "no such model folder" in refused(native, good, tmp_path / "nowhere")
    assert len(ask(native, "good").wait().ids()) == NEW


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_matrices_that_are_not_finite_are_refused(base: Path, precision: str, bad: float) -> None:
    zeros = np.zeros((4, 64), np.float32)
    matrix = LowRank(np.full_like(zeros, bad), zeros.T)
    with pytest.raises(ArtifactError, match=r"not finite: 1\.qkv\.down holds NaN or infinity"):
        NativeAdapter.of(open_artifact(base).config, precision, {(1, "qkv"): matrix})


def test_an_adapter_that_changes_is_read_again(base: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", base, seed=1)
    manifests = Manifests()
    first = manifests.open_adapter(path)
    assert manifests.open_adapter(path).content == first.content
    assert Manifests().open_adapter(path) == first  # from its manifest
    make_adapter(path, base, seed=2)
    assert manifests.open_adapter(path).content != first.content
    [file] = (path / ".prepared").glob("*.source.json")
    assert json.loads(file.read_text())["artifact"]["base"] == open_artifact(base).path.name
