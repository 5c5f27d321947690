"""Directories of transformers are opened when they are sound, and refused with the reason."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from command.model_writer import write_safetensors
from common.errors import ArtifactError
from engine import backends
from engine.artifacts.artifact import EMBEDDING, OUTPUT, shapes
from engine.artifacts.config import GPT2Config
from engine.artifacts.open import open_artifact
from engine.backends.interface import Piece
from tests.engine.artifacts.reading import read_safetensors
from tests.engine.conftest import NewEngine
from tests.engine.engines import Request, is_greedy
from tests.engine.hugging_face import (
    EOS,
    TINY,
    make_hugging_face,
    random_weights,
    rounded,
    write_json,
    write_weights,
)
from tests.engine.models import make_artifact, write_params

TORCH_FILE = Path(__file__).with_name("pytorch_model.bin")
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_hugging_face(tmp_path / "model")


def refused(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    return caught.value.message


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    weights = {name: np.array(w) for name, w in read_safetensors(folder / WEIGHTS).items()}
    write_weights(folder, list(change(weights).items()))


def test_a_directory_is_opened_under_our_names(folder: Path) -> None:
    artifact = open_artifact(folder)
    assert artifact.config == GPT2Config(700, 64, 2, 4, 256, 128, "gelu_new")
    expected = dict(random_weights(artifact.config, 0))
    assert artifact.weights.keys() == expected.keys() == dict(shapes(artifact.config)).keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(artifact.weights[name], weight)
    assert artifact.generation.end_ids == (EOS,)


def test_the_weights_are_views_of_the_file(folder: Path) -> None:
    for weight in open_artifact(folder).weights.values():
        base: Any = weight
        while base is not None and not isinstance(base, np.memmap):
            base = base.base
        assert base is not None


@pytest.mark.parametrize("prefix", ["", "model.", "kogpt2.transformer."])
def test_a_prefix_of_a_wrapper_is_stripped(folder: Path, prefix: str) -> None:
    expected = {n: np.array(w) for n, w in open_artifact(folder).weights.items()}
    rewrite(folder, lambda w: {n.replace("transformer.", prefix, 1): a for n, a in w.items()})
    found = open_artifact(folder).weights
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight)


def test_shards_are_read_together(folder: Path, tmp_path: Path) -> None:
    artifact = open_artifact(make_hugging_face(tmp_path / "shards", shards=3))
    assert len(artifact.weight_files) == 3
    for name, weight in open_artifact(folder).weights.items():
        np.testing.assert_array_equal(artifact.weights[name], weight)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_half_precision_is_opened(tmp_path: Path, dtype: str, expected: Any) -> None:
    artifact = open_artifact(make_hugging_face(tmp_path / "half", dtype=dtype))
    assert {w.dtype for w in artifact.weights.values()} == {np.dtype(expected)}
    exact = dict(random_weights(artifact.config, 0))[EMBEDDING]
    np.testing.assert_array_equal(
        artifact.weights[EMBEDDING].view(np.uint16), rounded(exact, dtype).view(np.uint16)
    )


def test_what_torch_saved_is_read(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "torch", **TINY)
    expected = open_artifact(folder)
    expected_weights = {n: np.array(w) for n, w in expected.weights.items()}
    (folder / WEIGHTS).unlink()
    shutil.copyfile(TORCH_FILE, folder / TORCH_FILE.name)

    found = open_artifact(folder)

    assert found.config == expected.config
    assert found.weights.keys() == expected_weights.keys()
    for name, weight in expected_weights.items():
        np.testing.assert_array_equal(found.weights[name], weight)


def test_safetensors_come_before_what_torch_saved(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    assert open_artifact(folder).weight_files[0].name == WEIGHTS


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_new", "gelu_new"),
        ("gelu_fast", "gelu_new"),
        ("gelu_pytorch_tanh", "gelu_new"),
    ],
)
def test_each_name_of_gelu_is_understood(folder: Path, name: str, ours: str) -> None:
    configure(folder, activation_function=name)
    assert open_artifact(folder).config.activation == ours


def test_an_untied_output_projection_is_kept(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "untied", config={"tie_word_embeddings": False})
    artifact = open_artifact(folder)
    assert not artifact.config.tie_word_embeddings
    assert not np.array_equal(artifact.weights[OUTPUT], artifact.weights[EMBEDDING])
    assert artifact.fp32_bytes == sum(4 * w.size for w in artifact.weights.values())
    rewrite(folder, lambda w: {n: a for n, a in w.items() if n != "lm_head.weight"})
    assert "lacks lm_head.weight" in refused(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_function", "relu"),
        ("activation_function", "quick_gelu"),
        ("add_cross_attention", True),
        ("architectures", ["GPT2ForSequenceClassification"]),
        ("model_type", "llama"),
        ("quantization_config", {"bits": 4}),
        ("pruned_heads", {"0": [1]}),
        ("scale_attn_weights", "yes"),
        ("n_head", 5),
        ("n_embd", 32),
        ("n_layer", 3),
        ("n_inner", 100),
        ("vocab_size", 50257),
        ("n_positions", 1024),
        ("eos_token_id", "</s>"),
        ("layer_norm_epsilon", "1e-5"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_its_name(
    folder: Path, field: str, value: Any
) -> None:
    configure(folder, **{field: value})
    message = refused(folder)
    ours = {
        "activation_function": "activation",
        "n_head": "num_heads",
        "n_embd": "units",
        "n_layer": "num_layers",
        "n_inner": "hidden_size",
        "n_positions": "max_length",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    assert ours.get(field, field) in message
    assert message.startswith("config.json")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"holds no {name}" in refused(folder)


def test_a_slow_tokenizer_alone_is_refused_with_advice(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    assert "use_fast=True" in refused(folder)


def test_an_adapter_is_no_model(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert "merge_and_unload" in refused(folder)


def test_two_kinds_in_one_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    other = make_artifact(tmp_path / "v1")
    shutil.copyfile(other / "kogpt2.params", folder / "kogpt2.params")
    assert "holds both" in refused(folder)


def test_a_base_with_an_adapter_beside_it_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    message = refused(folder)
    assert "an adapter (adapter_config.json), which would not be applied" in message
    assert "merge_and_unload" in message


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_used(
    folder: Path, caplog: pytest.LogCaptureFixture, equal: bool
) -> None:
    def with_head(weights: dict[str, Any]) -> dict[str, Any]:
        head = weights["transformer.wte.weight"].copy()
        head[-1, -1] += not equal
        return {**weights, "lm_head.weight": head}

    rewrite(folder, with_head)
    configure(folder, tie_word_embeddings=True)
    artifact = open_artifact(folder)
    assert artifact.config.tie_word_embeddings is equal
    assert (OUTPUT in artifact.weights) is not equal
    assert ("lm_head.weight differs from transformer.wte.weight" in caplog.text) is not equal
    if not equal:
        last = artifact.weights[EMBEDDING][-1, -1]
        assert artifact.weights[OUTPUT][-1, -1] == last + np.float32(1)


def test_a_weight_of_another_shape_is_told_by_the_files_own_name(folder: Path) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    rewrite(folder, lambda w: {**w, name: w[name][:-1]})
    assert f"{name} is (63, 256), must be (64, 256)" in refused(folder)


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_told_from_a_damaged_file(folder: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 513302779\n"
    (folder / name).write_text(pointer)
    message = refused(folder)
    assert f"{name} is a pointer of Git LFS" in message
    assert "git lfs pull" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_weights_that_only_their_owner_may_read_say_what_helps(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        (copy := Path(shutil.copytree(folder, Path(place) / "봄"))).chmod(0o755)
        (copy / WEIGHTS).chmod(0o600)
        os.seteuid(10001)
        try:
            message = refused(copy)
        finally:
            os.seteuid(0)
    assert f"{WEIGHTS} cannot be read: Permission denied for user 10001" in message
    assert "chmod -R a+rX" in message
    assert "--user" in message


def test_a_folder_of_neither_kind_says_what_belongs_there(tmp_path: Path) -> None:
    (tmp_path / "tf_model.h5").write_bytes(b"")
    message = refused(tmp_path)
    assert "*.params" in message
    assert WEIGHTS in message
    assert "found: tf_model.h5" in message


@pytest.mark.parametrize(
    "name",
    ["transformer.h.1.attn.c_attn.weight", "transformer.ln_f.bias", "transformer.wpe.weight"],
)
def test_a_missing_weight_is_named(folder: Path, name: str) -> None:
    rewrite(folder, lambda w: {n: a for n, a in w.items() if n != name})
    message = refused(folder)
    assert WEIGHTS in message
    assert name in message or "wpe.weight" in message


@pytest.mark.parametrize(
    "name", ["transformer.h.0.attn.c_attn.lora_A", "transformer.h.0.crossattention.c_attn.weight"]
)
def test_a_weight_that_no_gpt2_has_is_refused(folder: Path, name: str) -> None:
    rewrite(folder, lambda w: {**w, name: np.zeros((2, 2), dtype=np.float32)})
    assert name in refused(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_map": {"a": "../weights"}}, "../weights, which is not beside it"),
        ({"weight_map": {"a": "fehlt.safetensors"}}, "not beside it"),
        ({"weight_map": []}, "has no weight_map"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_names_files_beside_it(tmp_path: Path, change: Any, said: str) -> None:
    folder = make_hugging_face(tmp_path / "shards", shards=2)
    write_json(folder / f"{WEIGHTS}.index.json", change)
    assert said in refused(folder)


def test_an_index_that_names_more_than_the_shards_hold_is_refused(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "shards", shards=2)
    index = folder / f"{WEIGHTS}.index.json"
    said = json.loads(index.read_text(encoding="utf-8"))
    said["weight_map"]["transformer.h.9.ln_1.weight"] = next(iter(said["weight_map"].values()))
    write_json(index, said)
    assert "names transformer.h.9.ln_1.weight, which no shard holds" in refused(folder)


# Damaged safetensors


def header(value: Any) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "too short"),
        (b"\xff" * 64, "cut short"),
        ((4).to_bytes(8, "little") + b"{{{{", "no JSON header"),
        (header([]), "no JSON header"),
        (header(entry()), "not all there"),
        (header(entry(data_offsets=[0, 4])) + bytes(8), "length of its shape"),
        (header(entry(data_offsets=[-8, 0])) + bytes(8), "damaged"),
        (header(entry(shape=[True, 2])) + bytes(8), "damaged"),
        (header(entry(dtype="F8_E4M3")) + bytes(8), "unknown type F8_E4M3"),
        (header({"x": 1}) + bytes(8), "damaged"),
        (header(entry(shape=[0] * 99, data_offsets=[0, 0])) + bytes(8), "99 dimensions"),
    ],
)
def test_a_damaged_file_of_weights_is_refused(folder: Path, content: bytes, said: str) -> None:
    (folder / WEIGHTS).write_bytes(content)
    message = refused(folder)
    assert said in message
    assert WEIGHTS in message


def test_a_file_cut_anywhere_is_refused(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    for length in (7, 8, 100, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:length])
        refused(folder)


# What comes of it


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_precision_is_computed(
    tmp_path: Path, backend: str, dtype: str, new_engine: NewEngine
) -> None:
    folder = make_hugging_face(tmp_path / "m", dtype=dtype, max_length=64)
    engine = new_engine(backend=backend, precision="fp32", memory_mib=256)
    engine.load("m", str(folder))
    request = Request(engine, "m", "안녕하세요", max_new_tokens=12).wait()
    assert is_greedy(folder, request.prompt, request.ids())


def first_logits(folder: Path, precision: str, cache: Path) -> Any:
    model = backends.load(open_artifact(folder), "native", precision, cache_dir=cache)
    logits = model.run([Piece(model.open_row(), range(8))]).copy()
    model.close()
    return logits


def test_int8_of_a_directory_is_that_of_the_same_weights_as_v1(tmp_path: Path) -> None:
    """Transposed views are quantized along the right side."""
    theirs = make_hugging_face(tmp_path / "hf", activation="gelu")
    artifact = open_artifact(theirs)
    ours = make_artifact(tmp_path / "v1", units=64, heads=4, vocab=700)
    write_params(ours / "kogpt2.params", {n: np.array(w) for n, w in artifact.weights.items()})
    cache = tmp_path / "cache"
    answers = [first_logits(folder, "int8", cache) for folder in (theirs, ours)]
    np.testing.assert_array_equal(*answers)


def test_a_changed_shard_is_another_prepared_model(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "m", shards=3)
    answers = []
    for factor in (1, 2):
        shard = sorted(folder.glob("*.safetensors"))[-1]
        weights = {n: factor * np.array(w) for n, w in read_safetensors(shard).items()}
        write_safetensors(shard, weights.items())
        answers.append(first_logits(folder, "fp32", tmp_path / "cache"))
    assert not np.array_equal(*answers)
