"""The messages between a worker and its script processes.

A message is a JSON object followed by bodies of bytes, over a socket pair. Nothing is unpickled: a
script cannot make its worker run code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from common.errors import EngineError, InvalidRequest, cut, named
from common.json_body import check_count
from common.worker_protocol import REQUEST_ID

MAX_MESSAGE_BYTES = 1 << 30  # of the JSON, and of all bodies together
# Names and values in the JSON of a script's message, which its worker parses outside the limits of
# the script: a value may take 70 times the bytes of its JSON.
MAX_VALUES = 1_000_000
MAX_JSON_BYTES = 64 << 20  # of such JSON
MAX_BODIES = 100_000  # per message
MAX_RETRY_AFTER_S = 31_536_000  # a longer one, or one that is no number, is dropped
# Names and values of an answer's headers, in total; Multi Model Server and gateway accept 8192.
MAX_HEADER_CHARACTERS = 6000

# What reading a message that may hold anything raises.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)

# Headers that Multi Model Server sets itself; a script's are dropped.
CONNECTION_HEADERS = ("connection", "content-length", "keep-alive", "transfer-encoding", "upgrade")
HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)


@dataclass(frozen=True)
class Part:
    """A named value of a request: `body`, or a form field."""

    name: str
    content_type: str
    value: bytes


@dataclass(frozen=True)
class Request:
    id: str
    headers: dict[str, str]  # names in lower case
    parts: list[Part]

    @property
    def body(self) -> bytes:
        return next((part.value for part in self.parts if part.name == "body"), b"")


def log_ids(requests: Sequence[Request]) -> str:
    """Return the ids by which the log names requests, their `x-request-id`."""
    return ", ".join(request.headers.get(REQUEST_ID, "") for request in requests)


@dataclass(frozen=True)
class Answer:
    """A script's answer; header names are in lower case. `ScriptError` if MMS cannot send it."""

    body: bytes
    content_type: str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.status, int) or not 200 <= self.status <= 599:
            raise ScriptError(f"the status is {self.status!r:.40}, must be from 200 to 599")
        for name in CONNECTION_HEADERS:
            self.headers.pop(name, None)
        for name, value in {**self.headers, "content-type": self.content_type}.items():
            if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
                raise ScriptError(
                    f"{name!r:.80} is no header name, must be ASCII letters, digits and -_"
                )
            if not isinstance(value, str) or not value.isascii() or not value.isprintable():
                raise ScriptError(f"the header {name} is {value!r:.80}, must be printable ASCII")
        size = sum(len(name) + len(value) for name, value in self.headers.items())
        if size + len(self.content_type) > MAX_HEADER_CHARACTERS:
            raise ScriptError(
                f"the headers have {size + len(self.content_type)} characters, at most"
                f" {MAX_HEADER_CHARACTERS} can be sent"
            )


class ScriptError(EngineError):
    """A model's own script failed; the message is the reason, in one sentence."""

    def __init__(
        self,
        message: str,
        status: int = 500,
        kind: str = "ScriptError",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status if 400 <= status <= 599 else 500
        self.type = cut(kind.encode("utf-8", "backslashreplace").decode(), 100)


def unsupported(message: str, status: int = 415) -> ScriptError:
    return ScriptError(message, status, "UnsupportedFormatError")


def out_of_memory(message: str) -> ScriptError:
    """Create a `ScriptError`: for the engine's `OutOfMemory` other models would be evicted."""
    return ScriptError(message, 507, "ScriptOutOfMemory")


def send(connection: Connection, message: dict[str, Any], bodies: Sequence[bytes] = ()) -> None:
    connection.send_bytes(json.dumps({**message, "bodies": len(bodies)}).encode())
    for body in bodies:
        connection.send_bytes(body)


def receive(connection: Connection) -> tuple[dict[str, Any], list[bytes]]:
    """Receive a JSON object and its bodies from a worker. Raises `EOFError` and `OSError`."""
    return _with_bodies(json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES)), connection)


def receive_from_script(connection: Connection) -> tuple[dict[str, Any], list[bytes]]:
    """Receive a message that may hold anything. Raises `EOFError`, `OSError`, `ValueError`."""
    content = connection.recv_bytes(MAX_JSON_BYTES)
    try:
        check_count(content, MAX_VALUES)
        message = json.loads(content)
    except (InvalidRequest, RecursionError) as error:
        raise ValueError(f"a script's message cannot be read: {error}") from None
    if not isinstance(message, dict) or type(message.get("bodies")) is not int:
        raise ValueError("a script's message cannot be read: it is no object with bodies")
    return _with_bodies(message, connection)


def _with_bodies(
    message: dict[str, Any], connection: Connection
) -> tuple[dict[str, Any], list[bytes]]:
    count, left = message.pop("bodies"), MAX_MESSAGE_BYTES
    if not 0 <= count <= MAX_BODIES:
        raise ValueError(f"a message has {count} bodies, must be from 0 to {MAX_BODIES}")
    bodies = []
    for _ in range(count):
        bodies.append(connection.recv_bytes(left))
        left -= len(bodies[-1])
    return message, bodies


def send_requests(connection: Connection, requests: Sequence[Request], timeout_s: float) -> None:
    rows = [[r.id, r.headers, [[p.name, p.content_type] for p in r.parts]] for r in requests]
    bodies = [part.value for request in requests for part in request.parts]
    send(connection, {"requests": rows, "timeout_s": timeout_s}, bodies)


def requests_from(message: dict[str, Any], bodies: list[bytes]) -> list[Request]:
    values = iter(bodies)
    return [
        Request(id, headers, [Part(name, kind, next(values)) for name, kind in parts])
        for id, headers, parts in message["requests"]
    ]


def send_answers(connection: Connection, answers: Sequence[Answer | EngineError]) -> None:
    rows: list[dict[str, Any]] = []
    bodies: list[bytes] = []
    for answer in answers:
        if isinstance(answer, EngineError):
            rows.append({"error": error_row(answer)})
        else:
            rows.append({"answer": [answer.content_type, answer.status, answer.headers]})
            bodies.append(answer.body)
    send(connection, {"answers": rows}, bodies)


def answers_from(message: dict[str, Any], bodies: list[bytes]) -> list[Answer | EngineError]:
    """Return the answers in a script's message. Raises `ValueError` for a malformed one."""
    values = iter(bodies)
    try:
        return [
            error_from(row["error"]) if "error" in row else _answer(next(values), *row["answer"])
            for row in message["answers"]
        ]
    except (*MALFORMED, StopIteration) as error:
        raise ValueError(f"a script's answers cannot be read: {error!r:.100}") from None


def _answer(body: bytes, content_type: Any, status: Any, headers: Any) -> Answer | EngineError:
    named = {str(name).lower(): value for name, value in dict(headers).items()}
    try:
        return Answer(body, content_type, status, named)
    except ScriptError as error:
        return error


def error_row(error: EngineError) -> dict[str, Any]:
    names = ("status", "type", "message", "retry_after_s")
    return {name: getattr(error, name) for name in names}


def error_from(row: dict[str, Any]) -> EngineError:
    """Create the error of an `error_row`: of its class in `common.errors`, or a `ScriptError`.

    Raises `ValueError` for a malformed row.
    """
    try:
        kind, message, status = str(row["type"]), row["message"], int(row["status"])
        retry_after_s = row.get("retry_after_s")
        if not isinstance(message, str):
            raise TypeError("its message is no text")
    except MALFORMED as error:
        raise ValueError(f"a script's error cannot be read: {error!r:.100}") from None
    if not isinstance(retry_after_s, float | int) or not 0 <= retry_after_s <= MAX_RETRY_AFTER_S:
        retry_after_s = None  # a script may set anything
    known = named(kind, message, retry_after_s)
    return known or ScriptError(message, status, kind, retry_after_s)
