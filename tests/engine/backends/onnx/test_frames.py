"""A session on blank weights computes what each model does that is shown in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from common import onnx_session
from common.errors import EngineError
from engine.artifacts.artifact import EMBEDDING
from engine.artifacts.open import open_artifact
from engine.backends.onnx import cpu, frames, packing
from engine.backends.onnx.cpu import OnnxModel
from engine.backends.onnx.frames import Frame
from engine.backends.onnx.graph import GPT2Graph
from engine.backends.onnx.quantize import block_size, dequantize, quantize
from engine.prepared.cache import prepared
from tests.engine.models import make_artifact

IDS = np.arange(2, 19)
SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"vocab": 20_000},  # the head has a file of its own
    {"vocab": 203, "units": 192, "heads": 4},  # rows and blocks beyond what is packed in groups
    {"units": 60, "heads": 6, "layers": 1},  # heads of 10, a width that no block divides
    {"units": 16, "heads": 2, "layers": 1},  # vectors that are written into the graph
    {"units": 4, "heads": 1, "layers": 1},  # and nothing that is neither that nor packed
    {"dtype": "float16", "activation": "gelu_new"},
)


@pytest.fixture(autouse=True)
def none_kept() -> Iterator[None]:
    frames._spare.clear()
    yield
    frames._spare.clear()


def make(folder: Path, seed: int, **sizes: Any) -> Path:
    return make_artifact(folder / f"모델{seed}", seed=seed, **sizes)


def load(artifact: Path, precision: str) -> OnnxModel:
    cache = artifact.parent / "준비된"
    return cpu.load(open_artifact(artifact), precision, cache_dir=cache)


def ids_of(model: OnnxModel) -> Any:
    """The last ones of the table, too."""
    return np.concatenate([IDS, model.config.vocab_size - 1 - np.arange(5)])


def answer(model: OnnxModel) -> Any:
    model.add_row()
    logits = model.extend(0, ids_of(model)).copy()
    model.remove_last_row()
    return logits


def in_a_session_of_its_own(artifact: Path, precision: str, model: OnnxModel) -> Any:
    """The logits of a session that was opened on the model's own weights, packed in memory."""
    opened, ids = open_artifact(artifact), ids_of(model)
    graph = GPT2Graph(opened.config, opened.weights, precision)
    options = onnx_session.session_options()
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(v) for v in graph.external.values()]
    if graph.quantized:
        options.register_custom_ops_library(str(packing.library()))
    options.add_external_initializers(list(graph.external), values)
    session = onnxruntime.InferenceSession(graph.model.SerializeToString(), options)
    table = np.asarray(opened.weights[EMBEDDING], np.float32)
    if graph.quantized:
        table = dequantize(*quantize(table, block_size(table.shape[1])), table.shape[1])
    x = table[ids] + model._positions[: len(ids)]
    empty = {
        given.name: np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32)
        for given in session.get_inputs()
        if given.name.startswith("past_")
    }
    last, total = np.array([len(ids) - 1], np.int32), np.array([len(ids)], np.int32)
    return session.run(["logits"], {"x": x[None], "seqlens_k": last, "total": total, **empty})[0][0]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_models_shown_one_after_the_other_answer_as_in_sessions_of_their_own(
    tmp_path: Path, precision: str, sizes: dict[str, Any]
) -> None:
    artifacts = [make(tmp_path, seed, **sizes) for seed in range(2)]
    answers = []
    for artifact in [*artifacts, *artifacts]:
        model = load(artifact, precision)
        answers.append(answer(model))
        own = in_a_session_of_its_own(artifact, precision, model)
        np.testing.assert_array_equal(answers[-1], own)
        model.close()
    assert not np.array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[:2], answers[2:])


def test_the_next_model_of_a_shape_is_shown_in_the_session_of_the_last(tmp_path: Path) -> None:
    first = load(make(tmp_path, 0), "int8")
    session = first._session
    first.close()
    second = load(make(tmp_path, 1), "int8")
    assert second._session is session
    third = load(make(tmp_path, 2), "int8")
    assert third._session is not session
    second.close()
    other = load(make(tmp_path, 3, activation="gelu_new"), "int8")
    assert other._session is not session
    third.close()
    other.close()


def test_models_open_at_once_do_not_see_each_other(tmp_path: Path) -> None:
    models = [load(make(tmp_path, seed), "int8") for seed in range(3)]
    answers = [answer(model) for model in models]
    models.pop(1).close()
    np.testing.assert_array_equal(answer(models[0]), answers[0])
    np.testing.assert_array_equal(answer(models[1]), answers[2])
    for model in models:
        model.close()


def mapped(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if str(folder) in line]


def test_a_closed_model_leaves_no_file_mapped_and_an_open_one_has_one_mapping_a_matrix(
    tmp_path: Path,
) -> None:
    artifact = make(tmp_path, 0, layers=3)
    load(artifact, "int8").close()  # what was mapped to build is mapped no more
    before = mapped(tmp_path / "준비된")
    model = load(artifact, "int8")
    matrices, others = 3 * 4 + 1, 1 + 2  # the vectors of all layers, and two tables
    assert len(mapped(tmp_path / "준비된")) - len(before) <= matrices + others
    model.close()
    assert mapped(tmp_path / "준비된") == before == []


def test_no_more_frames_are_kept_than_may_be(tmp_path: Path) -> None:
    artifact = make(tmp_path, 0)
    models = [load(artifact, "int8") for _ in range(frames.SPARE + 2)]
    for model in models:
        model.close()
    [kept] = frames._spare.values()
    assert len(kept) == frames.SPARE


def test_a_piece_of_another_length_is_refused_and_prepared_anew(tmp_path: Path) -> None:
    artifact = make(tmp_path, 0)
    model = load(artifact, "int8")
    expected = answer(model)
    model.close()
    [entry] = (p for p in (tmp_path / "준비된").glob("*.json") if p.name.count(".") == 1)
    text = entry.read_text(encoding="utf-8")
    length = model.mapped[0][1]
    entry.write_text(text.replace(f"0, {length}]", f"0, {length + 64}]"), encoding="utf-8")
    model = load(artifact, "int8")
    np.testing.assert_array_equal(answer(model), expected)
    model.close()


@pytest.mark.skipif(
    onnx_session.VERSION < "1.24",  # the last for Python 3.10
    reason="onnxruntime keeps what it packs to itself",
)
def test_a_session_that_does_not_use_what_it_is_shown_is_an_error(tmp_path: Path) -> None:
    artifact = make(tmp_path, 0)
    load(artifact, "fp32").close()
    with prepared(open_artifact(artifact), "fp32", tmp_path / "준비된") as found:
        graph = found.frame.graph.read_bytes()
        kernel = b"FusedMatMul+"
        digit = graph.index(kernel) + len(kernel)
        other = b"1" if graph[digit : digit + 1] != b"1" else b"2"
        changed = found.frame.graph.with_name("changed.onnx")
        changed.write_bytes(graph[:digit] + other + graph[digit + 1 :])
        files = dataclasses.replace(found.frame, graph=changed)
        with pytest.raises(EngineError, match="onnxruntime"):
            Frame(files, found.pieces)
