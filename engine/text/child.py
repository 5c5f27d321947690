"""The code of a text process, which runs an untrusted tokenizer and chat template."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from common.errors import ArtifactError, EngineError, InvalidRequest, cut
from common.memory import return_freed_memory
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.generation_config import Generation
from engine.text.files import Files, read_files
from engine.text.prompts import Prompts

# Texts that a usable tokenizer can encode and decode.
TRIALS = ("가", "나는 오늘", "Hello, 1!", "뷁\n漢🙂")
MAX_TRIAL = 10_000  # characters of each trial text, encoded and decoded
MAX_REASON = 300  # characters
# The classes and messages of errors that replace a tokenizer's own.
OPENING = ArtifactError, "cannot be used"
ENCODING = InvalidRequest, "cannot cut this text into tokens"
DECODING = EngineError, "cannot make text of the tokens"

Result = TypeVar("Result")
Source = tuple[str, str, dict[str, Any], dict[str, Any]]


def serve(
    tokenizer_file: str, digest: str, config: dict[str, Any], generation: dict[str, Any]
) -> TextChild:
    """Load a tokenizer in the sandbox. Raises `ArtifactError`, also if the digest differs."""
    path, settings = Path(tokenizer_file), Generation.from_json(generation)
    artifact = Artifact(path.parent, GPT2Config(**config), {}, path, settings)
    files = read_files(path)
    if source_of(artifact, files)[1] != digest:  # before the files are parsed
        raise ArtifactError(f"{path.name} has changed since it was loaded")
    prompts = _guarded(path.name, OPENING, Prompts, artifact, files)
    del files
    return_freed_memory()  # freed after reading; a process lives as long as its models
    return TextChild(prompts, path.name, artifact.config.vocab_size)


def source_of(artifact: Artifact, files: Files | None = None) -> Source:
    """Return the arguments of `serve`. Models with the same digest may share a process."""
    files, config = files or read_files(artifact.tokenizer_file), artifact.config
    # Without the generation settings that a text process does not use.
    generation = dataclasses.replace(artifact.generation, parameters={}, strip=()).to_json()
    hashes = {name: blake3(content).hexdigest() for name, content in files.items()}
    key = json.dumps([hashes, generation, config.vocab_size, config.max_length], sort_keys=True)
    digest = blake3(key.encode()).hexdigest()
    return str(artifact.tokenizer_file), digest, dataclasses.asdict(config), generation


def _guarded(
    file: str, error: tuple[type[EngineError], str], work: Callable[..., Result], *arguments: Any
) -> Result:
    """Turn whatever a tokenizer raises, panics of its Rust code included, into our error."""
    try:
        return work(*arguments)
    except (EngineError, MemoryError):
        raise
    except BaseException as raised:  # PanicException is no Exception
        kind, what = error
        reason = cut(f"{type(raised).__name__}: {raised}", MAX_REASON)
        raise kind(f"{file} {what}: {reason}") from None


class TextChild:
    """The methods of a text process, by name. No method changes state, so calls can be repeated."""

    def __init__(self, prompts: Prompts, file: str, vocab_size: int) -> None:
        self._prompts, self._file, self._vocab_size = prompts, file, vocab_size
        self._methods: dict[str, tuple[tuple[type[EngineError], str], Callable[..., Any]]] = {
            "about": (OPENING, self._about),
            "encode": (ENCODING, prompts.encode),
            "encode_raw": (ENCODING, prompts.encode_raw),
            "encode_chat": (ENCODING, prompts.encode_chat),
            "tokenize": (ENCODING, prompts.tokenize),
            "encode_texts": (ENCODING, prompts.encode_texts),
            "decode": (DECODING, prompts.tokenizer.decode),
        }

    def __call__(self, method: str, *arguments: Any) -> Any:
        error, work = self._methods[method]
        return _guarded(self._file, error, work, *arguments)

    def _about(self) -> dict[str, Any]:
        """Return the argument of `About.from_json`. Raises `ArtifactError` for a bad tokenizer."""
        tokenizer = self._prompts.tokenizer
        for text in TRIALS:
            ids = tokenizer.encode(text)
            written = len(tokenizer.decode(ids)[0])
            if written > MAX_TRIAL:
                raise ArtifactError(
                    f"{self._file} decodes the {len(ids)} tokens of {text!r} to {written}"
                    f" characters, must be at most {MAX_TRIAL}"
                )
        table = tokenizer.table(self._vocab_size).to_json()
        return_freed_memory()
        stop_ids, special_ids = sorted(self._prompts.stop_ids), sorted(tokenizer.special_ids)
        return {"stop_ids": stop_ids, "special_ids": special_ids, "table": table}
