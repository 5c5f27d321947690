"""The texts of a list go to the engine a few at a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from common.errors import DeadlineExceeded, InvalidRequest, Overloaded
from handlers.text import bulk
from handlers.text.bulk import TEXTS_AT_ONCE, chunks, classify


class Engine:
    """Stands in for `engine.http.client.ModelHandle`: a text's logit is its number."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors, self.calls = list(errors), list[int | None]()
        self.running = self.most = 0
        self._lock = threading.Lock()

    def classify(
        self, texts: Any, timeout_s: float, request_id: str, *, first: int | None, truncate: bool
    ) -> dict[str, Any]:
        with self._lock:
            self.calls.append(first)
            self.running += len(texts)
            self.most = max(self.most, self.running)
            error = self.errors.pop(0) if self.errors else None
        try:
            if error is not None:
                raise error
            results = [{"logits": [[float(text)]]} for [text] in texts]
            return {"results": results, "prompt_tokens": len(texts)}
        finally:
            with self._lock:
                self.running -= len(texts)


def convert(parts: Any, result: Any) -> list[Any]:
    return [*parts, *result["logits"][0]]


def run(engine: Any, count: int, listed: bool = True, timeout_s: float = 60) -> Any:
    texts = [[str(i)] for i in range(count)]
    return classify(engine, texts, False, listed, timeout_s, "id", convert)


def test_the_results_are_in_order_and_few_texts_are_under_way() -> None:
    engine = Engine()
    made = run(engine, 100)
    assert made.entries == [[str(i), float(i)] for i in range(100)]
    assert (made.prompt_tokens, engine.most <= 2 * TEXTS_AT_ONCE) == (100, True)
    assert sorted(n for n in engine.calls if n is not None) == list(range(0, 100, TEXTS_AT_ONCE))


def test_a_text_alone_has_no_place() -> None:
    engine = Engine()
    run(engine, 1, listed=False)
    assert engine.calls == [None]


def test_long_texts_are_sent_alone() -> None:
    texts = [["가" * 600], ["나" * 600], ["다"], ["라" * 2000]]
    assert [(first, len(part)) for first, part in chunks(texts)] == [(0, 1), (1, 2), (3, 1)]


def test_a_full_queue_refuses_a_list_at_its_beginning_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "RETRY_S", 0.0)
    full = Overloaded("full", retry_after_s=1)
    assert len(run(Engine(None, full, full), 30).entries) == 30
    with pytest.raises(Overloaded):
        run(Engine(full), 1)


def test_the_first_error_ends_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(None, InvalidRequest("inputs.9 is wrong"))
    with pytest.raises(InvalidRequest, match=r"inputs\.9"):
        run(engine, 1000)
    assert len(engine.calls) < 1000 / TEXTS_AT_ONCE
    with pytest.raises(DeadlineExceeded):
        run(Engine(), 10, timeout_s=0)


def test_without_another_thread_one_sends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert len(run(Engine(), 30).entries) == 30


def test_an_answer_has_a_limit_that_ends_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_ENTRIES", 200)
    assert len(run(Engine(), 100).entries) == 100
    engine = Engine()
    with pytest.raises(InvalidRequest, match="more than 200 labels, entities or logits"):
        run(engine, 1000)
    assert len(engine.calls) < 1000 / TEXTS_AT_ONCE
