"""A model's folder is opened when it is sound, and refused with the reason when it is not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.artifacts import hugging_face
from engine.artifacts.artifact import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    POSITIONS,
    QKV,
    Artifact,
    shapes,
)
from engine.artifacts.config import KOGPT2, GPT2Config
from engine.artifacts.open import open_artifact
from tests.engine.artifacts.reading import assert_same_weights, refused
from tests.engine.artifacts.torch_files import write_old
from tests.engine.models import make_artifact, params_of, write_params


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "model", max_length=32)


def rewrite(folder: Path, **changes: Any) -> None:
    """Saves the parameters again with some of them changed, or left out where None is given."""
    weights = params_of(folder) | changes
    write_params(folder / "kogpt2.params", {n: w for n, w in weights.items() if w is not None})


def configure(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def assert_same(found: Artifact, expected: Artifact) -> None:
    assert found.config == expected.config
    assert_same_weights(found, expected.weights)


def test_a_v1_folder_is_opened(folder: Path) -> None:
    artifact = open_artifact(str(folder))
    assert artifact.config == GPT2Config(500, 64, 2, 2, 256, 32)
    files = (*artifact.weight_files, artifact.tokenizer_file)
    assert [file.name for file in files] == ["kogpt2.params", "kogpt2.spiece"]
    assert {n: w.shape for n, w in artifact.weights.items()} == dict(shapes(artifact.config))
    assert artifact.fp32_bytes == sum(4 * w.size for w in artifact.weights.values())
    assert KOGPT2.num_parameters == 124_242_432  # as published


def test_the_files_that_macos_puts_beside_others_are_no_part_of_a_model(folder: Path) -> None:
    expected = open_artifact(folder)
    for path in list(folder.iterdir()):
        (folder / f"._{path.name}").write_bytes(b"\0\5\x16\7")
    assert_same(open_artifact(folder), expected)
    (folder / "kogpt2.spiece").unlink()
    assert "exactly one (found: config.json, kogpt2.params)" in refused(folder)


def test_a_folder_that_is_none_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "없는 모델", folder / "kogpt2.params"):
        assert "there is no such model folder" in refused(path)
    assert "cannot be read" in refused(tmp_path / ("x" * 300))
    (tmp_path / "empty").mkdir()
    assert "found: nothing" in refused(tmp_path / "empty")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_refused(folder: Path) -> None:
    folder.chmod(0)
    try:
        refused(folder)
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("suffix", [".params", ".spiece"])
def test_a_missing_or_second_file_of_a_kind_is_refused(folder: Path, suffix: str) -> None:
    shutil.copy(folder / f"kogpt2{suffix}", folder / f"other{suffix}")
    message = refused(folder)
    assert f"2 *{suffix} files" in message
    assert f"other{suffix}" in message
    for path in folder.glob(f"*{suffix}"):
        path.unlink()
    message = refused(folder)
    assert f"no *{suffix} files" in message
    assert "config.json" in message  # of those that are there


def test_parameters_of_wrappers_and_other_versions_are_read(folder: Path, tmp_path: Path) -> None:
    expected = open_artifact(folder)
    wrapped = shutil.copytree(folder, tmp_path / "wrapped")
    write_params(wrapped / "kogpt2.params", {f"lm.{n}": w for n, w in params_of(folder).items()})
    assert_same(open_artifact(wrapped), expected)
    rewrite(wrapped, **{"dense.weight": np.ones((2, 2)), "x_embed.weight": np.ones((2, 2))})
    assert_same(open_artifact(wrapped), expected)
    rewrite(folder, **{OUTPUT: None})  # the second copy of the embedding
    assert_same(open_artifact(folder), expected)
    half = open_artifact(make_artifact(tmp_path / "half", dtype="float16"))
    assert {w.dtype for w in half.weights.values()} == {np.dtype(np.float16)}


def test_without_config_json_heads_are_64_wide_and_the_activation_is_erf(tmp_path: Path) -> None:
    for name, units, heads in (("wide", 192, 3), ("narrow", 40, 1)):
        folder = make_artifact(tmp_path / name, units=units, heads=heads, layers=1)
        (folder / "config.json").unlink()
        config = open_artifact(folder).config
        assert (config.num_heads, config.activation, config.layer_norm_eps) == (heads, "gelu", 1e-5)


def test_the_names_of_hugging_face_are_understood_in_config_json(folder: Path) -> None:
    names = {"n_head": 4, "n_embd": 64, "n_layer": 2, "n_positions": 32, "vocab_size": 500}
    more = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-6}
    configure(folder, **names, **more, resid_pdrop=0.1, num_layers=None)
    config = open_artifact(folder).config
    assert (config.num_heads, config.activation, config.layer_norm_eps) == (4, "gelu_new", 1e-6)


def test_a_wrong_field_of_config_json_is_named(folder: Path) -> None:
    wrong: list[tuple[str, str, tuple[Any, ...]]] = [
        ("vocab_size", "config.json says", (501, "500", [500])),
        ("n_embd", "config.json says", (768,)),
        ("n_positions", "config.json says", (1024,)),
        ("max_length", "config.json says", ({},)),
        ("num_layers", "config.json says", (12, True)),
        ("num_heads", "must divide the 64 units", (0, -2, 3, True, "2", 2.0, [2], {})),
        ("activation", "gelu, gelu_new", ("relu", "GELU", 1, True, ["gelu"], {"a": 1})),
        ("layer_norm_eps", "must be at least 1e-12", (0, 1, -1e-5, 1e-300, "1e-5", True)),
        ("layer_norm_eps", "must be at least 1e-12", (float("nan"), float("inf"))),
    ]
    for field, reason, values in wrong:
        for value in values:
            configure(folder, **{"num_heads": 2, field: value})
            message = refused(folder)
            assert reason in message
            assert repr(value) in message


def test_a_config_json_that_is_no_object_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"):
        path.write_bytes(content)
        assert "config.json is not " in refused(folder)
    for text in ("[]", "null", '"gelu"', "1"):
        path.write_text(text)
        assert "must be a JSON object" in refused(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (EMBEDDING, None),
        (EMBEDDING, (500,)),
        (EMBEDDING, (0, 64)),
        (OUTPUT, (499, 64)),
        (POSITIONS, None),
        (f"{QKV.format(0)}.weight", (64, 192)),
        (f"{QKV.format(1)}.weight", None),  # the last layer must not just go unnoticed
        ("_ffn_layers.0._hidden_map.weight", None),
        ("_ffn_layers.1._hidden_map.weight", (128, 64)),
        ("_ffn_layers.1._out_map.bias", None),
        (f"{FINAL_NORM}.gamma", (64, 1)),
    ],
)
def test_a_missing_parameter_or_one_of_a_wrong_shape_is_named(
    folder: Path, name: str, shape: tuple[int, ...] | None
) -> None:
    rewrite(folder, **{name: None if shape is None else np.zeros(shape, dtype=np.float32)})
    assert name in refused(folder)


def test_another_kind_of_model_is_refused_with_some_of_its_keys(folder: Path) -> None:
    arrays = {"conv0_weight": np.ones((2, 2), dtype=np.float32)}
    for each in (arrays, {}):
        write_params(folder / "kogpt2.params", each)
        message = refused(folder)
        assert "not a KoGPT2 model" in message
        assert all(name in message for name in each)
    assert "int32, must be float16 or" in refused(make_artifact(folder, dtype="int32"))


def test_a_head_of_its_own_or_a_classifiers_is_refused(folder: Path) -> None:
    rewrite(folder, **{OUTPUT: params_of(folder)[EMBEDDING] + 1})
    assert f"{OUTPUT} differs from {EMBEDDING}, to which KoGPT2's is tied" in refused(folder)
    rewrite(folder, **{OUTPUT: None, "classifier.0.weight": np.ones((2, 64), np.float32)})
    assert "holds classifier.0.weight, the head of a classifier" in refused(folder)


def test_two_models_in_one_file_are_refused(folder: Path) -> None:
    weights = params_of(folder)
    both = {f"student.{n}": w for n, w in weights.items()}
    both |= {f"teacher.{n}": w + 1 for n, w in weights.items()}
    write_params(folder / "kogpt2.params", both)
    assert "holds two GPT-2s, student.* and teacher.*, must hold one" in refused(folder)


def test_a_guess_of_the_number_of_heads_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (folder / "config.json").unlink()
    open_artifact(folder)
    assert "config.json does not give num_heads: 1 heads of 64 are assumed" in caplog.text


def test_kogpt2s_release_for_pytorch_is_read_beside_its_spiece(tmp_path: Path) -> None:
    v1 = open_artifact(make_artifact(tmp_path / "v1", max_length=32))
    folder = shutil.copytree(v1.path, tmp_path / "torch")
    next(folder.glob("*.params")).unlink()
    state = {
        theirs: np.ascontiguousarray(v1.weights[ours].T if transposed else v1.weights[ours])
        for ours, theirs, transposed in hugging_face.names(v1.config)
    }
    state["lm_head.weight"] = state["transformer.wte.weight"]
    file = write_old(folder / "pytorch_kogpt2_676e9bcfa7.params", state)
    assert_same(open_artifact(folder), v1)
    other = {**state, "lm_head.weight": state["lm_head.weight"] + 1}
    write_old(file, {n: np.ascontiguousarray(w, np.float32) for n, w in other.items()})
    assert "_logits_proj.weight differs from _embed.weight" in refused(folder)
    file.write_bytes(file.read_bytes()[:-1])
    assert "is cut short" in refused(folder)
