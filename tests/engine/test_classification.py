"""Texts are classified by the engine: alone, beside others, beside what is generated."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError, EngineError, InvalidRequest, ModelNotFound, PromptTooLong
from engine.artifacts.open import open_artifact
from engine.backends.interface import Piece
from engine.engine import Engine
from engine.http.answer import Logits
from engine.native.delta_folder import read_folder
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from engine.settings import Settings
from scripts.artifacts import conversion
from tests.engine.adapters import make_adapter
from tests.engine.artifacts.reading import read_safetensors
from tests.engine.deltas import change_metadata, changed
from tests.engine.engines import WAIT_S, Pause, Request
from tests.engine.hugging_face import make_hugging_face, their_head, write_json, write_weights

LABELS = ["부정", "중립", "긍정"]
TEXTS = ["봄이 오면 산에 들에", "진달래", "나 보기가 역겨워 가실 때에는", "꽃 " * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hugging_face(tmp_path_factory.mktemp("classifier") / "c", labels=LABELS)


@pytest.fixture(scope="module")
def of_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classifier") / "t"
    return make_hugging_face(path, labels=LABELS, of_tokens=True)


@pytest.fixture(params=["fp32", "int8"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with closing(Engine(Settings(backend="native", precision=request.param))) as engine:
        engine.load("c", str(folder))
        yield engine


class Texts:
    """Texts that an engine classifies."""

    def __init__(self, engine: Engine, texts: Sequence[str], name: str = "c", **options: Any):
        self._done = threading.Event()
        self._logits = Logits(len(texts), self._done.set)
        parts = [[text] for text in texts]
        self.submitted = engine.classify(name, parts, self._logits.emit, WAIT_S, **options)

    def results(self) -> list[dict[str, Any]]:
        sequences = self.submitted.result(WAIT_S)
        assert self._done.wait(WAIT_S)
        encoded = [sequence.encoded for sequence in sequences]
        results: list[dict[str, Any]] = self._logits.result(encoded)["results"]
        return results


def logits(engine: Engine, texts: Sequence[str], name: str = "c", **options: Any) -> Any:
    return [result["logits"] for result in Texts(engine, texts, name, **options).results()]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_states_are_what_the_head_of_a_language_model_gets(
    folder: Path, tmp_path: Path, precision: str
) -> None:
    artifact = open_artifact(folder)
    embedding = np.array(artifact.weights["_embed.weight"])
    with closing(NativeModel(prepared(artifact, precision, tmp_path))) as model:
        ids = [5, 6, 7, 8, 9]
        expected = model.run([Piece(model.open_row(), ids, 5)]).copy()
        beside = Piece(model.open_row(), [4, 3])
        piece = Piece(model.open_row(), ids, 0, num_states=5)
        found = model.run([piece, beside])
        assert (len(found), piece.states is None) == (1, False)
        states = piece.states
    error = np.abs(states @ embedding.T - expected).max() / np.abs(expected).max()
    assert error < (1e-5 if precision == "fp32" else 0.02)


def test_logits_are_the_same_bits_alone_and_beside_others(engine: Engine) -> None:
    together = logits(engine, TEXTS, first=0)
    assert [np.shape(one) for one in together] == [(1, 3)] * len(TEXTS)
    assert together == [logits(engine, [text])[0] for text in TEXTS]


def test_each_token_has_logits_and_its_place(engine: Engine, of_tokens: Path) -> None:
    engine.load("t", str(of_tokens))
    text = "봄이 오면 " * 9
    [result] = Texts(engine, [text], "t").results()
    assert len(result["logits"]) == len(result["begins"]) == len(result["special"])
    assert result["ends"][-1] <= len(text)
    with Pause(engine):  # both in one pass
        both = Texts(engine, [text, "산에는"], "t", first=0)
        both.submitted.result(WAIT_S)
    assert both.results()[0] == result


def test_padding_at_the_end_is_ignored_and_padding_alone_is_a_text(engine: Engine) -> None:
    assert logits(engine, [TEXTS[0] + "<pad><pad>"]) == logits(engine, TEXTS[:1])
    assert logits(engine, ["<pad><pad>"]) == logits(engine, ["<pad>"])


def test_a_text_may_fill_the_context_and_more_is_cut_only_if_wanted(engine: Engine) -> None:
    full = "<usr>" * 128
    assert len(logits(engine, [full])) == 1
    with pytest.raises(PromptTooLong, match=r"inputs\.7 has 129 tokens"):
        logits(engine, [full + "<usr>"], first=7)
    assert logits(engine, [full + "<usr>"], truncate=True) == logits(engine, [full])


def test_nothing_is_kept_of_a_text(engine: Engine) -> None:
    logits(engine, TEXTS, first=0)
    statistics = engine.statistics()
    assert (statistics["kv_bytes"], statistics["prefix_bytes"]) == (0, 0)
    [model] = statistics["models"]
    assert (model["requests"], model["tokens"]) == (1, 0)
    assert model["prompt_tokens"] > len(TEXTS)
    assert model["classifier"]["labels"] == tuple(LABELS)


def test_the_budget_counts_its_head_until_it_is_unloaded(engine: Engine, folder: Path) -> None:
    head = engine._find("c").head
    assert head is not None
    assert head.num_bytes == 4 * 3 * 65
    core = engine._find("c").core
    assert engine.budget.declared_bytes == core.reserved_bytes + head.num_bytes
    assert engine.check("again", str(folder)) == core.reserved_bytes + head.num_bytes
    engine.unload("c")
    assert (engine.budget.declared_bytes, engine.budget.weight_bytes) == (0, 0)


def test_what_it_is_not_is_refused(engine: Engine, folder: Path, tmp_path: Path) -> None:
    engine.load("text", str(make_hugging_face(tmp_path / "text")))
    with pytest.raises(InvalidRequest, match="no classifier"):
        logits(engine, ["봄"], "text")
    with pytest.raises(InvalidRequest, match="is a classifier, which generates no text"):
        Request(engine, "c", "봄")
    adapter = make_adapter(tmp_path / "adapter", folder)
    with pytest.raises(ArtifactError, match="must have a head of its own"):
        engine.load("adapter", str(adapter), base=str(folder))


def test_an_unload_ends_texts_that_wait(engine: Engine) -> None:
    with Pause(engine):
        waiting = Texts(engine, TEXTS, first=0)
        waiting.submitted.result(WAIT_S)
        unloading = threading.Thread(target=engine.unload, args=["c"])
        unloading.start()
    unloading.join(WAIT_S)
    with pytest.raises(ModelNotFound):
        waiting.results()


def test_a_fault_of_the_head_ends_its_text_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = engine._find("c").head
    assert head is not None
    compute, calls = head.logits, list[Any]()

    def once(states: Any) -> Any:
        calls.append(states)
        if len(calls) == 1:
            raise ValueError("a fault")
        return compute(states)

    monkeypatch.setattr(head, "logits", once)
    with pytest.raises(EngineError, match="a step of the model failed"):
        logits(engine, TEXTS[:1])
    assert len(logits(engine, TEXTS[:1])) == 1


def test_logits_that_overflow_fail_their_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = engine._find("c").head
    assert head is not None
    monkeypatch.setattr(head, "_weight", np.full_like(head._weight, np.inf))
    with pytest.raises(ArtifactError, match="its weights are damaged"):
        logits(engine, TEXTS[:1])


# Adapters


def make_labeled(
    path: Path, base: Path, *, labels: int = 3, seed: int = 0, of_tokens: bool = False
) -> Path:
    """An adapter with a head, as PEFT writes it."""
    head = their_head(labels, 64, seed, of_tokens=of_tokens)
    return make_adapter(
        path,
        base,
        seed=seed,
        config={"task_type": "TOKEN_CLS" if of_tokens else "SEQ_CLS"},
        weights={f"base_model.model.{name}": w for name, w in head},
    )


def test_adapters_with_heads_share_passes_with_their_base(tmp_path: Path) -> None:
    base = make_hugging_face(tmp_path / "base")
    for precision in ("fp32", "int8"):
        with closing(Engine(Settings(backend="native", precision=precision))) as engine:
            engine.load("base", str(base))
            for seed, count in enumerate((2, 5)):
                path = make_labeled(tmp_path / str(seed), base, labels=count, seed=seed)
                about = engine.load(str(seed), str(path), base=str(base)).describe()["classifier"]
                assert about["labels"] == tuple(f"LABEL_{i}" for i in range(count))
            path = make_labeled(tmp_path / "t", base, of_tokens=True)
            engine.load("t", str(path), base=str(base))
            alone = [logits(engine, TEXTS[:2], name, first=0) for name in ("0", "1", "t")]
            text = Request(engine, "base", TEXTS[0], max_new_tokens=5).wait().ids()
            with Pause(engine):  # all in the passes that follow
                made = [Texts(engine, TEXTS[:2], name, first=0) for name in ("0", "1", "t")]
                for one in made:
                    one.submitted.result(WAIT_S)
                request = Request(engine, "base", TEXTS[0], max_new_tokens=5)
            assert [[r["logits"] for r in one.results()] for one in made] == alone
            assert request.wait().ids() == text
            [core] = {model.core for model in engine._models.values()}
            assert len(core.models) == 4


def test_the_names_of_an_adapters_labels_are_in_a_configuration_beside_it(tmp_path: Path) -> None:
    base = make_hugging_face(tmp_path / "base")
    path = make_labeled(tmp_path / "a", base)
    names = {"id2label": dict(enumerate(LABELS)), "problem_type": "multi_label_classification"}
    write_json(path / "config.json", names)
    with closing(Engine(Settings(backend="native", precision="fp32"))) as engine:
        about = engine.load("a", str(path), base=str(base)).describe()["classifier"]
    assert (about["labels"], about["function"]) == (tuple(LABELS), "sigmoid")


@pytest.mark.parametrize(
    ("config", "head", "message"),
    [
        ({"task_type": "SEQ_CLS"}, {}, "lacks score.weight"),
        ({"task_type": "TOKEN_CLS"}, {"classifier.weight": (2, 64)}, "lacks classifier.bias"),
        ({"task_type": "SEQ_CLS"}, {"score.weight": (2, 63)}, r"is \(2, 63\), must be \(2, 64\)"),
        ({"task_type": "CAUSAL_LM"}, {"score.weight": (2, 64)}, "is no LoRA matrix"),
        ({"task_type": "QUESTION_ANS"}, {"qa_outputs.weight": (2, 64)}, "task_type is 'QUESTION"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, config: dict[str, Any], head: dict[str, tuple[int, ...]], message: str
) -> None:
    base = make_hugging_face(tmp_path / "base")
    weights = {f"base_model.model.{n}": np.ones(shape, np.float32) for n, shape in head.items()}
    path = make_adapter(tmp_path / "a", base, config=config, weights=weights)
    with (
        closing(Engine(Settings(backend="native", precision="fp32"))) as engine,
        pytest.raises(ArtifactError, match=message),
    ):
        engine.load("a", str(path), base=str(base))


@pytest.fixture(params=["Sequence", "Token"])
def tuned(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A base, and a whole classifier that was trained from it."""
    base = make_hugging_face(tmp_path / "바탕", units=128)
    path = tmp_path / "c"
    shutil.copytree(base, path)
    rng = np.random.default_rng(0)
    weights = read_safetensors(base / "model.safetensors")
    tuned = {name: changed(np.array(w), rng, 0.02, 4) for name, w in weights.items()}
    write_weights(path, [*tuned.items(), *their_head(3, 128, of_tokens=request.param == "Token")])
    fields = json.loads((path / "config.json").read_text("utf-8"))
    labels = {str(i): label for i, label in enumerate(LABELS)}
    names = {"architectures": [f"GPT2For{request.param}Classification"], "id2label": labels}
    write_json(path / "config.json", {**fields, **names})
    return base, path


def test_a_whole_classifier_is_a_delta_of_its_base(
    tuned: tuple[Path, Path], tmp_path: Path
) -> None:
    """Made at the load, or before, as a folder without weights."""
    base, path = tuned
    folder = tmp_path / "델타"
    folder.mkdir()
    source = conversion.open_source(path, classifies=True)
    conversion.to_delta(source, conversion.open_source(base), folder, tmp_path)
    assert not (folder / "model.safetensors").exists()
    found = []
    for precision, of, loaded in (
        ("fp32", None, path),
        ("int8", None, path),
        ("int8", str(base), path),
        ("int8", str(base), folder),
    ):
        with closing(Engine(Settings(backend="native", precision=precision))) as engine:
            engine.load("base", str(base))
            model = engine.load("c", str(loaded), base=of)
            assert len(model.core.models) == (2 if of else 1), model.whole_because
            assert model.head is not None
            assert model.head.classifier == source.classifier
            found.append(np.concatenate(logits(engine, TEXTS, first=0)))
    exact, whole, delta, of_folder = found
    spread = np.std(exact)
    assert np.abs(delta - exact).max() < 3 * np.abs(whole - exact).max() + 0.02 * spread
    assert np.abs(of_folder - delta).max() < 0.02 * spread  # BLAS's sums in another order


def test_a_damaged_head_of_a_delta_is_refused(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    base, path = tuned
    folder = tmp_path / "델타"
    folder.mkdir()
    source = conversion.open_source(path, classifies=True)
    conversion.to_delta(source, conversion.open_source(base), folder, tmp_path)
    file = folder / "delta.safetensors"
    assert source.classifier is not None
    right = source.classifier.to_json()
    for labels, message in (
        ("[" * 100_000, "labels"),
        ("[]", "labels must be a JSON object"),
        (json.dumps({**right, "labels": []}), "does not say what its labels are"),
        (json.dumps({**right, "labels": LABELS[:2]}), r"is \(3, 128\), must be \(2, 128\)"),
        (None, "holds classifier.(weight|bias), which is no part of a delta"),
    ):
        change_metadata(file, classifier=labels)
        with pytest.raises(ArtifactError, match=message):
            read_folder(folder)
