"""One request on a connection of its own, and what became of it."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
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
class Heard:
    """What has come so far."""

    status: int = 0
    body: Any = None
    texts: list[str] = field(default_factory=list)
    whole: str | None = None
    error: dict[str, Any] | None = None
    retry_after_s: float | None = None
    first_at: float | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts) if self.whole is None else self.whole


class HungUp(Exception):
    """The client has gone away, as it meant to."""


class NoEnd(Exception):
    """An answer that breaks off."""


def request(kind: str, model: str, prompt: str, url: str = "") -> Request:
    """`url`: what a load is to fetch."""
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
        return Request("POST", "/models", {"model_name": model, "url": url or model}, True)
    if kind == UNLOAD:
        return Request("DELETE", f"/models/{path}", None, True)
    assert kind == LIST
    return Request("GET", "/models", None, True)


def call(
    ports: tuple[int, int],
    asked: Request,
    op: Op,
    timeout_s: float,
    hang_up: Callable[[Heard], bool] = lambda heard: False,
    host: str = "127.0.0.1",
) -> Op:
    """`op` with its end. `ports`: for requests and for management. `hang_up` is asked when the
    request is sent, and again at each token."""
    connection = http.client.HTTPConnection(host, ports[asked.management], timeout=timeout_s)
    heard, lost, gone = Heard(), "", False
    try:
        _hear(connection, asked, op.id, heard, hang_up)
    except HungUp:
        gone = True
    except (OSError, http.client.HTTPException, ValueError, NoEnd) as error:
        lost = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    said = heard.error or {}
    status = heard.status
    if heard.error is not None and status == 200:  # of a stream
        status = int(said.get("code") or 500) if str(said.get("code")).isdigit() else 503
    return replace(
        op,
        end=time.monotonic(),
        status=0 if lost or gone else status,
        text=heard.text,
        type=str(said.get("type", "")),
        message=str(said.get("message", "")),
        retry_after_s=heard.retry_after_s,
        lost=lost,
        hung_up=gone,
        first_s=None if heard.first_at is None else heard.first_at - op.begin,
    )


def _hear(
    connection: http.client.HTTPConnection,
    asked: Request,
    id: str,
    heard: Heard,
    hang_up: Callable[[Heard], bool],
) -> None:
    body = None if asked.body is None else json.dumps(asked.body).encode()
    connection.request(asked.method, asked.path, body, {**HEADERS, "x-request-id": id})
    if connection.sock is not None:
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hang_up(heard):
        raise HungUp
    answer = connection.getresponse()
    heard.status = answer.status
    retry_after = answer.headers.get("Retry-After")
    heard.retry_after_s = float(retry_after) if retry_after else None
    if (answer.headers.get("Content-Type") or "").startswith("text/event-stream"):
        ended = False
        for event in _events(answer):
            ended = _take(event, heard) or ended
            if heard.first_at is None:
                heard.first_at = time.monotonic()
            if hang_up(heard):
                raise HungUp
        if not ended and heard.error is None:
            raise NoEnd("the stream ends without its last event")
        return
    heard.body = json.loads(answer.read())
    if answer.status != 200:
        heard.error = heard.body.get("error", heard.body)
    elif "generated_text" in heard.body:
        heard.whole = heard.body["generated_text"]
    elif "choices" in heard.body:
        heard.whole = heard.body["choices"][0]["text"]


def _events(answer: http.client.HTTPResponse) -> Iterator[str]:
    for line in answer:
        if line.startswith(b"data: "):
            yield line[6:].decode("utf-8").strip()


def _take(event: str, heard: Heard) -> bool:
    """Whether it is the last one. Raises `NoEnd` where that one differs from those before."""
    if event == "[DONE]":
        return True
    said = json.loads(event)
    if said.get("error"):
        heard.error = said["error"]
        return True
    if "choices" in said:
        heard.texts += [choice["text"] for choice in said["choices"]]
    elif "generated_text" in said:
        if said["generated_text"] != heard.text:
            raise NoEnd(f"the tokens are {heard.text!r}, all of them {said['generated_text']!r}")
        return True
    else:
        heard.texts.append(said["text"])
    return False
