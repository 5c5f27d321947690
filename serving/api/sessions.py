"""SageMaker's stateful sessions: the platform sends a session's requests to the same container.

POST /invocations  {"requestType": "NEW_SESSION"}  opens a session, whose id and end are in
                                                   X-Amzn-SageMaker-New-Session-Id
                   {"requestType": "CLOSE"}        closes the session of X-Amzn-SageMaker-Session-Id
                   any other body                  with that header only while the session is open

AWS publishes the contract in model-hosting-container-standards. A session stores no prompts or
answers: the container's prefix cache is what its requests gain.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from starlette.responses import PlainTextResponse, Response

from common.errors import InvalidRequest, UnsupportedMediaType
from common.json_body import MAX_VALUES, read_json
from common.media_types import JSON, media_type
from serving.errors import BadRequest, TooManyRequests, Unavailable

SESSION_ID = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION_ID = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION_ID = "X-Amzn-SageMaker-Closed-Session-Id"
NEW, CLOSE = "NEW_SESSION", "CLOSE"
MAX_SESSIONS = 10_000  # open at once; each takes a small file and some 200 bytes of memory
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Sessions:
    """The open sessions, which outlive the gateway's process.

    Each has a file in `folder`, named by its id, whose modification time is the session's end. The
    file has the models chosen for aliases as a JSON object, and is empty without any.
    """

    def __init__(self, folder: Path, life_s: int, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._life_s, self._clock = folder, life_s, clock
        folder.mkdir(mode=0o700, exist_ok=True)
        for cut_off in folder.glob("*.new"):  # a crash came before `keep` could replace the file
            if UUID.fullmatch(cut_off.stem):
                cut_off.unlink(missing_ok=True)
        files = [path for path in folder.iterdir() if UUID.fullmatch(path.name)]
        # Ends of sessions by id, in seconds since 1970.
        self._ends = {path.name: int(path.stat().st_mtime) for path in files}
        self._models = {path.name: _models(path) for path in files}

    async def open(self) -> tuple[str, int]:
        """Open a session; return its id, and its end in seconds since 1970.

        Raises `TooManyRequests` while `MAX_SESSIONS` are open, `Unavailable` if its file cannot be
        written.
        """
        now = self._clock()
        # They are not in the order of their ends: a restart may have changed `life_s`.
        ended = [id for id, end in self._ends.items() if end <= now]
        for id in ended:
            del self._ends[id]
            self._models.pop(id, None)
        if len(self._ends) >= MAX_SESSIONS:
            first_end = min(self._ends.values())
            raise TooManyRequests(
                f"{MAX_SESSIONS} sessions are open: close one", retry_after_s=first_end - now
            )
        id, end = str(uuid.uuid4()), int(now) + self._life_s
        self._ends[id] = end
        try:
            await asyncio.to_thread(self._keep, id, end, ended)
        except OSError as error:
            del self._ends[id]
            raise Unavailable(f"the session cannot be kept: {error.strerror}") from None
        return id, end

    def _keep(self, id: str, end: int, ended: Sequence[str]) -> None:
        for old in ended:
            (self._folder / old).unlink(missing_ok=True)
        path = self._folder / id
        path.touch(0o600)
        os.utime(path, (end, end))

    def check(self, id: str) -> None:
        """Raises `BadRequest` for the id of a session that is not open."""
        if self._ends.get(id, 0) <= self._clock():
            raise BadRequest(f"session not found: {id[:100]}; it may have ended")

    def model(self, id: str, alias: str) -> str:
        """The model that answers an open session's requests for an alias; "" for none yet."""
        is_open = self._ends.get(id, 0) > self._clock()
        return self._models.get(id, {}).get(alias, "") if is_open else ""

    def keep(self, id: str, alias: str, model: str) -> None:
        """Store the model that answers an open session's requests for an alias from now on."""
        end = self._ends.get(id, 0)
        if end > self._clock():
            models = self._models.setdefault(id, {})
            models[alias] = model
            with suppress(OSError):  # then only this process has the choice
                fresh = self._folder / f"{id}.new"
                fresh.write_text(json.dumps(models), encoding="utf-8")
                os.utime(fresh, (end, end))
                fresh.replace(self._folder / id)

    async def close(self, id: str) -> None:
        """Close a session. Raises `BadRequest` for the id of one that is not open."""
        self.check(id)
        del self._ends[id]
        self._models.pop(id, None)
        await asyncio.to_thread((self._folder / id).unlink, missing_ok=True)


def _models(path: Path) -> dict[str, str]:
    """Read the models that a session's file has, by alias; none if it cannot be read."""
    with suppress(OSError, ValueError):
        models: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return models
    return {}


def session_request(body: bytes, content_type: str | None) -> dict[str, Any] | None:
    """Return the fields of a body that has a `requestType`; None for any other body."""
    if b'"requestType"' not in body:
        return None
    with suppress(InvalidRequest, UnsupportedMediaType):  # the model reports the error
        value = read_json(body, MAX_VALUES) if media_type(content_type)[0] == JSON else None
        if isinstance(value, dict) and "requestType" in value:
            return value
    return None


async def answer(
    sessions: Sessions | None, fields: dict[str, Any] | None, id: str | None
) -> Response | None:
    """Answer a request that opens or closes a session; return None for one that a model answers.

    `sessions` is None if they are not enabled, `fields` is the result of `session_request`, `id`
    the header's value. Raises `BadRequest` and what `Sessions.open` does.
    """
    kind = fields and fields["requestType"]
    if sessions is None:
        # A model's own script may have a requestType with other values.
        if kind in (NEW, CLOSE) or id:
            raise BadRequest(
                "sessions are not enabled: SAGEMAKER_ENABLE_STATEFUL_SESSIONS=true does that"
            )
        return None
    if fields is None:
        if id and id != NEW:
            sessions.check(id)
        return None
    if kind not in (NEW, CLOSE) or len(fields) > 1:
        raise BadRequest(f"requestType must be {NEW} or {CLOSE}, and the only field")
    if kind == NEW:
        id, end = await sessions.open()
        expires = datetime.fromtimestamp(end, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        headers = {NEW_SESSION_ID: f"{id}; Expires={expires}"}
        return PlainTextResponse(f"Session {id} created", headers=headers)
    if not id:
        raise BadRequest(f"{CLOSE} needs the header {SESSION_ID}")
    await sessions.close(id)
    return PlainTextResponse(f"Session {id} closed", headers={CLOSED_SESSION_ID: id})
