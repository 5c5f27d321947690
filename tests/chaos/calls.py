"""Sends a request on a connection of its own, and records its outcome."""

from __future__ import annotations

import http.client
import json
import math
import socket
import time
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from tests.chaos.history import LIST, LOAD, UNLOAD, Op

TOKENS = 12
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: Any = None
    management: bool = False


@dataclass
class Received:
    """The answer so far."""

    status: int = 0
    texts: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    retry_after_s: float | None = None
    first_at: float | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class HungUp(Exception):
    """The client disconnects on purpose."""


class NoEnd(Exception):
    """The answer breaks off."""


def request(kind: str, model: str, prompt: str) -> Request:
    """A request of an `Op`'s kind."""
    path = quote(model, safe="")
    body: dict[str, Any]
    stream = kind.endswith("stream")
    if kind.startswith("predictions"):
        body = {"inputs": prompt, "parameters": {"max_new_tokens": TOKENS}}
        return Request("POST", f"/predictions/{path}", {**body, "stream": True} if stream else body)
    if kind.startswith("completions"):
        body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        return Request("POST", "/v1/completions", {**body, "stream": stream})
    if kind == LOAD:
        return Request("POST", "/models", {"model_name": model, "url": model}, True)
    if kind == UNLOAD:
        return Request("DELETE", f"/models/{path}", None, True)
    assert kind == LIST
    return Request("GET", "/models", None, True)


def call(
    ports: tuple[int, int],
    request: Request,
    op: Op,
    timeout_s: float,
    most_tokens: float = math.inf,
    host: str = "127.0.0.1",
) -> Op:
    """`op` with its end. `ports`: for requests and for management. At so many tokens, with 0 once
    the request is sent, the client disconnects."""
    connection = http.client.HTTPConnection(host, ports[request.management], timeout=timeout_s)
    received, lost, gone = Received(), "", False
    try:
        _receive(connection, request, op.id, received, most_tokens)
    except HungUp:
        gone = True
    except (OSError, http.client.HTTPException, ValueError, NoEnd) as error:
        lost = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    error_fields = received.error or {}
    status = received.status
    if received.error is not None and status == 200:  # of a stream
        code = str(error_fields.get("code"))
        status = int(code) or 500 if code.isdigit() else 503
    return replace(
        op,
        end=time.monotonic(),
        status=0 if lost or gone else status,
        text=received.text,
        type=str(error_fields.get("type", "")),
        message=str(error_fields.get("message", "")),
        retry_after_s=received.retry_after_s,
        lost=lost,
        hung_up=gone,
        first_s=None if received.first_at is None else received.first_at - op.begin,
    )


def _receive(
    connection: http.client.HTTPConnection,
    request: Request,
    id: str,
    received: Received,
    most_tokens: float,
) -> None:
    body = None if request.body is None else json.dumps(request.body).encode()
    connection.request(request.method, request.path, body, {**HEADERS, "x-request-id": id})
    if connection.sock is not None:
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not most_tokens:
        raise HungUp
    answer = connection.getresponse()
    received.status = answer.status
    retry_after = answer.headers.get("Retry-After")
    received.retry_after_s = float(retry_after) if retry_after else None
    if (answer.headers.get("Content-Type") or "").startswith("text/event-stream"):
        ended = False
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            ended = _take(line[6:].decode("utf-8").strip(), received) or ended
            if received.first_at is None:
                received.first_at = time.monotonic()
            if len(received.texts) >= most_tokens:
                raise HungUp
        if not ended and received.error is None:
            raise NoEnd("the stream ends without its last event")
        return
    value = json.loads(answer.read())
    if answer.status != 200:
        received.error = value.get("error", value)
    elif "generated_text" in value:
        received.texts.append(value["generated_text"])
    elif "choices" in value:
        received.texts.append(value["choices"][0]["text"])


def _take(event: str, received: Received) -> bool:
    """Whether the event is the last. Raises `NoEnd` if its text differs from the tokens'."""
    if event == "[DONE]":
        return True
    value = json.loads(event)
    if value.get("error"):
        received.error = value["error"]
        return True
    if "choices" in value:
        received.texts += [choice["text"] for choice in value["choices"]]
    elif "generated_text" in value:
        if value["generated_text"] != received.text:
            raise NoEnd(f"the tokens are {received.text!r}, the text {value['generated_text']!r}")
        return True
    else:
        received.texts.append(value["text"])
    return False
