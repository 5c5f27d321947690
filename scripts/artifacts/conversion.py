"""Converts a model from one kind into another, and compares the logits before and after."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from command.documents import write_json
from command.errors import Problem
from command.logits import logits_after
from command.model_writer import write_params, write_safetensors
from common.errors import EngineError, ServiceError
from common.model_files import BASE_NAME, DELTA, WEIGHTS, is_adapter, is_delta, visible
from engine import backends
from engine.artifacts import adapter as adapters
from engine.artifacts import hugging_face
from engine.artifacts.artifact import CONFIG_FILE, EMBEDDING, OUTPUT, Artifact
from engine.artifacts.classifier import BIAS, WEIGHT
from engine.artifacts.config import GPT2Config
from engine.artifacts.files import read_json
from engine.artifacts.generation_config import FILE as GENERATION_FILE
from engine.artifacts.generation_config import HUGGING_FACE_FILE
from engine.artifacts.merged import merge
from engine.artifacts.open import open_artifact
from engine.artifacts.read_safetensors import read_safetensors
from engine.artifacts.tensor_index import map_index, read_tensor
from engine.native.adapter import NativeAdapter, load_adapter
from engine.native.delta import Delta, choices_of, layout, matrices, open_delta
from engine.native.delta_folder import LABELS, read_folder
from engine.native.prepared import Stored, save_arrays
from engine.prepared.folder import NAME as PREPARED
from engine.prepared.manifest import Manifests
from engine.text.chat_template import find_chat_template
from engine.text.files import CHAT_TEMPLATE, read_files
from engine.text.prompts import Prompts
from scripts.artifacts import tokenizer_json
from scripts.artifacts.delta_weights import whole_of
from scripts.artifacts.folder import belongs
from serving.models.model_settings import FILE, ModelSettings

TOLERANCE = 1e-4  # of logits: fp32 sums in another order differ by less
BACKEND = "native"
CHECK_LENGTH = 32  # tokens of the longest prompt whose logits are compared
CHECKS = 3  # prompts whose logits are compared
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
Progress = Callable[[int], object]
Logits = NDArray[np.float32]


def open_source(folder: Path, classifies: bool = False) -> Artifact:
    """Open a model to convert. Raises `Problem`, for a classifier unless it `classifies`."""
    try:
        artifact = open_artifact(folder)
        Prompts(artifact)
    except EngineError as error:
        raise Problem(f"{folder} cannot be converted: {error.message}") from None
    if artifact.classifier is not None and not classifies:
        raise Problem(
            f"{folder} is a classifier, which becomes only prepared, or a delta of a base"
        )
    return artifact


def to_hugging_face(
    source: Artifact, target: Path, texts: list[str], progress: Progress
) -> list[str]:
    """Write a directory that transformers loads. Returns lines for the user."""
    config, lines = source.config, list[str]()
    weights = (
        (theirs, source.weights[ours].T if transposed else source.weights[ours])
        for ours, theirs, transposed in hugging_face.names(config)
    )
    write_safetensors(target / "model.safetensors", weights, progress)
    if source.tokenizer_file.suffix == ".spiece":
        tokenizer_file = target / hugging_face.TOKENIZER_FILE
        tokenizer_json.convert(source.tokenizer_file).save(str(tokenizer_file))
        count = tokenizer_json.must_agree(source.tokenizer_file, tokenizer_file, texts)
        lines.append(f"tokenizer: the same ids for {count} texts")
        shutil.copyfile(source.tokenizer_file, target / source.tokenizer_file.name)
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        vocabulary = json.loads(tokenizer_file.read_text(encoding="utf-8"))["model"]["vocab"]
        tokens = {name: token for name, token in tokens.items() if token in vocabulary}
        ends = {f"{n[:3]}_token_id": vocabulary[t] for n, t in tokens.items() if n != "pad_token"}
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_json(target / "tokenizer_config.json", {**kind, **tokens}, 2)
        fields = {**_their_config(config), **_base_name(source), **ends}
        write_json(target / CONFIG_FILE, fields, 2)
        write_json(target / HUGGING_FACE_FILE, ends, 2)
    else:
        for name in (CONFIG_FILE, HUGGING_FACE_FILE, *TEXT_FILES):
            if (source.path / name).exists():
                shutil.copyfile(source.path / name, target / name)
        theirs = read_json(target / CONFIG_FILE)
        sizes = {"tie_word_embeddings": config.tie_word_embeddings, "vocab_size": config.vocab_size}
        if {"tie_word_embeddings": True, **theirs} != {**theirs, **sizes}:
            write_json(target / CONFIG_FILE, {**theirs, **sizes}, 2)
        for spiece in visible(source.path, "*.spiece"):
            shutil.copyfile(spiece, target / spiece.name)
    return lines + _copy_templates(source, target)


def _base_name(source: Artifact) -> dict[str, Any]:
    """The field of `config.json` with the name of the model's base, if it has one."""
    file = source.path / CONFIG_FILE
    given = read_json(file) if file.exists() else {}
    return {BASE_NAME: given[BASE_NAME]} if BASE_NAME in given else {}


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
    """Write `*.params` as KoGPT2 v1's tools load it, with a second copy of the embedding.

    Returns lines for the user. Raises `Problem` for a model that v1 has no way to describe.
    """
    c, lines = source.config, list[str]()
    if not (c.tie_word_embeddings and c.scale_attn_weights) or c.scale_attn_by_inverse_layer_idx:
        raise Problem(
            f"{source.path} cannot become a v1 model: v1 ties the output projection to the"
            " embedding and scales attention by the head size only"
        )
    if source.tokenizer_file.suffix == ".spiece":
        spiece = source.tokenizer_file
    else:
        spiece = spiece or next(iter(visible(source.path, "*.spiece")), None)
        if spiece is None:
            raise Problem(
                f"a v1 model needs a sentencepiece model, and {source.path} has a"
                " tokenizer.json only: give the *.spiece it was made from with --spiece"
            )
        count = tokenizer_json.must_agree(spiece, source.tokenizer_file, texts)
        lines.append(f"tokenizer: the same ids for {count} texts")
    shutil.copyfile(spiece, target / "kogpt2.spiece")
    dtype = "float16" if source.weights[EMBEDDING].dtype == np.float16 else "float32"
    weights = [*source.weights.items(), (OUTPUT, source.weights[EMBEDDING])]
    write_params(target / "kogpt2.params", weights, dtype, progress)
    sizes = {"num_heads": c.num_heads, "activation": c.activation}
    fields = {**sizes, "layer_norm_eps": c.layer_norm_eps, **_base_name(source)}
    write_json(target / CONFIG_FILE, fields, 2)
    return lines + _copy_templates(source, target)


def _copy_templates(source: Artifact, target: Path) -> list[str]:
    """Copy the chat template and `generation.json`. Returns lines for the user.

    `generation.json` is left out if the other tokenizer gives its template other ids.
    """
    chat = find_chat_template(read_files(source.tokenizer_file))
    if chat is not None:
        (target / CHAT_TEMPLATE).write_text(chat[0], encoding="utf-8")
    file = source.path / GENERATION_FILE
    if not file.exists():
        return []
    shutil.copyfile(file, target / GENERATION_FILE)
    if source.generation.template is None:
        return []
    texts = [
        dict.fromkeys(source.generation.template.fields, text)
        for text in ("안녕", "오늘 날씨 어때?")
    ]
    with contextlib.suppress(EngineError):
        before, after = (Prompts(a) for a in (source, open_artifact(target)))
        if all(before.encode(inputs) == after.encode(inputs) for inputs in texts):
            return []
    (target / GENERATION_FILE).unlink()
    return [f"{GENERATION_FILE} is left out: the other tokenizer gives its template other ids"]


def to_delta(source: Artifact, base: Artifact, target: Path, cache_dir: Path) -> str:
    """Write what a fine-tune adds to its base, with its tokenizer and settings.

    Shows a progress bar, and returns a line for the user.

    `config.json` names the base as its folder or archive is called: it is looked up by that name
    where the delta is served. Raises `Problem` where the fine-tune is no delta of the base.

    cache_dir: for prepared files
    """
    try:
        settings = ModelSettings.read(source.path)
    except ServiceError as error:
        raise Problem(f"{source.path}: {error.message}") from None
    if settings.precision not in (None, "int8") or settings.share is False:
        raise Problem(f"{source.path / FILE} says that the model must be whole: remove that")
    total = len(matrices(source.config))
    try:
        with tqdm(total=total, desc="delta", unit=" matrices", disable=None, leave=False) as bar:
            delta = open_delta(source, base, cache_dir, progress=bar.update)
    except EngineError as error:
        raise Problem(
            f"{source.path.name} cannot be a delta of {base.path.name}: {error.message}"
        ) from None
    with contextlib.closing(delta):
        _write_delta(delta, target / DELTA)
        line = f"delta: {delta.summary}"
    weights = {file.name for file in source.weight_files}
    for path in source.path.iterdir():
        of_weights = path.name in weights or WEIGHTS.fullmatch(path.name)
        if path.is_file() and belongs(path) and not of_weights:
            shutil.copyfile(path, target / path.name)
    name = base.path.name.removesuffix(".tar.gz")
    write_json(target / CONFIG_FILE, {**read_json(target / CONFIG_FILE), BASE_NAME: name}, 2)
    return line


def _write_delta(delta: Delta, path: Path) -> None:
    """Write the file of a delta, for a classifier with its head behind it."""
    whole, source = delta.whole, delta.file.path
    if whole.classifier is None:
        shutil.copyfile(source, path)
        return
    index, metadata, _ = read_safetensors(source)
    metadata[LABELS] = json.dumps(whole.classifier.to_json())
    head = {
        name: np.asarray(read_tensor(whole.path, name, whole.index[name]), np.float32)
        for name in (WEIGHT, BIAS)
        if name in whole.index
    }
    entries: list[Stored] = [*layout(whole.config, choices_of(metadata), delta.more)]
    entries += [Stored(name, array.shape, "F32") for name, array in head.items()]
    save_arrays(path, entries, metadata, map_index(source.parent, index) | head)


def to_prepared(source: Artifact, target: Path, precision: str) -> None:
    """Copy the artifact and add its prepared file, which is the same on every processor."""
    for path in source.path.iterdir():
        if path.is_file() and belongs(path):
            shutil.copyfile(path, target / path.name)
    prepare(target, precision)


def prepare(folder: Path, precision: str) -> None:
    """Write the prepared file. Call again after a rename, for the paths of its sources."""
    for source in (folder / PREPARED).glob("*.source.json"):
        source.unlink()
    backends.load(Manifests().open(folder), BACKEND, precision).close()


def to_whole(source: Path, base: Artifact, target: Path) -> list[str]:
    """Write the whole model of a delta, or of an adapter, as `to_hugging_face` does.

    Returns lines for the user. Raises `Problem`.
    """
    if not (is_delta(source) or is_adapter(source)):
        raise Problem(f"{source} holds neither a delta nor an adapter: only these become whole")
    return (_whole_delta if is_delta(source) else _merge)(source, base, target)


def _whole_delta(folder: Path, base: Artifact, target: Path) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="convert-") as work:
        cache = Path(work)
        try:
            opened = read_folder(folder)
            if opened.described.classifier is not None:
                raise Problem(f"{folder} is a classifier, which is served beside its base only")
            delta = opened.open(base, cache)
        except EngineError as error:
            raise Problem(f"{folder} cannot be made whole: {error.message}") from None
        with contextlib.closing(delta.load()) as adapter:
            lines = to_hugging_face(whole_of(delta, cache), target, [], lambda _: None)
            after = logits(open_artifact(target), cache)
            before = logits(base, cache, adapter, "int8")
    apart = float(np.sqrt(np.mean(np.square(after - before))) / np.std(before))
    return [*lines, f"approximate: logits {apart:.2%} from those of the delta, in int8"]


def _merge(adapter: Path, base: Artifact, target: Path) -> list[str]:
    try:
        opened = adapters.read(adapter)
        if opened.classifier is not None:
            raise Problem(f"{adapter} is a classifier, which is served beside its base only")
        merged = merge(base, opened)
        lines = to_hugging_face(replace(merged, path=base.path), target, [], lambda _: None)
    except EngineError as error:
        raise Problem(f"{adapter} cannot be merged: {error.message}") from None
    if merged.tokenizer_file.parent != base.path:  # the adapter has its own tokenizer
        for name in TEXT_FILES:
            if (adapter / name).exists():
                shutil.copyfile(adapter / name, target / name)
    with tempfile.TemporaryDirectory(prefix="convert-") as work:
        after = logits(open_artifact(target), Path(work) / "after")
        source, beside = (base, opened) if opened.is_thin else (merged, None)
        cache = Path(work) / "before"
        packed = load_adapter(beside, source, "fp32", cache) if beside else None
        before = logits(source, cache, packed)
    return [*lines, _distance(before, after)]


# Comparing logits


def prompts(config: GPT2Config) -> Iterator[NDArray[np.int64]]:
    """Yield random ids (T,) of several lengths T."""
    rng = np.random.default_rng(0)
    longest = min(CHECK_LENGTH, config.max_length)
    for length in np.linspace(1, longest, CHECKS).astype(int):
        yield rng.integers(0, config.vocab_size, length)


def logits(
    artifact: Artifact,
    cache_dir: Path,
    adapter: NativeAdapter | None = None,
    precision: str = "fp32",
) -> Logits:
    """Compute the logits (CHECKS, V) of the token after each of the prompts."""
    rows = []
    model = backends.load(artifact, BACKEND, precision, cache_dir=cache_dir)
    with contextlib.closing(model):
        for ids in prompts(artifact.config):
            rows.append(logits_after(model, ids.tolist(), adapter=adapter)[0])
    return np.stack(rows)


def verify(source: Artifact, target: Path, kind: str) -> str:
    """Compare the logits before and after, in fp32; return a line for the user.

    Raises `Problem` if they differ by more than rounding.
    """
    with tempfile.TemporaryDirectory(prefix="convert-") as work:
        before = logits(source, Path(work))
        cache = target / PREPARED if kind == "prepared" else Path(work)
        after = logits(open_artifact(target), cache)
    return _distance(before, after)


def _distance(before: Logits, after: Logits) -> str:
    """Return a line with the largest difference. Raises `Problem` above `TOLERANCE`."""
    error = float(np.abs(after - before).max())
    scale = max(1.0, float(np.abs(before).max()))
    if not error <= TOLERANCE * scale:
        raise Problem(
            f"the converted model computes other logits: {error:.3g} apart,"
            f" at most {TOLERANCE * scale:.3g} is rounding"
        )
    return f"logits: {error:.3g} apart at most"
