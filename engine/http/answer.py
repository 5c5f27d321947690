"""Collects the tokens of one request into its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import EngineError
from engine.classification import EncodedText, Outputs
from engine.generation import Token
from engine.sampling import TokenLogprobs


class Answer:
    """Collects the tokens of all sequences of a request.

    `emit` is the callback for `Engine.submit`. `done` is called once, on a thread of the engine,
    after the last token of all sequences or the first error.
    """

    def __init__(self, num_sequences: int, done: Callable[[], None]) -> None:
        self._tokens: list[list[Token]] = [[] for _ in range(num_sequences)]
        self._unfinished = num_sequences
        self._done = done
        self._started = time.monotonic()
        self._first_token_at: float | None = None
        self.error: EngineError | None = None

    def emit(self, item: Token | EngineError) -> None:
        if self._unfinished <= 0:
            return
        if isinstance(item, EngineError):
            self.error = item
            self._unfinished = 0
        else:
            if self._first_token_at is None:
                self._first_token_at = time.monotonic()
            self._tokens[item.index].append(item)
            self._unfinished -= item.finish_reason is not None
        if self._unfinished == 0:
            self._finished = time.monotonic()
            self._done()

    @property
    def is_complete(self) -> bool:
        return self._unfinished == 0

    @property
    def entries(self) -> int:
        """The number of tokens in the result that have texts of their own."""
        return sum(len(token.shown) for tokens in self._tokens for token in tokens)

    def result(self) -> dict[str, Any]:
        """Return the body of the response to `generate`.

        `{"completions": [{"text", "tokens", "finish_reason", "logprobs"?, "prefill"?,
        "choice_logprobs"?, "accepted_tokens"?, "rejected_tokens"?}], "seconds",
        "time_to_first_token_s"}`. Raises the error that ended the request.
        """
        if self.error is not None:
            raise self.error
        assert self._first_token_at is not None
        completions = []
        for tokens in self._tokens:
            completion: dict[str, Any] = {
                "text": "".join(token.text for token in tokens),
                "tokens": len(tokens),
                "finish_reason": tokens[-1].finish_reason,
                **guesses_body(tokens),
            }
            details = [token_details(token) for token in tokens]
            if tokens[0].logprobs is not None:
                completion["logprobs"] = [entry["logprobs"] for entry in details]
            if tokens[0].prefill:
                completion["prefill"] = details[0]["prefill"]
            if tokens[-1].choices:
                completion["choice_logprobs"] = choices_body(tokens[-1])
            completions.append(completion)
        return {
            "completions": completions,
            "seconds": round(self._finished - self._started, 6),
            "time_to_first_token_s": round(self._first_token_at - self._started, 6),
        }


class Logits:
    """Collects the logits of the texts of one request, as `Answer` collects tokens."""

    def __init__(self, num_texts: int, done: Callable[[], None]) -> None:
        self._outputs: list[Outputs | None] = [None] * num_texts
        self._missing = num_texts
        self._done = done
        self.error: EngineError | None = None

    def emit(self, item: Outputs | EngineError) -> None:
        if self._missing <= 0:
            return
        if isinstance(item, EngineError):
            self.error, self._missing = item, 0
        else:
            self._outputs[item.index] = item
            self._missing -= 1
        if not self._missing:
            self._done()

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def result(self, encoded: Sequence[EncodedText]) -> dict[str, Any]:
        """Return the body of the response to `classify`, see `engine.http.server`.

        Raises the error that ended the request.
        """
        if self.error is not None:
            raise self.error
        results = []
        for outputs, text in zip(self._outputs, encoded, strict=True):
            assert outputs is not None
            result: dict[str, Any] = {"logits": outputs.logits}
            if text.begins:
                result |= {"begins": text.begins, "ends": text.ends, "special": text.special}
            results.append(result)
        return {"results": results, "prompt_tokens": sum(len(text.ids) for text in encoded)}


def token_details(token: Token) -> dict[str, Any]:
    """Return the `logprobs` of a token and, on an answer's first token, the prompt's `prefill`.

    Both are absent unless the request sets them. An entry is `{"token", "text",
    "special"?, "logprob"?, "top"?: [{"token", "text", "logprob"}]}`, with `bytes` where the token
    is only a part of a character.
    """
    shown = token.shown
    pieces = iter(token.pieces if len(token.pieces) == len(shown) else [b""] * len(shown))

    def body(token_id: int, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        entry: dict[str, Any] = {"token": token_id, **_piece_body(next(pieces))}
        if token_id in token.special_ids:
            entry["special"] = True
        if logprobs is not None:
            entry["logprob"] = round(logprobs.chosen, 6)
            entry["top"] = [
                {"token": i, **_piece_body(next(pieces)), "logprob": round(p, 6)}
                for i, p in logprobs.top
            ]
        return entry

    details: dict[str, Any] = {}
    if token.prefill:
        details["prefill"] = [body(*entry) for entry in token.prefill]
    if token.logprobs is not None:
        details["logprobs"] = body(token.id, token.logprobs)
    return details


def guesses_body(tokens: Sequence[Token]) -> dict[str, int]:
    """Return `{"accepted_tokens", "rejected_tokens"}`, or {} if no guess was checked."""
    counts = {
        "accepted_tokens": sum(token.accepted for token in tokens),
        "rejected_tokens": sum(token.rejected for token in tokens),
    }
    return counts if any(counts.values()) else {}


def choices_body(token: Token) -> list[dict[str, Any]]:
    """Return the texts of a choice as `[{"text", "logprob"}]`, the most likely first."""
    return [{"text": text, "logprob": round(p, 6)} for text, p in token.choices]


def _piece_body(piece: bytes) -> dict[str, Any]:
    text = piece.decode("utf-8", "replace")
    return {"text": text} if text.encode() == piece else {"text": text, "bytes": list(piece)}
