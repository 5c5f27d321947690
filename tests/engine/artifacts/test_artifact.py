"""A model's folder is opened when it is sound, and refused with the reason when it is not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError
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
from engine.artifacts.config import GPT2Config
from engine.artifacts.open import open_artifact
from engine.artifacts.read_params import read_params
from tests.engine.artifacts.torch_files import write_old
from tests.engine.models import make_artifact, write_params


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "model", max_length=32)


def refused(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    return caught.value.message


def rewrite(folder: Path, **changes: Any) -> None:
    """Saves the parameters again with some of them changed, or left out where None is given."""
    weights = {n: np.array(w) for n, w in read_params(folder / "kogpt2.params").items()}
    weights.update({n: w for n, w in changes.items() if w is not None})
    for name in [n for n, w in changes.items() if w is None]:
        del weights[name]
    write_params(folder / "kogpt2.params", weights)


def configure(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_v1_folder_is_opened(folder: Path) -> None:
    artifact = open_artifact(folder)

    assert artifact.config == GPT2Config(500, 64, 2, 2, 256, 32)
    assert (artifact.weight_files[0].name, artifact.tokenizer_file.name) == (
        "kogpt2.params",
        "kogpt2.spiece",
    )
    assert {n: w.shape for n, w in artifact.weights.items()} == dict(shapes(artifact.config))


def test_the_size_of_a_model_is_counted_from_its_shapes(folder: Path) -> None:
    artifact = open_artifact(str(folder))
    assert artifact.fp32_bytes == sum(4 * w.size for w in artifact.weights.values())


def test_kogpt2_has_the_number_of_parameters_that_its_paper_trail_says() -> None:
    assert GPT2Config(50_000, 768, 12, 12, 3072).num_parameters == 124_242_432


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "there is no model folder" in refused(tmp_path / "없는 모델")


def test_a_file_in_place_of_a_folder_is_refused(folder: Path) -> None:
    assert "there is no model folder" in refused(folder / "kogpt2.params")


def test_a_path_too_long_for_the_file_system_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / ("x" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_refused(folder: Path) -> None:
    folder.chmod(0)
    try:
        refused(folder)
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("name", ["kogpt2.params", "kogpt2.spiece"])
def test_a_missing_file_is_named_and_what_was_found_is_listed(folder: Path, name: str) -> None:
    (folder / name).unlink()
    message = refused(folder)
    assert f"no *{Path(name).suffix} files" in message
    assert "config.json" in message


@pytest.mark.parametrize("name", ["kogpt2.params", "kogpt2.spiece"])
def test_a_second_file_of_a_kind_is_refused(folder: Path, name: str) -> None:
    shutil.copy(folder / name, folder / f"other{Path(name).suffix}")
    message = refused(folder)
    assert f"2 *{Path(name).suffix} files" in message
    assert f"other{Path(name).suffix}" in message


def test_an_empty_folder_says_that_it_holds_nothing(tmp_path: Path) -> None:
    assert "found: nothing" in refused(tmp_path)


def test_a_common_prefix_is_stripped(folder: Path, tmp_path: Path) -> None:
    wrapped = make_artifact(tmp_path / "wrapped", max_length=32, prefix="kogpt2.")
    assert_same_weights(open_artifact(wrapped), open_artifact(folder))


def test_the_other_parameters_of_a_wrapper_are_left_out(folder: Path, tmp_path: Path) -> None:
    wrapped = make_artifact(tmp_path / "wrapped", max_length=32, prefix="lm.")
    rewrite(wrapped, **{"dense.weight": np.ones((2, 2)), "x_embed.weight": np.ones((2, 2))})
    assert_same_weights(open_artifact(wrapped), open_artifact(folder))


def test_a_file_without_the_second_copy_of_the_embedding_is_opened(folder: Path) -> None:
    with_copy = open_artifact(folder)
    rewrite(folder, **{OUTPUT: None})
    assert_same_weights(open_artifact(folder), with_copy)


def test_a_second_copy_of_another_shape_is_refused(folder: Path) -> None:
    rewrite(folder, **{OUTPUT: np.zeros((499, 64), dtype=np.float32)})
    assert OUTPUT in refused(folder)


def test_half_precision_is_opened(tmp_path: Path) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "half", dtype="float16"))
    assert all(w.dtype == np.float16 for w in artifact.weights.values())


def test_double_precision_is_refused(tmp_path: Path) -> None:
    assert "float64" in refused(make_artifact(tmp_path / "double", dtype="float64"))


def test_without_config_json_heads_are_64_wide_and_the_activation_is_erf(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "wide", units=192, heads=3, layers=1)
    (folder / "config.json").unlink()
    config = open_artifact(folder).config
    assert (config.num_heads, config.activation, config.layer_norm_eps) == (3, "gelu", 1e-5)


def test_a_narrow_model_without_config_json_has_one_head(folder: Path) -> None:
    rewrite_as = make_artifact(folder, units=40, heads=1)
    (rewrite_as / "config.json").unlink()
    assert open_artifact(rewrite_as).config.num_heads == 1


def test_the_names_of_hugging_face_are_understood_in_config_json(folder: Path) -> None:
    configure(
        folder,
        n_head=4,
        n_embd=64,
        n_layer=2,
        n_positions=32,
        vocab_size=500,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-6,
        resid_pdrop=0.1,
        num_layers=None,
    )
    config = open_artifact(folder).config
    assert (config.num_heads, config.activation, config.layer_norm_eps) == (4, "gelu_new", 1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 501),
        ("vocab_size", "500"),
        ("vocab_size", [500]),
        ("n_embd", 768),
        ("num_layers", 12),
        ("num_layers", True),
        ("n_positions", 1024),
        ("max_length", {}),
    ],
)
def test_a_config_json_that_contradicts_the_parameters_is_refused(
    folder: Path, field: str, value: Any
) -> None:
    configure(folder, num_heads=2, **{field: value})
    message = refused(folder)
    assert "config.json says" in message
    assert repr(value) in message


@pytest.mark.parametrize("value", [0, -2, 3, True, "2", 2.0, [2], {}])
def test_heads_that_are_no_divisor_of_the_units_are_refused(folder: Path, value: Any) -> None:
    configure(folder, num_heads=value)
    message = refused(folder)
    assert "num_heads" in message
    assert repr(value) in message


@pytest.mark.parametrize("value", ["relu", "GELU", 1, True, ["gelu"], {"a": 1}])
def test_an_unknown_activation_is_refused(folder: Path, value: Any) -> None:
    configure(folder, num_heads=2, activation=value)
    message = refused(folder)
    assert "activation" in message
    assert "gelu, gelu_new" in message


@pytest.mark.parametrize("value", [0, 1, -1e-5, "1e-5", True, float("nan"), float("inf")])
def test_an_epsilon_that_is_no_small_number_is_refused(folder: Path, value: Any) -> None:
    configure(folder, num_heads=2, layer_norm_eps=value)
    assert "layer_norm_eps" in refused(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"]
)
def test_a_config_json_that_is_not_json_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert "config.json is not " in refused(folder)


@pytest.mark.parametrize("content", ["[]", "null", '"gelu"', "1"])
def test_a_config_json_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "must be a JSON object" in refused(folder)


def test_a_config_json_that_is_a_folder_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json is no plain file" in refused(folder)


@pytest.mark.parametrize(
    "name",
    [
        EMBEDDING,
        POSITIONS,
        "_ffn_layers.0._hidden_map.weight",
        f"{QKV.format(0)}.weight",
        f"{QKV.format(1)}.weight",  # the last layer must not just go unnoticed
        "_ffn_layers.1._out_map.bias",
        "_attn_ln.1.gamma",
        f"{FINAL_NORM}.beta",
    ],
)
def test_a_missing_parameter_is_named(folder: Path, name: str) -> None:
    rewrite(folder, **{name: None})
    assert name in refused(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (POSITIONS, (32, 63)),
        (POSITIONS, (32,)),
        (EMBEDDING, (500,)),
        (EMBEDDING, (0, 64)),
        (f"{QKV.format(0)}.weight", (64, 192)),
        ("_ffn_layers.0._hidden_map.weight", (256, 65)),
        ("_ffn_layers.1._hidden_map.weight", (128, 64)),
        (f"{FINAL_NORM}.gamma", (64, 1)),
    ],
)
def test_a_parameter_of_the_wrong_shape_is_named(
    folder: Path, name: str, shape: tuple[int, ...]
) -> None:
    rewrite(folder, **{name: np.zeros(shape, dtype=np.float32)})
    assert name in refused(folder)


def test_another_kind_of_model_is_refused_with_some_of_its_keys(folder: Path) -> None:
    write_params(folder / "kogpt2.params", {"conv0_weight": np.ones((2, 2), dtype=np.float32)})
    message = refused(folder)
    assert "not a KoGPT2 model" in message
    assert "conv0_weight" in message


def test_an_empty_file_of_parameters_is_refused(folder: Path) -> None:
    write_params(folder / "kogpt2.params", {})
    assert "not a KoGPT2 model" in refused(folder)


def assert_same_weights(found: Artifact, expected: Artifact) -> None:
    assert found.config == expected.config
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        np.testing.assert_array_equal(found.weights[name], weight)


def test_kogpt2s_release_for_pytorch_is_read_beside_its_spiece(tmp_path: Path) -> None:
    v1 = open_artifact(make_artifact(tmp_path / "v1", max_length=32))
    folder = shutil.copytree(v1.path, tmp_path / "torch")
    next(folder.glob("*.params")).unlink()
    state = {
        theirs: np.ascontiguousarray(v1.weights[ours].T if transposed else v1.weights[ours])
        for ours, theirs, transposed in hugging_face.names(v1.config)
    }
    state["lm_head.weight"] = state["transformer.wte.weight"]
    write_old(folder / "pytorch_kogpt2_676e9bcfa7.params", state)
    read = open_artifact(folder)
    assert read.config == v1.config
    assert set(read.weights) == set(v1.weights)
    for name, weight in v1.weights.items():
        np.testing.assert_array_equal(read.weights[name], weight)
    file = folder / "pytorch_kogpt2_676e9bcfa7.params"
    file.write_bytes(file.read_bytes()[:-1])
    assert "is cut short" in refused(folder)
