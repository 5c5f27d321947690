"""What kogpt2 convert does: one kind of artifact into another, and the proof that it computes the
same."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import EngineError
from engine import backends
from engine.artifacts import adapter as adapters
from engine.artifacts import hugging_face
from engine.artifacts.artifact import CONFIG_FILE, EMBEDDING, OUTPUT, Artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.files import read_json
from engine.artifacts.generation_config import FILE as GENERATION_FILE
from engine.artifacts.generation_config import HUGGING_FACE_FILE
from engine.artifacts.merged import merge
from engine.artifacts.open import open_artifact
from engine.backends.interface import Piece
from engine.prepared.folder import NAME as PREPARED
from engine.prepared.manifest import Manifests
from engine.text.chat_template import find_chat_template
from engine.text.files import CHAT_TEMPLATE, read_files
from engine.text.prompts import Prompts
from scripts.lib import spiece_to_tokenizer
from scripts.lib.folders import belongs
from scripts.lib.params_writer import write_params
from scripts.lib.portable_onnx import write_onnx
from scripts.lib.problem import Problem
from scripts.lib.safetensors_writer import write_safetensors

TOLERANCE = 1e-4  # in logits: fp32 rounds otherwise when it adds in another order
CHECK_LENGTH = 32
CHECKS = 3
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
Progress = Callable[[int], object]
Logits = NDArray[np.float32]


def open_source(folder: Path) -> Artifact:
    try:
        artifact = open_artifact(folder)
        Prompts(artifact)
    except EngineError as error:
        raise Problem(f"{folder} cannot be converted: {error.message}") from None
    return artifact


def num_bytes(artifact: Artifact) -> int:
    return sum(weight.nbytes for weight in artifact.weights.values())


def to_hugging_face(
    source: Artifact, target: Path, texts: list[str], progress: Progress
) -> list[str]:
    """A directory that transformers loads. Returns what there is to say of it."""
    config, said = source.config, []
    weights = (
        (theirs, source.weights[ours].T if transposed else source.weights[ours])
        for ours, theirs, transposed in hugging_face.names(config)
    )
    write_safetensors(target / "model.safetensors", weights, progress)
    if source.tokenizer_file.suffix == ".spiece":
        tokenizer_json = target / hugging_face.TOKENIZER_FILE
        spiece_to_tokenizer.convert(source.tokenizer_file).save(str(tokenizer_json))
        count = spiece_to_tokenizer.must_agree(source.tokenizer_file, tokenizer_json, texts)
        said.append(f"tokenizer: the same ids for {count} texts")
        shutil.copyfile(source.tokenizer_file, target / source.tokenizer_file.name)
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        vocabulary = json.loads(tokenizer_json.read_text(encoding="utf-8"))["model"]["vocab"]
        tokens = {name: token for name, token in tokens.items() if token in vocabulary}
        ends = {f"{n[:3]}_token_id": vocabulary[t] for n, t in tokens.items() if n != "pad_token"}
        _write_json(target / "tokenizer_config.json", {**_TOKENIZER_CLASS, **tokens})
        _write_json(target / CONFIG_FILE, {**_their_config(config), **ends})
        _write_json(target / HUGGING_FACE_FILE, ends)
    else:
        for name in (CONFIG_FILE, HUGGING_FACE_FILE, *TEXT_FILES):
            if (source.path / name).exists():
                shutil.copyfile(source.path / name, target / name)
        theirs = read_json(target / CONFIG_FILE)
        sizes = {
            "tie_word_embeddings": config.tie_word_embeddings,
            "vocab_size": config.vocab_size,
        }
        if {"tie_word_embeddings": True, **theirs} != {**theirs, **sizes}:
            _write_json(target / CONFIG_FILE, {**theirs, **sizes})
        for spiece in source.path.glob("*.spiece"):
            shutil.copyfile(spiece, target / spiece.name)
    return said + _copy_templates(source, target)


_TOKENIZER_CLASS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
}


def _their_config(config: GPT2Config) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.max_length,
        "n_embd": config.units,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.hidden_size,
        "activation_function": config.activation,
        "layer_norm_epsilon": config.layer_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def to_v1(
    source: Artifact, target: Path, spiece: Path | None, texts: list[str], progress: Progress
) -> list[str]:
    """`*.params` as KoGPT2 v1's tools load it, with the second copy of the embedding."""
    c, said = source.config, []
    if not (c.tie_word_embeddings and c.scale_attn_weights) or c.scale_attn_by_inverse_layer_idx:
        raise Problem(
            f"{source.path} cannot become a v1 model, which has a tied output projection and"
            " attention scaled in one way only"
        )
    if source.tokenizer_file.suffix == ".spiece":
        spiece = source.tokenizer_file
    else:
        spiece = spiece or next(iter(sorted(source.path.glob("*.spiece"))), None)
        if spiece is None:
            raise Problem(
                "a v1 model needs a sentencepiece model, and a tokenizer.json cannot become one:"
                " name the *.spiece that it was made from with --spiece"
            )
        count = spiece_to_tokenizer.must_agree(spiece, source.tokenizer_file, texts)
        said.append(f"tokenizer: the same ids for {count} texts")
    shutil.copyfile(spiece, target / "kogpt2.spiece")
    dtype = "float16" if source.weights[EMBEDDING].dtype == np.float16 else "float32"
    weights = [*source.weights.items(), (OUTPUT, source.weights[EMBEDDING])]
    write_params(target / "kogpt2.params", weights, dtype, progress)
    _write_json(
        target / CONFIG_FILE,
        {
            "num_heads": c.num_heads,
            "activation": c.activation,
            "layer_norm_eps": c.layer_norm_eps,
        },
    )
    return said + _copy_templates(source, target)


def _copy_templates(source: Artifact, target: Path) -> list[str]:
    """A chat's, and `generation.json`, unless the other kind of tokenizer cuts its template
    otherwise."""
    chat = find_chat_template(read_files(source.tokenizer_file))
    if chat is not None:
        (target / CHAT_TEMPLATE).write_text(chat[0], encoding="utf-8")
    file = source.path / GENERATION_FILE
    if not file.exists():
        return []
    shutil.copyfile(file, target / GENERATION_FILE)
    if source.generation.template is None:
        return []
    try:
        for text in ("안녕", "오늘 날씨 어때?"):
            inputs = dict.fromkeys(source.generation.template.fields, text)
            mine, other = (Prompts(a).encode(inputs) for a in (source, open_artifact(target)))
            if mine != other:
                break
        else:
            return []
    except EngineError:
        pass
    (target / GENERATION_FILE).unlink()
    return [f"{GENERATION_FILE} is left out: the other tokenizer cuts its template otherwise"]


def to_prepared(source: Artifact, target: Path, backend: str, precision: str) -> None:
    """The same artifact with its prepared file, which is the same on every processor."""
    for path in source.path.iterdir():
        if path.is_file() and belongs(path):
            shutil.copyfile(path, target / path.name)
    prepare(target, backend, precision)


def prepare(folder: Path, backend: str, precision: str) -> None:
    """Where it is now: a prepared model remembers the place of the files that it was made from."""
    for source in (folder / PREPARED).glob("*.source.json"):
        source.unlink()
    backends.load(Manifests().open(folder), backend, precision).close()


def to_onnx(source: Artifact, target: Path, with_past: bool, progress: Progress) -> None:
    """`1/model.onnx` in `target`, as Triton has it."""
    (target / "1").mkdir()
    write_onnx(source.config, source.weights, target / "1" / "model.onnx", with_past, progress)


def to_whole(adapter: Path, base: Artifact, target: Path) -> list[str]:
    """An adapter merged into its base, as `to_hugging_face` writes it."""
    from scripts.lib import lora

    try:
        found = adapters.read(adapter)
        merged = merge(base, found)
        said = to_hugging_face(replace(merged, path=base.path), target, [], lambda _: None)
    except EngineError as error:
        raise Problem(f"{adapter} cannot be merged: {error.message}") from None
    if merged.tokenizer_file.parent != base.path:  # its vocabulary is another
        for name in TEXT_FILES:
            if (adapter / name).exists():
                shutil.copyfile(adapter / name, target / name)
    with tempfile.TemporaryDirectory(prefix="convert-") as work:
        after = logits(open_artifact(target), "fp32", Path(work) / "after")
        if found.is_thin:
            before = lora.last_logits(adapter, base, prompts(base.config))
        else:
            before = logits(merged, "fp32", Path(work) / "before")
    return [*said, _distance(before, after)]


def let_others_read(folder: Path) -> None:
    """The server runs as a user of its own. The package safetensors writes for the owner only."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


# The proof


def prompts(config: GPT2Config) -> Iterator[NDArray[np.int64]]:
    """Ids (T,) of several lengths."""
    rng = np.random.default_rng(0)
    longest = min(CHECK_LENGTH, config.max_length)
    for length in np.linspace(1, longest, CHECKS).astype(int):
        yield rng.integers(0, config.vocab_size, length)


def logits(artifact: Artifact, precision: str, cache_dir: Path, backend: str = "native") -> Logits:
    """After each of the prompts (CHECKS, V)."""
    model = backends.load(artifact, backend, precision, cache_dir=cache_dir)
    found = []
    for ids in prompts(artifact.config):
        row = model.open_row()
        found.append(model.run([Piece(row, ids.tolist())])[0].copy())
        model.close_row(row)
    model.close()
    return np.stack(found)


def onnx_logits(config: GPT2Config, path: Path, with_past: bool) -> Logits:
    """The same of a portable graph, run by onnxruntime: with a past, token after token."""
    from common.onnx_session import open_graph

    session = open_graph(path)
    found = []
    for ids in prompts(config):
        pieces = [ids[i : i + 1] for i in range(len(ids))] if with_past else [ids]
        shape = (1, config.num_heads, 0, config.head_size)
        past = [i.name for i in session.get_inputs()[2:]]
        cache = {name: np.zeros(shape, dtype=np.float32) for name in past}
        done = 0
        for piece in pieces:
            done += len(piece)
            given = {"input_ids": piece[None], "attention_mask": np.ones((1, done), np.int64)}
            answers = session.run(None, {**given, **cache})
            cache = dict(zip(past, answers[1:], strict=True))
        found.append(answers[0][0, -1])
    return np.stack(found)


def verify(
    source: Artifact, target: Path, kind: str, backend: str, precision: str, with_past: bool
) -> str:
    """Compares the logits before and after; returns what to say. Raises `Problem`."""
    with tempfile.TemporaryDirectory(prefix="convert-") as work:
        before = logits(source, "fp32", Path(work))
        if kind == "onnx":
            after = onnx_logits(source.config, target / "1" / "model.onnx", with_past)
        elif kind == "prepared":
            after = logits(open_artifact(target), precision, target / PREPARED, backend)
        else:
            after = logits(open_artifact(target), "fp32", Path(work))
    error = float(np.abs(after - before).max())
    same = int((after.argmax(axis=1) == before.argmax(axis=1)).sum())
    if precision.startswith("int8"):
        return (
            f"logits: {error:.3g} apart at most, of {float(before.std()):.3g} standard deviation;"
            f" the likeliest token is the same for {same} of {len(before)} prompts"
        )
    return _distance(before, after)


def _distance(before: Logits, after: Logits) -> str:
    """Raises `Problem` where they are further apart than rounding explains."""
    error = float(np.abs(after - before).max())
    scale = max(1.0, float(np.abs(before).max()))
    if not error <= TOLERANCE * scale:
        raise Problem(f"the result computes something else: logits are {error:.3g} apart")
    return f"logits: {error:.3g} apart at most"
