"""Random models of KoGPT2's shape, as artifacts, whose tokenizer restores every text exactly.

Each piece is one character, so no two of them merge: text made of pieces is cut into the same
pieces again, and a loop that tokenizes its text anew at every step sees one token more each time.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentencepiece import sentencepiece_model_pb2

from command.documents import write_json
from command.model_writer import write_params
from engine.artifacts.artifact import EMBEDDING
from engine.artifacts.config import KOGPT2, GPT2Config
from engine.native.adapter import LowRank
from testbed.folders import building
from testbed.process import ROOT
from testbed.weights import random_weights

messages: Any = sentencepiece_model_pb2  # protobuf creates its classes at import

FORMAT = 1  # increase when the written files change
FULL = KOGPT2
TINY = GPT2Config(500, 64, 2, 2, 256, 128)
SPECIAL = ("<unk>", "<pad>", "<s>", "</s>")
BOS = SPECIAL.index("<s>")
ASCII = range(0x20, 0x7F)
# Hangul syllables, then Chinese characters: 81,476 of them.
CHARACTERS = (
    *(*range(0xAC00, 0xD7A4), *range(0x4E00, 0xA000)),
    *(*range(0x3400, 0x4DC0), *range(0x20000, 0x2A6E0)),
)


def make(workdir: Path, config: GPT2Config, seed: int, dtype: str = "float32") -> Path:
    """Write a random artifact into `workdir` unless it exists; return its folder."""
    name = f"random-{config.num_layers}x{config.units}-{config.vocab_size}-{seed}-v{FORMAT}"
    folder = workdir / name
    if folder.is_dir():
        return folder
    _write(folder, config, _weights(config, seed), dtype)
    return folder


def _write(
    folder: Path, config: GPT2Config, weights: Iterable[tuple[str, NDArray[Any]]], dtype: str
) -> None:
    described = {"num_heads": config.num_heads, "activation": config.activation}
    with building(folder) as new:
        write_params(new / "kogpt2.params", weights, dtype)
        (new / "kogpt2.spiece").write_bytes(spiece(config.vocab_size))
        write_json(new / "config.json", described)


def fine_tunes(workdir: Path, config: GPT2Config, count: int) -> Iterator[Path]:
    """Yield the folders of `count` fp16 artifacts, no two of which share a tensor.

    Each is written when the iterator reaches it, unless it exists.

    Drawing numbers takes most of the time of `make`, so all models have the numbers of one base,
    rotated by a different offset.
    """
    base: list[tuple[str, NDArray[np.float32]]] = []
    for i in range(count):
        folder = workdir / f"tuned-{config.num_layers}x{config.units}-{i:03}-v{FORMAT}"
        if not folder.is_dir():
            base = base or list(_weights(config, 0))
            turned = ((name, _turned(name, w, turn=1 + i)) for name, w in base)
            _write(folder, config, turned, "float16")
        yield folder


def fine_tunes_of(base: Path, workdir: Path, config: GPT2Config, count: int) -> Iterator[Path]:
    """Yield the folders of `count` fp16 artifacts that are near a base of `make` with seed 0.

    Each is written when the iterator reaches it, unless it exists. A matrix differs by 2% of its
    norm in eight directions, and by 0.6% in all others.
    """
    changes: dict[str, NDArray[np.float32]] = {}
    for i in range(count):
        folder = workdir / f"{base.name}-tuned-{i:03}"
        if not folder.is_dir():
            changes = changes or {name: _change(w) for name, w in _weights(config, 0)}
            near = (
                (name, w + _turned(name, changes[name], turn=i)) for name, w in _weights(config, 0)
            )
            _write(folder, config, near, "float16")
        yield folder


def _change(w: NDArray[np.float32]) -> NDArray[np.float32]:
    rng = np.random.default_rng(w.shape)
    change = rng.standard_normal(w.shape, np.float32)
    change *= np.float32(0.006 * np.linalg.norm(w) / np.linalg.norm(change))
    if w.ndim == 2:
        up, down = (rng.standard_normal((n, 8), np.float32) for n in w.shape)
        directions = up @ down.T
        change += np.float32(0.02 * np.linalg.norm(w) / np.linalg.norm(directions)) * directions
    change[~w.any(axis=-1)] = 0  # the special pieces' embeddings
    return change


def low_rank(config: GPT2Config, rank: int, seed: int) -> dict[tuple[int, str], LowRank]:
    """Return random matrices of an adapter by (layer, product), large enough to change texts."""
    rng = np.random.default_rng(seed)
    # target_modules c_attn and c_proj
    shapes = {
        "qkv": (3 * config.units, config.units),
        "attention_out": (config.units, config.units),
        "ffn_out": (config.units, config.hidden_size),
    }

    def numbers(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1]))

    return {
        (layer, product): LowRank(numbers(rank, columns), numbers(rows, rank))
        for layer in range(config.num_layers)
        for product, (rows, columns) in shapes.items()
    }


def demo(name: str, workdir: Path) -> Path:
    """Unpack a demo model of model_store into `workdir`; return its folder."""
    with tarfile.open(ROOT / "model_store" / f"{name}.tar.gz") as archive:
        archive.extractall(workdir / name, filter="data")
    return workdir / name


def copy(folder: Path, target: Path) -> None:
    """Copy a model's folder without its prepared files."""
    ignore = shutil.ignore_patterns(".prepared")
    with building(target) as new:
        shutil.copytree(folder, new, ignore=ignore, dirs_exist_ok=True)


def pack(folder: Path, archive: Path, level: int = 0) -> Path:
    """Pack a folder's files as a tar.gz unless it exists; return the archive.

    The default level does not compress, because random numbers hardly shrink.
    """
    if not archive.exists():
        new = archive.with_name(f".{archive.name}")
        with tarfile.open(new, "w:gz", compresslevel=level) as tar:
            for path in sorted(p for p in folder.iterdir() if p.is_file()):
                tar.add(path, path.name)
        new.rename(archive)
    return archive


def hollow(path: Path) -> None:
    """Replace a file with weights by a sparse one of the same size and time, to free disk.

    The engine does not read the weights of a prepared model.
    """
    status = path.stat()
    path.write_bytes(b"")
    os.truncate(path, status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _turned(name: str, w: NDArray[np.float32], turn: int) -> NDArray[np.float32]:
    """Rotate an array's numbers; the special pieces' embeddings remain zero."""
    if name == EMBEDDING:
        return np.concatenate([w[: len(SPECIAL)], np.roll(w[len(SPECIAL) :], turn * 7)])
    return np.roll(w, turn * 7)


def _weights(config: GPT2Config, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield random weights in which the special pieces' embeddings are zero.

    Their logits are then never the highest: no text ends early, and none contains a piece that
    cannot be written.
    """
    for name, w in random_weights(config, seed):
        if name == EMBEDDING:
            w[: len(SPECIAL)] = 0
        yield name, w


def spiece(size: int, characters: Iterable[int] = CHARACTERS) -> bytes:
    """Return a sentencepiece model of `size` pieces: special ones, then one character each."""
    model = messages.ModelProto()
    kind = messages.ModelProto.SentencePiece
    for i, piece in enumerate(SPECIAL):
        model.pieces.add(piece=piece, score=0, type=kind.CONTROL if i else kind.UNKNOWN)
    for code in itertools.islice(dict.fromkeys(characters), size - len(SPECIAL)):
        model.pieces.add(piece=chr(code).replace(" ", "\u2581"), score=0)
    trainer = model.trainer_spec
    trainer.model_type = 2  # BPE
    trainer.vocab_size = size
    trainer.unk_id, trainer.pad_id, trainer.bos_id, trainer.eos_id = range(len(SPECIAL))
    trainer.pad_piece = "<pad>"
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    data: bytes = model.SerializeToString()
    return data


def prompts(config: GPT2Config, rows: int, length: int) -> list[list[int]]:
    """Return `rows` prompts of `length` ids, `<s>` first; every call returns equal ids."""
    rng = np.random.default_rng(17)
    results = rng.integers(len(SPECIAL), config.vocab_size, (rows, length))
    results[:, 0] = BOS
    ids: list[list[int]] = results.tolist()
    return ids


def text_of(ids: list[int]) -> str:
    """Return a prompt's text: its pieces without `<s>`, which the tokenizer adds again."""
    return "".join(chr(CHARACTERS[i - len(SPECIAL)]) for i in ids if i >= len(SPECIAL))
