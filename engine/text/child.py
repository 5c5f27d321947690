"""What a model's text process does: its tokenizer, template and the texts of its answers, which
are foreign data and foreign code over it. `engine.text.process` asks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ArtifactError, EngineError, InvalidRequest
from common.memory import return_freed_memory
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.generation_config import Generation
from engine.text.answer_text import AnswerText
from engine.text.prompts import Prompts

# What a tokenizer that is fit for use can cut into tokens, and make text of again.
TRIALS = ("가", "나는 오늘", "Hello, 1!", "뷁\n漢🙂")
MAX_TRIAL = 10_000  # characters that any of these may become
MAX_REASON = 300  # characters

Result = TypeVar("Result")


def serve(tokenizer_file: str, config: dict[str, Any], generation: dict[str, Any]) -> TextChild:
    """The target of a sandbox. Raises `ArtifactError` for a tokenizer that cannot be used."""
    path = Path(tokenizer_file)
    artifact = Artifact(
        path.parent, GPT2Config(**config), {}, path, Generation.from_json(generation)
    )
    opening = _Reasons(path.name, ArtifactError, "cannot be used")
    child = opening(lambda: TextChild(Prompts(artifact), path.name))
    return_freed_memory()  # of reading it: a process stays as long as its model
    return child


class _Reasons:
    """Turns whatever a tokenizer raises, a panic of its Rust code too, into an error of ours."""

    def __init__(self, file: str, kind: type[EngineError], what: str) -> None:
        self._file, self._kind, self._what = file, kind, what

    def __call__(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except (EngineError, MemoryError):
            raise
        except BaseException as error:  # PanicException is no Exception
            reason = f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
            reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."
            raise self._kind(f"{self._file} {self._what}: {reason}") from None


class TextChild:
    """Called with the name of a method and its arguments, all of it JSON."""

    def __init__(self, prompts: Prompts, file: str) -> None:
        self._prompts = prompts
        self._rows: dict[int, AnswerText] = {}
        self._cutting = _Reasons(file, InvalidRequest, "cannot cut this text into tokens")
        self._writing = _Reasons(file, EngineError, "cannot make text of the tokens")
        for text in TRIALS:
            ids = prompts.tokenizer.encode(text)
            detokenizer = prompts.tokenizer.detokenizer(ids)
            written = sum(len(detokenizer.feed(token)) for token in ids)
            written += len(detokenizer.flush())
            if written > MAX_TRIAL:
                raise ArtifactError(
                    f"{file} makes {written} characters of the {len(ids)} tokens of {text!r}"
                )

    def __call__(self, method: str, *arguments: Any) -> Any:
        methods: dict[str, Callable[..., Any]] = {
            "about": self.about,
            "encode": self.encode,
            "encode_raw": self.encode_raw,
            "encode_chat": self.encode_chat,
            "write": self.write,
        }
        return methods[method](*arguments)

    def about(self) -> dict[str, Any]:
        special = self._prompts.tokenizer.special_ids
        return {"stop_ids": sorted(self._prompts.stop_ids), "special_ids": sorted(special)}

    def encode(self, inputs: str | dict[str, str]) -> list[int]:
        """The ids of a prompt. Raises `InvalidRequest`, `PromptTooLong`."""
        return self._cutting(lambda: self._prompts.encode(inputs))

    def encode_raw(self, prompt: str | list[int]) -> list[int]:
        return self._cutting(lambda: self._prompts.encode_raw(prompt))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self._cutting(lambda: self._prompts.encode_chat(messages))

    def write(
        self,
        begun: list[tuple[int, list[int], list[str]]],
        left: list[int],
        tokens: list[tuple[int, int, str | None, list[int]]],
    ) -> list[tuple[str, bool, list[str]] | str | None]:
        """Of each of `tokens` (the answer's key, an id, how it ends, more ids) its text, whether a
        stop string ends the answer, and the pieces of those ids, bytes as Latin-1; an error's
        message; None behind an end.

        begun: the keys of new answers, their prompts and stop strings
        left: keys of answers that nobody waits for
        """
        for key in left:
            self._rows.pop(key, None)
        new = {key: (prompt, stops) for key, prompt, stops in begun}
        found: list[tuple[str, bool, list[str]] | str | None] = []
        for key, token, end, shown in tokens:
            try:
                if key in new:
                    self._begin(key, *new.pop(key))
                found.append(self._write(key, token, end, shown))
            except EngineError as error:
                self._rows.pop(key, None)
                found.append(error.message)
        return found

    def _begin(self, key: int, prompt: list[int], stops: list[str]) -> None:
        detokenizer = self._writing(lambda: self._prompts.detokenizer(prompt))
        self._rows[key] = AnswerText(detokenizer, tuple(stops), self._prompts.strip)

    def _write(
        self, key: int, token: int, end: str | None, shown: list[int]
    ) -> tuple[str, bool, list[str]] | None:
        row = self._rows.get(key)
        if row is None:
            return None
        text, stopped = self._writing(lambda: row.write(token, end))
        if stopped or end is not None:
            del self._rows[key]
        piece = self._prompts.tokenizer.piece
        return text, stopped, self._writing(lambda: [piece(i).decode("latin-1") for i in shown])
