"""The code of a text process: it runs a tokenizer and a chat template, which are foreign."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from common.errors import ArtifactError, EngineError, InvalidRequest
from common.memory import return_freed_memory
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.generation_config import Generation
from engine.text.files import Files, read_files
from engine.text.prompts import Prompts

# Texts that a usable tokenizer can encode and decode.
TRIALS = ("가", "나는 오늘", "Hello, 1!", "뷁\n漢🙂")
MAX_TRIAL = 10_000  # characters of any of these after that
MAX_REASON = 300  # characters

Result = TypeVar("Result")
Source = tuple[str, str, dict[str, Any], dict[str, Any]]


def serve(
    tokenizer_file: str, digest: str, config: dict[str, Any], generation: dict[str, Any]
) -> TextChild:
    """The target of the sandbox.

    Raises `ArtifactError` for a tokenizer that cannot be used, or that has another digest.
    """
    path, settings = Path(tokenizer_file), Generation.from_json(generation)
    artifact = Artifact(path.parent, GPT2Config(**config), {}, path, settings)
    files = read_files(path)
    if source_of(artifact, files)[1] != digest:  # before anything of it is parsed
        raise ArtifactError(f"{path.name} has changed since it was loaded")
    opening = _Errors(path.name, ArtifactError, "cannot be used")
    prompts = opening(Prompts, artifact, files)
    del files
    return_freed_memory()  # freed after reading; a process lives as long as its models
    return TextChild(prompts, path.name, artifact.config.vocab_size)


def source_of(artifact: Artifact, files: Files | None = None) -> Source:
    """The arguments of `serve`. Models with the same digest may share a process."""
    files, config = files or read_files(artifact.tokenizer_file), artifact.config
    # Of the generation settings those that a process uses.
    generation = dataclasses.replace(artifact.generation, parameters={}, strip=()).to_json()
    hashes = {name: blake3(content).hexdigest() for name, content in files.items()}
    key = json.dumps([hashes, generation, config.vocab_size, config.max_length], sort_keys=True)
    digest = blake3(key.encode()).hexdigest()
    return str(artifact.tokenizer_file), digest, dataclasses.asdict(config), generation


class _Errors:
    """Turns whatever a tokenizer raises, panics of its Rust code included, into our error."""

    def __init__(self, file: str, kind: type[EngineError], what: str) -> None:
        self._file, self._kind, self._what = file, kind, what

    def __call__(self, work: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return work(*arguments)
        except (EngineError, MemoryError):
            raise
        except BaseException as error:  # PanicException is no Exception
            reason = f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
            reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."
            raise self._kind(f"{self._file} {self._what}: {reason}") from None


class TextChild:
    """Called with the name of a method and its arguments, all of it JSON.

    No call changes it, so any may be repeated in a new process.
    """

    def __init__(self, prompts: Prompts, file: str, vocab_size: int) -> None:
        self._prompts, self._file, self._vocab_size = prompts, file, vocab_size
        self._opening = _Errors(file, ArtifactError, "cannot be used")
        self._encoding = _Errors(file, InvalidRequest, "cannot cut this text into tokens")
        self._decoding = _Errors(file, EngineError, "cannot make text of the tokens")

    def __call__(self, method: str, *arguments: Any) -> Any:
        prompts, tokenizer = self._prompts, self._prompts.tokenizer
        methods: dict[str, Callable[[], Any]] = {
            "about": lambda: self._opening(self._about),
            # The ids of a prompt. Raise `InvalidRequest`, `PromptTooLong`.
            "encode": lambda: self._encoding(prompts.encode, *arguments),
            "encode_raw": lambda: self._encoding(prompts.encode_raw, *arguments),
            "encode_chat": lambda: self._encoding(prompts.encode_chat, *arguments),
            "tokenize": lambda: self._encoding(prompts.tokenize, *arguments),
            "decode": lambda: self._decoding(tokenizer.decode, *arguments),
        }
        return methods[method]()

    def _about(self) -> dict[str, Any]:
        """`{"stop_ids", "special_ids", "table"}`. Raises `ArtifactError` for a bad tokenizer."""
        tokenizer = self._prompts.tokenizer
        for text in TRIALS:
            ids = tokenizer.encode(text)
            written = len(tokenizer.decode(ids)[0])
            if written > MAX_TRIAL:
                raise ArtifactError(
                    f"{self._file} makes {written} characters of the {len(ids)} tokens of {text!r}"
                )
        table = tokenizer.table(self._vocab_size).to_json()
        return_freed_memory()
        stop_ids, special_ids = sorted(self._prompts.stop_ids), sorted(tokenizer.special_ids)
        return {"stop_ids": stop_ids, "special_ids": special_ids, "table": table}
