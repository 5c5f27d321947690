"""Classifiers give the labels and scores of transformers' models and pipelines."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.engine import Engine
from engine.http.answer import Logits
from engine.settings import Settings
from handlers.text.classifier import ClassifyRequest, format_answer, text_entries
from handlers.text.labels import Options
from tests.engine.engines import WAIT_S
from tests.engine.hugging_face import KINDS, make_hugging_face
from tests.oracle import oracle

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

COUNT = int(os.environ.get("ORACLE_CLASSIFIERS", "12"))
SEED = os.environ.get("ORACLE_SEED", "1")  # another one gives other directories
TOLERANCE = 1e-5
TEXTS = (
    "안녕하세요. 오늘은",
    "🙂 안녕 😤",
    "봄 " * 100,  # longer than the context
    "산에는 꽃 피네<pad><pad>",
    "The quick 갈색 여우",
    {"text": "가족 사진", "text_pair": "한국어 언어 모델"},
)
PROBLEMS = (None, "single_label_classification", "multi_label_classification", "regression")


def make(folder: Path, rng: random.Random) -> Path:
    """A classifier with random settings."""
    heads, of_tokens = rng.randint(1, 6), rng.random() < 0.4
    labels = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"] if of_tokens else ["부정", "중립", "긍정"]
    config: dict[str, Any] = {
        "tie_word_embeddings": rng.random() < 0.7,
        "scale_attn_by_inverse_layer_idx": rng.random() < 0.3,
        "problem_type": None if of_tokens else rng.choice(PROBLEMS),
    }
    if not of_tokens:
        labels = labels[: rng.randint(1, 3)]
        if len(labels) == 1 and config["problem_type"] == "single_label_classification":
            config["problem_type"] = "regression"
        if len(labels) == 2 and rng.random() < 0.5:
            config["id2label"] = None  # transformers' own names
        if rng.random() < 0.3:
            config["pad_token_id"] = None
    return make_hugging_face(
        folder,
        kind=rng.choice(KINDS),
        layers=rng.randint(1, 4),
        heads=heads,
        units=heads * rng.choice((8, 10, 16)),
        hidden=rng.randint(32, 200),
        vocab=rng.randint(700, 900),
        activation=rng.choice(("gelu", "gelu_new", "gelu_fast")),
        dtype=rng.choice(("float32", "float16", "bfloat16")),
        shards=rng.choice((1, 2)),
        seed=rng.randrange(1 << 32),
        max_length=64,
        begins=rng.random() < 0.3,
        config=config,
        tokenizer_config={"model_max_length": rng.choice((64, 40))},
        labels=labels,
        of_tokens=of_tokens,
    )


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Any]:
    """Directories, and transformers' answers with each, all in one run."""
    root = tmp_path_factory.mktemp("classifiers")
    texts: dict[Path, Sequence[Any]] = {}
    for i in range(COUNT):
        folder = make(root / str(i), random.Random(f"{SEED}-{i}"))  # noqa: S311
        config = json.loads((folder / "config.json").read_text("utf-8"))
        of_tokens = "Token" in config["architectures"][0]
        texts[folder] = [t for t in TEXTS if isinstance(t, str) and len(t) < 64]
        if not of_tokens:
            texts[folder] = TEXTS
    files = (root / "texts.json", root / "labels.json")
    files[0].write_text(json.dumps({str(p): each for p, each in texts.items()}), encoding="utf-8")
    oracle.run("-m", "tests.oracle.make_labels", *files)
    answers = json.loads(files[1].read_text(encoding="utf-8"))
    return {folder: (texts[folder], answers[str(folder)]) for folder in texts}


@pytest.fixture(params=["mxnet", "native"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with closing(
        Engine(Settings(backend=request.param, precision="fp32", memory_mib=512))
    ) as engine:
        yield engine


def parts_of(text: Any) -> list[str]:
    return [text] if isinstance(text, str) else [text["text"], text["text_pair"]]


def results_of(engine: Engine, texts: Sequence[Any], name: str = "c") -> list[dict[str, Any]]:
    done = threading.Event()
    logits = Logits(len(texts), done.set)
    parts = list(map(parts_of, texts))
    sequences = engine.classify(name, parts, logits.emit, WAIT_S, first=0, truncate=True).result()
    assert done.wait(WAIT_S)
    results: list[dict[str, Any]] = logits.result([s.encoded for s in sequences])["results"]
    return results


def close(found: Any, wanted: Any) -> None:
    """Compare answers; scores may differ by `TOLERANCE`, and equal ones be in another order."""
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
        return
    assert found.pop("score") == pytest.approx(wanted.pop("score"), abs=TOLERANCE)
    wanted.pop("word", "")  # pieces of a tokenizer; here the text itself
    found.pop("word", "")
    assert found == wanted


@pytest.mark.parametrize("i", range(COUNT))
def test_labels_are_those_of_transformers(
    engine: Engine, i: int, answered: dict[Path, Any]
) -> None:
    [(folder, (texts, wanted))] = [(p, each) for p, each in answered.items() if p.name == str(i)]
    wanted = json.loads(json.dumps(wanted))
    about = engine.load("c", str(folder)).describe()["classifier"]
    results = results_of(engine, texts)
    for result, logits in zip(results, wanted["logits"], strict=True):
        np.testing.assert_allclose(result["logits"], np.atleast_2d(logits), rtol=0, atol=TOLERANCE)

    def answer(which: slice, form: str, **options: Any) -> Any:
        parts = list(map(parts_of, texts[which]))
        request = ClassifyRequest(parts, form, Options(**options))
        pairs = zip(parts, results[which], strict=True)
        entries = [text_entries(text, result, about, request.options) for text, result in pairs]
        return format_answer(request, entries, about)

    every, first = slice(None), slice(1)
    if not about["of_tokens"]:
        close(answer(first, "text"), wanted["alone"])
        close(answer(slice(-1, None), "pair"), wanted["pair"])
        close(answer(every, "list"), wanted["list"])
        close(answer(every, "list", top_k=None, listed=True), wanted["all"])
        close(answer(first, "text", top_k=2, listed=True), wanted["two"])
        close(answer(slice(2), "list", function="none"), wanted["raw"])
        return
    close(answer(every, "list"), wanted["none"])
    close(answer(first, "text", ignored=()), wanted["every"])
    if not any(shares_characters(result) for result in results):
        close(answer(every, "list", grouped=True), wanted["simple"])


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str], Any]:
    """A base, the folder of PEFT's adapters of it, texts, and PEFT's logits of them."""
    root = tmp_path_factory.mktemp("adapters")
    base = make_hugging_face(root / "base", seed=5, config={"pad_token_id": 3})
    texts = [text for text in TEXTS if isinstance(text, str) and len(text) < 64]
    (root / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    files = (root / "made", root / "texts.json", root / "logits.json")
    oracle.run("-m", "tests.oracle.make_labeled_adapters", base, *files)
    return base, root / "made", texts, json.loads((root / "logits.json").read_text("utf-8"))


def test_adapters_give_the_logits_of_peft_beside_each_other(
    engine: Engine, adapters: tuple[Path, Path, list[str], Any]
) -> None:
    base, folder, texts, wanted = adapters
    engine.load("base", str(base))
    for name in wanted:
        # Of padding at its end a text has it without a config.json beside the adapter.
        (folder / name / "config.json").write_text(
            json.dumps({"num_labels": len(wanted[name][0][0]), "pad_token_id": 3})
        )
        engine.load(name, str(folder / name), base=str(base))
    for name, logits in wanted.items():
        for result, expected in zip(results_of(engine, texts, name), logits, strict=True):
            np.testing.assert_allclose(result["logits"], expected, rtol=0, atol=TOLERANCE)
    held = {model["name"]: model["reserved_bytes"] for model in engine.held()}
    assert all(held[name] < held["dora"] for name in wanted if name != "dora")  # it is merged


def shares_characters(result: dict[str, Any]) -> bool:
    """Whether a character has several tokens, which transformers labels one by one."""
    places = zip(result["begins"][1:], result["ends"], strict=False)
    return any(begin < end for begin, end in places)
