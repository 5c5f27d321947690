"""Which folders are classifiers, and what their labels are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError
from engine.artifacts.classifier import BIAS, WEIGHT, Classifier
from engine.artifacts.open import open_artifact
from engine.prepared.manifest import Manifests
from tests.engine.artifacts.reading import refused
from tests.engine.artifacts.test_hugging_face import configure, rewrite
from tests.engine.hugging_face import make_hugging_face

LABELS = ["부정", "중립", "긍정"]
DEFAULT = ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("labels", "config", "expected"),
    [
        (LABELS, {}, Classifier(tuple(LABELS), "softmax", 3)),
        (LABELS[:2], {"id2label": None}, Classifier(DEFAULT, "softmax", 3)),
        (
            LABELS,
            {"problem_type": "multi_label_classification", "pad_token_id": None},
            Classifier(tuple(LABELS), "sigmoid", -1),
        ),
        (["점수"], {"problem_type": "regression"}, Classifier(("점수",), "none", 3)),
        (["점수"], {}, Classifier(("점수",), "sigmoid", 3)),
        (
            LABELS[:2],
            {"id2label": {"0": 0, "1": 1}, "num_labels": 2},
            Classifier(("0", "1"), pad_id=3),
        ),
    ],
)
def test_the_configuration_says_what_the_labels_are(
    tmp_path: Path, labels: list[str], config: dict[str, Any], expected: Classifier
) -> None:
    folder = make_hugging_face(tmp_path / "m", labels=labels, config=config)
    for found in (open_artifact(folder), Manifests().open(folder)):
        assert found.classifier == expected
        assert found.index[WEIGHT].shape == (len(labels), 64)


def test_a_classifier_of_tokens_has_a_bias(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "m", labels=LABELS, of_tokens=True, shards=2)
    found = Manifests().open(folder)
    assert found.classifier == Classifier(tuple(LABELS), "softmax", 3, of_tokens=True)
    assert found.index[BIAS].shape == (3,)


def test_a_wrapper_and_a_file_without_architectures(tmp_path: Path) -> None:
    """As Lightning's checkpoints are."""
    folder = make_hugging_face(tmp_path / "m", labels=LABELS)
    configure(folder, architectures=None)
    rewrite(folder, lambda w: {f"model.{name}": tensor for name, tensor in w.items()})
    found = open_artifact(folder).classifier
    assert found is not None
    assert found.labels == tuple(LABELS)


Change = Callable[[dict[str, Any]], dict[str, Any]]


def head(shape: tuple[int, ...], value: float = 1) -> Change:
    return lambda w: {**w, "score.weight": np.full(shape, value, np.float32)}


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"id2label": None}, dict, "lacks id2label"),
        ({"id2label": {"0": "a"}}, dict, "id2label has 1 entries"),
        ({"id2label": {"0": "a", "1": "b", "3": "c"}}, dict, "id2label has 3 entries"),
        ({"id2label": {"0": "a", "1": "b", "2": ["c"]}}, dict, "must have a text for each"),
        ({"num_labels": 2}, dict, "num_labels is 2, must have"),
        ({"id2label": None, "num_labels": 4}, dict, "num_labels is 4, but"),
        ({"problem_type": "other"}, dict, "problem_type is 'other', must be one of"),
        ({"pad_token_id": "<pad>"}, dict, "pad_token_id is '<pad>'"),
        ({}, head((3, 63)), r"score.weight is (3, 63), must have a row of 64"),
        ({}, head((64,)), "must have a row of 64"),
        ({}, head((10_000, 64)), "has 10000 labels, at most 1000"),
        ({}, lambda w: {n: x for n, x in w.items() if n != "score.weight"}, "lacks score.weight"),
        ({"architectures": ["GPT2ForTokenClassification"]}, dict, "lacks classifier.weight"),
    ],
)
def test_what_is_wrong_with_it(
    tmp_path: Path, config: dict[str, Any], change: Change, message: str
) -> None:
    folder = make_hugging_face(tmp_path / "m", labels=LABELS, config=config)
    rewrite(folder, change)
    assert message in refused(folder)


def test_a_head_with_nan_is_refused(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "m", labels=LABELS)
    rewrite(folder, head((3, 64), np.nan))
    with pytest.raises(ArtifactError, match=r"classifier\.weight holds NaN"):
        Manifests().open(folder)


def test_one_label_is_no_choice(tmp_path: Path) -> None:
    config = {"problem_type": "single_label_classification"}
    folder = make_hugging_face(tmp_path / "m", labels=["a"], config=config)
    assert "needs more than one label" in refused(folder)
