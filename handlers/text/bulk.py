"""Sends the texts of a request to the engine a few at a time.

A list of any length so takes few places of the model's queue, and the texts of other requests come
between its own. Of each text only what the answer has of it stays in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import DeadlineExceeded, InvalidRequest, Overloaded
from engine.http.client import ModelHandle

# Texts that are sent at once, two times: while some are computed, the next are tokenized. More, or
# longer ones, make other requests wait longer: 2 x 1000 characters are some 900 tokens, which take
# two processors half a second with KoGPT2 in int8. Fewer leave passes half empty.
TEXTS_AT_ONCE = 8
CHARACTERS_AT_ONCE = 1000
RETRY_S = 0.1  # while the queue is full
# Labels, entities and logits in one answer, over all texts; as JSON these take up to 200 MB and a
# second of one processor, in the process that has the workers of all models.
MAX_ENTRIES = 400_000

Texts = Sequence[Sequence[str]]
Convert = Callable[[Sequence[str], Mapping[str, Any]], list[Any]]


@dataclass(frozen=True)
class Classified:
    """What `convert` returned for each text."""

    entries: list[list[Any]]
    prompt_tokens: int


def classify(
    model: ModelHandle,
    texts: Texts,
    truncate: bool,
    listed: bool,
    timeout_s: float,
    request_id: str | None,
    convert: Convert,
) -> Classified:
    """Classify texts, each a list of a text or a pair; `listed`: errors name a text's place.

    convert: returns a text's entries in the answer from the text and the engine's result, see
        `classify` in `engine.http.server`; it is called on any thread

    Raises the first `EngineError` of any text, and `InvalidRequest` above `MAX_ENTRIES`.
    """
    return _Bulk(model, texts, truncate, listed, timeout_s, request_id, convert).run()


def chunks(texts: Texts) -> Iterator[tuple[int, Texts]]:
    """Yield the texts that are sent at once, with the place of the first."""
    begin = size = 0
    for i, parts in enumerate(texts):
        length = sum(map(len, parts))
        if i > begin and (i - begin == TEXTS_AT_ONCE or size + length > CHARACTERS_AT_ONCE):
            yield begin, texts[begin:i]
            begin, size = i, 0
        size += length
    yield begin, texts[begin:]


class _Bulk:
    """The texts of one request on their way through the engine."""

    def __init__(
        self,
        model: ModelHandle,
        texts: Texts,
        truncate: bool,
        listed: bool,
        timeout_s: float,
        request_id: str | None,
        convert: Convert,
    ) -> None:
        self._model, self._truncate, self._listed = model, truncate, listed
        self._deadline, self._request_id = time.monotonic() + timeout_s, request_id
        self._convert = convert
        self._chunks = list(chunks(texts))
        self._entries: list[list[list[Any]]] = [[] for _ in self._chunks]
        self._lock = threading.Lock()
        self._next = self._tokens = self._num_entries = 0
        self._begun = False  # whether the engine has answered any of them
        self._error: BaseException | None = None

    def run(self) -> Classified:
        helper = None
        if len(self._chunks) > 1:
            helper = threading.Thread(target=self._work, name="bulk", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # there may be no more threads: one does it, too
                helper = None
        self._work()
        if helper is not None:
            helper.join()
        if self._error is not None:
            raise self._error
        return Classified([e for entries in self._entries for e in entries], self._tokens)

    def _work(self) -> None:
        while True:
            with self._lock:
                i = self._next
                if self._error is not None or i == len(self._chunks):
                    return
                self._next += 1
            try:
                self._classify(i)
            except BaseException as error:
                with self._lock:
                    self._error = self._error or error
                return

    def _classify(self, i: int) -> None:
        first, texts = self._chunks[i]
        made = self._send(first, texts)
        entries = list(map(self._convert, texts, made["results"]))
        with self._lock:
            self._entries[i] = entries
            self._num_entries += sum(map(len, entries))
            self._tokens += made["prompt_tokens"]
            self._begun = True
        if self._num_entries > MAX_ENTRIES:
            raise InvalidRequest(
                f"the answer has more than {MAX_ENTRIES} labels, entities or logits: send fewer"
                " texts at once, or request fewer of each"
            )

    def _send(self, first: int, texts: Texts) -> dict[str, Any]:
        while True:
            remaining_s = self._deadline - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded("the texts were not classified in time")
            try:
                return self._model.classify(
                    texts,
                    remaining_s,
                    self._request_id,
                    first=first if self._listed else None,
                    truncate=self._truncate,
                )
            except Overloaded:
                if not (self._begun or first) or self._error is not None:
                    raise  # nothing is done yet: the client repeats all of it
            time.sleep(min(RETRY_S, max(remaining_s, 0)))
