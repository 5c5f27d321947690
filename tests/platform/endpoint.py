"""An endpoint: one name, several instances, and the routing of models to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import requests
from requests import Response

from tests.platform.limits import (
    ANSWER_S,
    CONNECT_S,
    model_error,
    timed_out,
    unavailable,
    validation_error,
)

SPILL_AT = 4  # concurrent requests of a model, from which on another instance gets it, too


class Instance(Protocol):
    """`Agent`, or the one container of a single-model endpoint."""

    def requests_of(self, target: str) -> int: ...
    def invoke(self, target: str, body: bytes, headers: Mapping[str, str]) -> Response: ...


class Endpoint:
    """Routes a model's requests to one healthy instance, and under load to another one."""

    def __init__(self, name: str, instances: Sequence[Instance]) -> None:
        self.name, self.instances = name, instances
        self._homes: dict[str, list[Instance]] = {}
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
            if best is None or (others and best.requests_of(target) >= SPILL_AT):
                best = min(others, key=self._models_of)
                homes.append(best)
            return best

    def _models_of(self, instance: Instance) -> int:
        return sum(instance in homes for homes in self._homes.values())

    def invoke(self, target: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Raises `PlatformError`."""
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

    def __init__(self, url: str) -> None:
        self.url = url

    def requests_of(self, target: str) -> int:
        return 0

    def invoke(self, target: str, body: bytes, headers: Mapping[str, str]) -> Response:
        if target:
            raise validation_error("TargetModel is for multi-model endpoints only")
        with self.stream(body, headers) as answer:
            assert answer.content is not None  # read while the connection is open
            return answer

    @contextlib.contextmanager
    def stream(self, body: bytes, headers: Mapping[str, str]) -> Iterator[Response]:
        """The answer, to be read as it comes."""
        url, limits_s = self.url + "/invocations", (CONNECT_S, ANSWER_S)
        try:
            begun = requests.post(url, body, headers=headers, timeout=limits_s, stream=True)
        except requests.ReadTimeout:
            raise timed_out() from None
        with begun as answer:
            if answer.status_code >= 400:
                raise model_error(answer.status_code, answer.content)
            yield answer
