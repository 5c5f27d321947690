"""An endpoint: one name, several instances, and the routing of models to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import requests

from tests.platform.agent import Answer
from tests.platform.limits import Limits, model_error, timed_out, unavailable, validation_error

SESSION_ID = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION_ID = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION_ID = "X-Amzn-SageMaker-Closed-Session-Id"
NEW_SESSION = "NEW_SESSION"  # the id of a client that has none yet


class Instance(Protocol):
    """`Agent`, or the one container of a single-model endpoint."""

    def requests_of(self, target: str) -> int: ...
    def invoke(self, target: str, body: bytes, headers: Mapping[str, str]) -> Answer: ...


class Endpoint:
    """Routes a model's requests to one healthy instance.

    A model with `spill_at` concurrent requests gets another instance. A new session goes to the
    instance with the fewest, and its requests to that one only.
    """

    def __init__(self, name: str, instances: Sequence[Instance], spill_at: int = 4) -> None:
        self.name, self.instances, self._spill_at = name, instances, spill_at
        self._homes: dict[str, list[Instance]] = {}
        self._sessions: dict[str, Instance] = {}
        self._away: list[Instance] = []
        self._lock = threading.Lock()

    def take_out(self, instance: Instance) -> None:
        """Routes no more requests to it."""
        with self._lock:
            self._away.append(instance)

    def put_back(self, instance: Instance) -> None:
        with self._lock:
            self._away.remove(instance)

    def _route(self, target: str, tried: list[Instance]) -> Instance:
        with self._lock:
            healthy = [i for i in self.instances if i not in self._away and i not in tried]
            if not healthy:
                raise unavailable("no instance is healthy")
            homes = self._homes.setdefault(target, [])
            usable = [i for i in homes if i in healthy]
            best = min(usable, key=lambda i: i.requests_of(target), default=None)
            others = [i for i in healthy if i not in usable]
            if best is None or (others and best.requests_of(target) >= self._spill_at):
                best = min(others, key=self._models_of)
                homes.append(best)
            return best

    def _models_of(self, instance: Instance) -> int:
        return sum(instance in homes for homes in self._homes.values())

    def sessions(self, instance: int) -> int:
        """The number of sessions of an instance (by number)."""
        with self._lock:
            return list(self._sessions.values()).count(self.instances[instance])

    def _in_session(self, id: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        if id == NEW_SESSION:
            number = min(range(len(self.instances)), key=self.sessions)
            instance = self.instances[number]
        elif id in self._sessions:
            instance = self._sessions[id]
        else:
            raise validation_error(f"Session {id} not found.")
        answer = instance.invoke("", body, headers)
        with self._lock:
            if opened := answer.headers.get(NEW_SESSION_ID, "").partition(";")[0]:
                self._sessions[opened] = instance
            self._sessions.pop(answer.headers.get(CLOSED_SESSION_ID, ""), None)
        return answer

    def invoke(self, target: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Raises `PlatformError`."""
        if id := headers.get(SESSION_ID):
            return self._in_session(id, body, headers)
        tried: list[Instance] = []
        while True:
            instance = self._route(target, tried)
            try:
                return instance.invoke(target, body, headers)
            except requests.ConnectTimeout:
                raise unavailable("no connection within the limit") from None
            except requests.ConnectionError as error:
                if "refused" not in str(error):  # the request may have been processed
                    raise unavailable("the container went away") from None
                tried.append(instance)


class SingleModel:
    """The container of an endpoint without `Mode=MultiModel`: calls go to `/invocations`."""

    def __init__(self, url: str, limits: Limits | None = None) -> None:
        self.url, self._limits = url, limits or Limits()

    def requests_of(self, target: str) -> int:
        return 0

    def invoke(self, target: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        if target:
            raise validation_error("TargetModel is for multi-model endpoints only")
        with self.stream(body, headers) as answer:
            return Answer(answer.status_code, answer.headers, answer.content)

    @contextlib.contextmanager
    def stream(self, body: bytes, headers: Mapping[str, str]) -> Iterator[requests.Response]:
        """The answer, to be read as it comes."""
        limits = (self._limits.connect_s, self._limits.answer_s)
        url = self.url + "/invocations"
        try:
            begun = requests.post(
                url, data=body, headers=dict(headers), timeout=limits, stream=True
            )
        except requests.ReadTimeout:
            raise timed_out() from None
        with begun as answer:
            if answer.status_code >= 400:
                raise model_error(answer.status_code, answer.content)
            yield answer
