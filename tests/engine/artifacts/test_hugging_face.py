"""Directories of transformers are opened when they are sound, and refused with the reason."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import backends
from engine.artifacts.artifact import EMBEDDING, OUTPUT, POSITIONS, shapes
from engine.artifacts.config import GPT2Config
from engine.artifacts.open import open_artifact
from engine.prepared.manifest import content_of
from engine.text.chat_template import find_chat_template
from engine.text.files import read_files
from engine.text.hugging_face import HuggingFaceTokenizer
from testbed.weights import random_weights
from tests.engine.artifacts.reading import (
    assert_same_weights,
    file_of,
    read_safetensors,
    refused,
)
from tests.engine.artifacts.torch_files import Saved, state_dict, write
from tests.engine.backends.running import logits_of
from tests.engine.hugging_face import (
    EOS,
    TINY,
    make_hugging_face,
    write_json,
    write_weights,
)
from tests.engine.models import make_artifact, write_params

TORCH_FILE = Path(__file__).with_name("pytorch_model.bin")
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_hugging_face(tmp_path / "model")


def test_a_byte_order_mark_before_any_file_of_text_changes_nothing(folder: Path) -> None:
    write_json(folder / "generation.json", {"template": "<usr>{text}"})
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}", encoding="utf-8")
    artifact = open_artifact(folder)
    ids = HuggingFaceTokenizer(artifact.tokenizer_file).encode("산에는 꽃 피네")
    for path in (*folder.glob("*.json"), folder / "chat_template.jinja"):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    marked = open_artifact(folder)
    assert (marked.config, marked.generation) == (artifact.config, artifact.generation)
    assert HuggingFaceTokenizer(marked.tokenizer_file).encode("산에는 꽃 피네") == ids
    template = find_chat_template(read_files(marked.tokenizer_file))
    assert template == ("{{ messages[-1].content }}", "chat_template.jinja")


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    weights = {name: np.array(w) for name, w in read_safetensors(folder / WEIGHTS).items()}
    write_weights(folder, list(change(weights).items()))


def test_a_directory_is_opened_as_views_under_our_names(folder: Path) -> None:
    artifact = open_artifact(folder)
    assert artifact.config == GPT2Config(700, 64, 2, 4, 256, 128, "gelu_new")
    assert artifact.weights.keys() == dict(shapes(artifact.config)).keys()
    assert_same_weights(artifact, dict(random_weights(artifact.config, [0, 0])))
    assert artifact.generation.end_ids == (EOS,)
    assert {file_of(weight) for weight in artifact.weights.values()} == {folder / WEIGHTS}


@pytest.mark.parametrize("prefix", ["", "model.", "kogpt2.transformer."])
def test_a_prefix_of_a_wrapper_is_stripped(folder: Path, prefix: str) -> None:
    expected = {n: np.array(w) for n, w in open_artifact(folder).weights.items()}
    rewrite(folder, lambda w: {n.replace("transformer.", prefix, 1): a for n, a in w.items()})
    assert_same_weights(open_artifact(folder), expected)


def test_what_torch_saved_is_read_where_there_are_no_safetensors(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "torch", **TINY)
    shutil.copyfile(TORCH_FILE, folder / TORCH_FILE.name)
    expected = open_artifact(folder)
    assert expected.weight_files[0].name == WEIGHTS
    weights = {n: np.array(w) for n, w in expected.weights.items()}
    (folder / WEIGHTS).unlink()
    found = open_artifact(folder)
    assert found.config == expected.config
    assert_same_weights(found, weights)


def test_each_name_of_gelu_is_understood(folder: Path) -> None:
    for name in ("gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        configure(folder, activation_function=name)
        ours = "gelu" if name in ("gelu", "gelu_python") else "gelu_new"
        assert open_artifact(folder).config.activation == ours


def test_a_generations_length_is_not_the_contexts(folder: Path) -> None:
    """`max_length` was taken for the context's length, and the model was refused."""
    configure(folder, max_length=50)  # beside n_positions
    assert open_artifact(folder).config.max_length == 128


THEIR_NAMES = {
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}


def test_the_other_names_of_transformers_sizes_count(folder: Path) -> None:
    expected = open_artifact(folder).config
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    renamed = {THEIR_NAMES.get(name, name): value for name, value in fields.items()}
    write_json(folder / "config.json", renamed)
    assert open_artifact(folder).config == expected
    # v1's names say nothing here, as transformers does not read them.
    v1 = {"num_heads": 2, "units": 1, "num_layers": 1, "activation": "gelu"}
    write_json(folder / "config.json", renamed | v1 | fields)
    assert open_artifact(folder).config == expected
    configure(folder, num_hidden_layers=3, n_layer=None)
    assert "config.json says num_hidden_layers 3, but model.safetensors has 2" in refused(folder)


def test_a_guess_of_the_number_of_heads_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = make_hugging_face(tmp_path / "m", units=96, heads=12)
    open_artifact(folder)
    assert "assumed" not in caplog.text
    configure(folder, n_head=None)
    assert open_artifact(folder).config.num_heads == 12  # as in transformers
    assert "config.json does not give n_head: 12 heads of 8 are assumed" in caplog.text


def two(weights: dict[str, Any], other: str) -> dict[str, Any]:
    """A policy, and another model with other numbers."""
    first = {f"policy.{name}": weight for name, weight in weights.items()}
    return first | {f"{other}.{name}": weight + 1 for name, weight in weights.items()}


@pytest.mark.parametrize("other", ["old", "policy.teacher"])
def test_two_models_in_one_file_are_refused(folder: Path, other: str) -> None:
    rewrite(folder, lambda w: two(w, other))
    message = refused(folder)
    for prefix in ("policy.transformer.*", f"{other}.transformer.*"):
        assert prefix in message
    assert "holds two GPT-2s" in message


def test_one_model_under_two_names_of_the_same_tensors_is_one(folder: Path) -> None:
    """As torch saves a module that a wrapper holds twice."""
    expected = {n: np.array(w) for n, w in open_artifact(folder).weights.items()}
    state = read_safetensors(folder / WEIGHTS)
    numbers = np.concatenate([np.ravel(w) for w in state.values()])
    saved, begin = {}, 0
    for name, w in state.items():
        strides = [step // 4 for step in np.empty(w.shape, np.float32).strides]
        for prefix in ("a", "model.b"):
            saved[f"{prefix}.{name}"] = Saved(w.shape, strides, begin, numbers.size)
        begin += w.size
    (folder / WEIGHTS).unlink()
    write(folder / TORCH_FILE.name, state_dict(saved), numbers.tobytes())
    assert_same_weights(open_artifact(folder), expected)


@pytest.mark.parametrize("head", ["classifier.0.weight", "qa_outputs.weight"])
def test_another_head_than_transformers_own_without_architectures_is_refused(
    folder: Path, head: str
) -> None:
    rewrite(folder, lambda w: {**w, head: np.ones((2, 64), np.float32)})
    open_artifact(folder)  # architectures says that it is a language model
    configure(folder, architectures=None)
    assert f"holds {head}, the head of a classifier" in refused(folder)
    rewrite(folder, lambda w: {**w, "lm_head.weight": w["transformer.wte.weight"]})
    open_artifact(folder)


def test_weights_in_float64_that_float32_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "m", dtype="float64")
    rewrite(folder, lambda w: {**w, "transformer.wpe.weight": w["transformer.wpe.weight"] * 1e200})
    message = refused(folder, lambda path: content_of(open_artifact(path)))
    assert message == f"{WEIGHTS}: {POSITIONS} holds NaN or infinity"


def test_an_untied_output_projection_is_kept(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "untied", config={"tie_word_embeddings": False})
    artifact = open_artifact(folder)
    assert not artifact.config.tie_word_embeddings
    assert not np.array_equal(artifact.weights[OUTPUT], artifact.weights[EMBEDDING])
    assert artifact.fp32_bytes == sum(4 * w.size for w in artifact.weights.values())
    rewrite(folder, lambda w: {n: a for n, a in w.items() if n != "lm_head.weight"})
    assert "lacks lm_head.weight" in refused(folder)


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("activation_function", "relu", "activation"),
        ("add_cross_attention", True, ""),
        ("architectures", ["GPT2ForQuestionAnswering"], ""),
        ("architectures", 7, "architectures is 7, must be a list of names"),
        ("architectures", {"a": 1}, "architectures is {'a': 1}"),
        ("model_type", "llama", ""),
        ("model_type", "가" * 100_000, "model_type is '가"),
        ("quantization_config", {"bits": 4}, ""),
        ("pruned_heads", {"0": [1]}, ""),
        ("scale_attn_weights", "yes", ""),
        ("n_inner", 100, "says n_inner 100, but"),  # test_artifact.py has the other sizes
        ("n_head", 5, "n_head is 5, must divide the 64 units"),
        ("hidden_size", 96, "says n_embd 64 and hidden_size 96: give one of them"),
        ("num_attention_heads", 2, "says n_head 4 and num_attention_heads 2"),
        ("eos_token_id", "</s>", ""),
    ],
)
def test_what_cannot_be_computed_is_refused(
    folder: Path, field: str, value: Any, name: str
) -> None:
    configure(folder, **{field: value})
    message = refused(folder)
    assert message.startswith("config.json")
    assert (name or field) in message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_a_missing_file_or_a_pointer_of_git_lfs_is_named(folder: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 513302779\n"
    (folder / name).write_text(pointer)
    message = refused(folder)
    assert f"{name} is a pointer of Git LFS" in message
    assert "git lfs pull" in message
    (folder / name).unlink()
    assert name in refused(folder)


def test_folders_of_other_kinds_are_refused_with_advice(folder: Path, tmp_path: Path) -> None:
    other = make_artifact(tmp_path / "v1")
    shutil.copyfile(other / "kogpt2.params", folder / "kogpt2.params")
    assert "holds both" in refused(folder)
    (folder / "kogpt2.params").unlink()
    (folder / "adapter_config.json").write_text("{}")
    message = refused(folder)
    assert "an adapter (adapter_config.json), which would not be applied" in message
    assert "merge_and_unload" in message
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert "merge_and_unload" in refused(folder)
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "tf_model.h5").write_bytes(b"")
    message = refused(tmp_path / "keras")
    assert all(name in message for name in ("*.params", WEIGHTS, "found: tf_model.h5"))


def test_a_slow_tokenizer_alone_is_refused_with_advice(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    assert "use_fast=True" in refused(folder)
    for name in ("vocab.json", "kogpt2.spiece"):  # both, or KoGPT2 v1's alone
        (folder / "kogpt2.spiece").write_bytes(b"")
        assert 'torch.save(model.state_dict(), "kogpt2.params")' in refused(folder)
        (folder / name).unlink()


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


def test_a_wrong_weight_is_named_as_in_the_file(folder: Path) -> None:
    weights = {name: np.array(w) for name, w in read_safetensors(folder / WEIGHTS).items()}
    cut = weights["transformer.h.1.mlp.c_fc.weight"][:-1]
    for name, weight, reason in (
        ("h.1.mlp.c_fc.weight", cut, "is (63, 256), must be (64, 256)"),
        ("h.1.attn.c_attn.weight", None, ""),
        ("ln_f.bias", None, ""),
        ("wpe.weight", None, ""),
        ("h.0.attn.c_attn.lora_A", cut, ""),
        ("h.0.crossattention.c_attn.weight", cut, ""),
    ):
        changed = {**weights, f"transformer.{name}": weight}
        write_weights(folder, [(n, w) for n, w in changed.items() if w is not None])
        message = refused(folder)
        assert WEIGHTS in message
        assert f"{name} {reason}".strip() in message


def test_a_layer_of_a_thousand_digits_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    names = ["transformer.wte.weight", "transformer.wpe.weight"]
    names.append(f"transformer.h.{'9' * 900}.ln_1.weight")
    saved = {name: Saved([1, 1], [1, 1]) for name in names}
    write(folder / "pytorch_model.bin", state_dict(saved))
    assert "which is not part of a GPT-2" in refused(folder)
    saved[f"transformer.h.{'9' * 5000}.ln_1.weight"] = saved[names[0]]
    write(folder / "pytorch_model.bin", state_dict(saved))
    assert "the name of a tensor has 5026 characters" in refused(folder)


def test_an_index_names_what_files_beside_it_hold(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "shards", shards=2)
    index = folder / f"{WEIGHTS}.index.json"
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    file = next(iter(places.values()))
    for change, reason in (
        ({"weight_map": {"a": "../weights"}}, "../weights, which is not beside it"),
        ({"weight_map": {"a": "fehlt.safetensors"}}, "not beside it"),
        ({"weight_map": []}, "has no weight_map"),
        ({}, "has no weight_map"),
        ({"weight_map": {**places, "h.9.ln_1.weight": file}}, "ln_1.weight, which no shard holds"),
        ({"weight_map": {**places, "\ud800": "\udfff"}}, "holds \\ud800"),
    ):
        index.write_text(json.dumps(change))
        assert reason in refused(folder)


# Damaged safetensors


def header(value: Any) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "too short"),
        (b"\xff" * 64, "cut short"),
        ((4).to_bytes(8, "little") + b"{{{{", "no JSON header"),
        (header([]), "no JSON header"),
        (header(entry()), "not all there"),
        (header(entry(data_offsets=[0, 4])) + bytes(8), "length of its shape"),
        (header(entry(data_offsets=[-8, 0])) + bytes(8), "damaged"),
        (header(entry(shape=[True, 2])) + bytes(8), "damaged"),
        (header(entry(dtype="F8_E4M3")) + bytes(8), "x is of type F8_E4M3, must be one of"),
        (header({"x": 1}) + bytes(8), "damaged"),
        (header(entry(shape=[0] * 99, data_offsets=[0, 0])) + bytes(8), "99 dimensions"),
    ],
)
def test_a_damaged_file_of_weights_is_refused(folder: Path, content: bytes, reason: str) -> None:
    (folder / WEIGHTS).write_bytes(content)
    message = refused(folder)
    assert reason in message
    assert WEIGHTS in message


# Computing with it


def first_logits(folder: Path, precision: str, cache: Path) -> Any:
    artifact = open_artifact(folder)
    with closing(backends.load(artifact, "native", precision, cache_dir=cache)) as model:
        return logits_of(model, range(8))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_logits_are_those_of_the_same_weights_as_v1(
    tmp_path: Path, dtype: str, precision: str
) -> None:
    """Transposed views are packed, and quantized along the right side."""
    theirs = make_hugging_face(tmp_path / "hf", activation="gelu", dtype=dtype)
    weights = {n: w.astype(np.float32) for n, w in open_artifact(theirs).weights.items()}
    ours = make_artifact(tmp_path / "v1", units=64, heads=4, vocab=700)
    write_params(ours / "kogpt2.params", weights)
    cache = tmp_path / "cache"
    answers = [first_logits(folder, precision, cache) for folder in (theirs, ours)]
    np.testing.assert_array_equal(*answers)
