"""SageMaker's multi-model agent between an endpoint and one container, by its documented rules.

An archive is downloaded when its model is first called, unpacked to `/opt/ml/models/<hash>/model`
and loaded with `POST /models`. After a 507 the least recently used model is unloaded; it stays on
the disk. Where all are in use, which is not documented, a busy one is unloaded and has to drain.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http.client import HTTPConnection
from typing import Any

import requests
from requests import Response

from tests.chaos.system import names
from tests.platform import limits as platform
from tests.platform.disk import Disk
from tests.platform.limits import PlatformError

TARGET = "X-Amzn-SageMaker-Target-Model"


class State(Enum):
    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"


@dataclass
class Held:
    """A model on an instance."""

    target: str
    name: str  # in the container
    state: State = State.ABSENT
    in_flight: int = 0
    waiting: int = 0
    last_used: float = 0.0
    error: PlatformError | None = None


class Agent:
    """`url`: the container's. `inside`: the folder of `disk` in the container."""

    def __init__(self, url: str, disk: Disk, inside: str) -> None:
        self.url, self.disk, self.inside = url, disk, inside
        self.cold_start_s = platform.COLD_START_S
        self.counts: Counter[str] = Counter()
        self._models: dict[str, Held] = {}
        self._changed = threading.Condition()
        self._fetching = threading.Lock()

    # The container's API

    def ping(self) -> bool:
        try:
            return self._call("GET", "/ping", timeout_s=platform.PING_S).status_code == 200
        except requests.RequestException:
            return False

    def loaded(self) -> list[str]:
        """The names that the container lists, all pages."""
        return names(HTTPConnection(self.url.removeprefix("http://")))

    def _call(self, method: str, path: str, *, timeout_s: float, **options: Any) -> Response:
        timeout = (platform.CONNECT_S, timeout_s)
        return requests.request(method, self.url + path, timeout=timeout, **options)

    # Invoking

    def requests_of(self, target: str) -> int:
        """Waiting and running requests of a model."""
        with self._changed:
            held = self._models.get(target)
            return held.in_flight + held.waiting if held else 0

    def invoke(self, target: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Raises `PlatformError`, or `requests.ConnectionError` without a container."""
        with self._changed:
            held = self._models.setdefault(target, Held(target, _hash(target)))
        ready_by = time.monotonic() + self.cold_start_s
        passed: dict[str, str | bytes] = {**headers, TARGET: target.encode()}
        while True:
            self._use(held, ready_by)
            try:
                path, timeout_s = f"/models/{held.name}/invoke", platform.ANSWER_S
                answer = self._call("POST", path, timeout_s=timeout_s, data=body, headers=passed)
            except requests.ReadTimeout:
                raise platform.timed_out() from None
            finally:
                self._release(held)
            if answer.status_code != 404:
                break
            self._forget(held)  # the container has been started again
        if answer.status_code >= 400:
            raise platform.model_error(answer.status_code, answer.content)
        return answer

    def _use(self, held: Held, ready_by: float) -> None:
        """Waits until a model is loaded, and counts a request in flight."""
        hit = True
        with self._changed:
            held.waiting += 1
            try:
                while held.state is not State.READY:
                    hit = False
                    if held.error is not None:
                        error, held.error = held.error, None
                        raise error
                    if held.state is State.ABSENT:
                        held.state = State.LOADING
                        threading.Thread(target=self._load, args=(held,), daemon=True).start()
                    left = ready_by - time.monotonic()
                    if left <= 0:
                        raise platform.model_not_ready(held.target)
                    self._changed.wait(left)
                held.in_flight += 1
                held.last_used = time.monotonic()
                self.counts["hits" if hit else "misses"] += 1
            finally:
                held.waiting -= 1

    def _release(self, held: Held) -> None:
        with self._changed:
            held.in_flight -= 1
            held.last_used = time.monotonic()
            self._changed.notify_all()

    def _forget(self, held: Held) -> None:
        with self._changed:
            if held.state is State.READY:
                held.state = State.ABSENT
            self._changed.notify_all()

    def forget_all(self) -> None:
        """After a new container on the same disk: nothing is loaded."""
        with self._changed:
            self._models = {}

    # Loading

    def _load(self, held: Held) -> None:
        end = time.monotonic() + platform.LOAD_S
        error: PlatformError | None = None
        try:
            with self._fetching:
                if not self.disk.has(held.name):
                    self.disk.fetch(held.target, held.name)
            self._post(held, end)
        except PlatformError as raised:
            error = raised
        except requests.RequestException as raised:
            error = platform.unavailable(f"the container does not answer ({type(raised).__name__})")
        with self._changed:
            held.error = error
            held.state = State.ABSENT if error else State.READY
            held.last_used = time.monotonic()
            self._changed.notify_all()
        if error is not None:
            time.sleep(0.05)  # for the waiting requests; later ones try again
            with self._changed:
                held.error = None

    def _post(self, held: Held, end: float) -> None:
        """`POST /models`, again after each 507 and an unload."""
        body = {"model_name": held.name, "url": f"{self.inside}/{held.name}/model"}
        headers = {TARGET: held.target.encode()}
        while (left := end - time.monotonic()) > 0:
            answer = self._call("POST", "/models", json=body, headers=headers, timeout_s=left)
            if answer.status_code == 507 and self._evict(held, end):
                self.counts["no room"] += 1
                continue
            if answer.status_code == 409 or answer.status_code < 300:
                return
            raise platform.model_error(answer.status_code, answer.content)
        raise platform.model_error(0, b"Timed out while loading the model")

    def _evict(self, loading: Held, end: float) -> bool:
        """Unloads the least recently used model, an idle one if possible; False without one."""
        with self._changed:
            while time.monotonic() < end:
                others = [m for m in self._models.values() if m is not loading]
                ready = [m for m in others if m.state is State.READY]
                if ready:
                    victim = min(ready, key=lambda m: (m.in_flight > 0, m.last_used))
                    victim.state = State.UNLOADING
                    break
                if not any(m.state in (State.LOADING, State.UNLOADING) for m in others):
                    return False
                self._changed.wait(0.05)
            else:
                return False
        self._unload(victim)
        return True

    def _unload(self, held: Held) -> None:
        try:
            path = f"/models/{held.name}"
            answer = self._call("DELETE", path, timeout_s=platform.UNLOAD_S)
            outcome = "unloads" if answer.status_code in (200, 404) else "failed unloads"
        except requests.RequestException:
            outcome = "failed unloads"
        with self._changed:
            self.counts[outcome] += 1
            held.state = State.ABSENT
            self._changed.notify_all()


def _hash(target: str) -> str:
    return hashlib.sha256(target.encode()).hexdigest()[:32]
