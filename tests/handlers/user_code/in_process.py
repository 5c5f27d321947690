"""Runs a script in the test's process, as `handlers.user_code.child` does in its own."""

from __future__ import annotations

import itertools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import EngineError
from handlers.user_code.conventions.detect import service_of
from handlers.user_code.entry_point import Script
from handlers.user_code.messages import Answer, Part, Request

_numbers = itertools.count()


def request(body: bytes, content_type: str | None = "application/json", **headers: str) -> Request:
    given = {} if content_type is None else {"content-type": content_type}
    return Request("1", given | headers, [Part("body", content_type or "", body)])


class InProcessScript:
    """Loads the script `source` of the model in `folder`. Raises the reason if that fails."""

    def __init__(self, folder: Path, source: str, **spec: Any) -> None:
        module = types.ModuleType(f"script_{next(_numbers)}")
        exec(compile(source, "inference.py", "exec"), module.__dict__)  # noqa: S102
        self._service = service_of(
            module, {**Script(folder, folder / "inference.py").spec("봄", 1 << 20), **spec}
        )
        self._service.load()

    def all(self, requests: Sequence[Request]) -> Sequence[Answer | EngineError]:
        return self._service.answer(list(requests), 30.0)

    def __call__(
        self, body: bytes, content_type: str | None = "application/json", **headers: str
    ) -> Answer:
        """The answer to one request. Raises it if it is an error."""
        (answer,) = self.all([request(body, content_type, **headers)])
        if isinstance(answer, EngineError):
            raise answer
        return answer
