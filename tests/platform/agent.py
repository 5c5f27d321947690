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
from typing import Any
from urllib.parse import quote

import requests

from tests.platform import limits as platform
from tests.platform.disk import Disk
from tests.platform.limits import Limits, PlatformError

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


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Agent:
    """`url`: the container's. `inside`: the folder of `disk` in the container."""

    def __init__(self, url: str, disk: Disk, inside: str) -> None:
        self.url, self.disk, self.inside = url, disk, inside
        self.limits = Limits()
        self.counts: Counter[str] = Counter()
        self._models: dict[str, Held] = {}
        self._changed = threading.Condition()
        self._fetching = threading.Lock()

    # The container's API

    def ping(self) -> bool:
        try:
            return self._call("GET", "/ping", timeout_s=self.limits.ping_s).status == 200
        except requests.RequestException:
            return False

    def loaded(self) -> list[str]:
        """The names that the container lists, all pages."""
        names: list[str] = []
        token = ""
        while True:
            page = requests.get(self.url + "/models" + token, timeout=60).json()
            names += [model["modelName"] for model in page["models"]]
            if "nextPageToken" not in page:
                return names
            token = "?next_page_token=" + quote(page["nextPageToken"])

    def _call(self, method: str, path: str, *, timeout_s: float, **options: Any) -> Answer:
        timeout = (self.limits.connect_s, timeout_s)
        answer = requests.request(method, self.url + path, timeout=timeout, **options)
        return Answer(answer.status_code, answer.headers, answer.content)

    # Invoking

    def requests_of(self, target: str) -> int:
        """Waiting and running requests of a model."""
        with self._changed:
            held = self._models.get(target)
            return held.in_flight + held.waiting if held else 0

    def invoke(self, target: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Raises `PlatformError`, or `requests.ConnectionError` without a container."""
        with self._changed:
            held = self._models.setdefault(target, Held(target, _hash(target)))
        ready_by = time.monotonic() + self.limits.cold_start_s
        passed: dict[str, str | bytes] = {**headers, TARGET: target.encode()}
        while True:
            self._use(held, ready_by)
            try:
                path, timeout_s = f"/models/{held.name}/invoke", self.limits.answer_s
                answer = self._call("POST", path, timeout_s=timeout_s, data=body, headers=passed)
            except requests.ReadTimeout:
                raise platform.timed_out() from None
            finally:
                self._release(held)
            if answer.status != 404:
                break
            self._forget(held)  # the container has been started again
        if answer.status >= 400:
            raise platform.model_error(answer.status, answer.body)
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
        end = time.monotonic() + self.limits.load_s
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
            if answer.status == 507 and self._evict(held, end):
                self.counts["no room"] += 1
                continue
            if answer.status == 409 or answer.status < 300:
                return
            raise platform.model_error(answer.status, answer.body)
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
            answer = self._call("DELETE", path, timeout_s=self.limits.unload_s)
            outcome = "unloads" if answer.status in (200, 404) else "failed unloads"
        except requests.RequestException:
            outcome = "failed unloads"
        with self._changed:
            self.counts[outcome] += 1
            held.state = State.ABSENT
            self._changed.notify_all()


def _hash(target: str) -> str:
    return hashlib.sha256(target.encode()).hexdigest()[:32]
