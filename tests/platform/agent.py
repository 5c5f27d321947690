"""SageMaker's multi-model agent: what stands between an endpoint and one container.

It follows the platform's documented rules. An archive is downloaded when its model is first called,
unpacked to `/opt/ml/models/<hash>/model` and loaded with `POST /models`; 507 means that another one
has to go first, the least recently used; what leaves memory stays on the disk.
Which model goes when all are in use is not documented: here it is the least recently used as well,
which is what asks most of a container, since it has to drain it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import quote

import requests

from tests.platform.disk import Disk
from tests.platform.limits import (
    Limits,
    PlatformError,
    model_error,
    model_not_ready,
    timed_out,
    unavailable,
)

TARGET = "X-Amzn-SageMaker-Target-Model"


class State(Enum):
    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"


@dataclass
class Held:
    """One model on an instance."""

    target: str
    name: str  # what the container knows it by
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


@dataclass
class Seen:
    """What an agent has seen. `slowest` has seconds by `load`, `unload`, `invoke`."""

    counts: Counter[str] = field(default_factory=Counter)
    slowest: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    most_loaded: int = 0


class Agent:
    """`url` is the container's, `inside` the folder of `disk` as the container sees it."""

    def __init__(
        self,
        url: str,
        disk: Disk,
        inside: str = "/opt/ml/models",
        *,
        limits: Limits | None = None,
        cached: bool = True,
    ) -> None:
        """`cached=False` is `ModelCacheSetting=Disabled`."""
        self.url, self.disk, self.inside = url, disk, inside
        self.limits = limits or Limits()
        self.cached = cached
        self.seen = Seen()
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
        """What the container says it holds, all pages."""
        names: list[str] = []
        token = ""
        while True:
            page = requests.get(self.url + "/models" + token, timeout=60).json()
            names += [model["modelName"] for model in page["models"]]
            if "nextPageToken" not in page:
                return names
            token = "?next_page_token=" + quote(page["nextPageToken"])

    def _call(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        json: object = None,
        data: bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Answer:
        answer = requests.request(
            method,
            self.url + path,
            json=json,
            data=data,
            headers=headers,
            timeout=(self.limits.connect_s, timeout_s),
        )
        return Answer(answer.status_code, answer.headers, answer.content)

    def _timed(self, what: str, started: float) -> None:
        with self._changed:
            seconds = time.monotonic() - started
            self.seen.slowest[what] = max(self.seen.slowest[what], seconds)

    # Invoking

    def requests_of(self, target: str) -> int:
        """Requests for a model that are waiting or being answered."""
        with self._changed:
            held = self._models.get(target)
            return held.in_flight + held.waiting if held else 0

    def invoke(self, target: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Raises `PlatformError`, or `requests.ConnectionError` if the container is not there."""
        with self._changed:
            held = self._models.setdefault(target, Held(target, _hash(target)))
        ready_by = time.monotonic() + self.limits.cold_start_s
        passed: dict[str, str | bytes] = {**headers, TARGET: target.encode()}
        while True:
            self._use(held, ready_by)
            started = time.monotonic()
            try:
                answer = self._call(
                    "POST",
                    f"/models/{held.name}/invoke",
                    timeout_s=self.limits.answer_s,
                    data=body,
                    headers=passed,
                )
            except requests.ReadTimeout:
                raise timed_out() from None
            finally:
                self._release(held)
            self._timed("invoke", started)
            if answer.status != 404:
                break
            self._forget(held)  # the container has been started again
        if answer.status >= 400:
            raise model_error(answer.status, answer.body)
        return answer

    def _use(self, held: Held, ready_by: float) -> None:
        """Waits for a model to be loaded, and counts one request of it."""
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
                        raise model_not_ready(held.target)
                    self._changed.wait(left)
                held.in_flight += 1
                held.last_used = time.monotonic()
                self.seen.counts["hits" if hit else "misses"] += 1
            finally:
                held.waiting -= 1

    def _release(self, held: Held) -> None:
        with self._changed:
            held.in_flight -= 1
            held.last_used = time.monotonic()
            idle = not (held.in_flight or held.waiting) and held.state is State.READY
            drop = idle and not self.cached
            if drop:
                held.state = State.UNLOADING
            self._changed.notify_all()
        if drop:
            self._unload(held, delete=True)

    def _forget(self, held: Held) -> None:
        with self._changed:
            if held.state is State.READY:
                held.state = State.ABSENT
                self.seen.counts["lost"] += 1
            self._changed.notify_all()

    def forget_all(self) -> None:
        """The container has been replaced: nothing is loaded; the disk stays."""
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
            error = unavailable(f"the container does not answer ({type(raised).__name__})")
        with self._changed:
            held.error = error
            held.state = State.ABSENT if error else State.READY
            held.last_used = time.monotonic()
            ready = sum(m.state is State.READY for m in self._models.values())
            self.seen.most_loaded = max(self.seen.most_loaded, ready)
            self._changed.notify_all()
        if error is not None:
            time.sleep(0.05)  # whoever waits has it by now; who comes later tries again
            with self._changed:
                held.error = None

    def _post(self, held: Held, end: float) -> None:
        """`POST /models`, and again after each 507 once another model is gone."""
        body = {"model_name": held.name, "url": f"{self.inside}/{held.name}/model"}
        headers = {TARGET: held.target.encode()}
        while (left := end - time.monotonic()) > 0:
            started = time.monotonic()
            answer = self._call("POST", "/models", json=body, headers=headers, timeout_s=left)
            self._timed("load", started)
            if answer.status == 507 and self._make_room(held, end):
                self.seen.counts["no room"] += 1
                continue
            if answer.status == 409 or answer.status < 300:
                self.seen.counts["loads" if answer.status < 300 else "taken over"] += 1
                return
            raise model_error(answer.status, answer.body)
        raise model_error(0, b"Timed out while loading the model")

    def _make_room(self, wanting: Held, end: float) -> bool:
        """Unloads the least recently used model, of those not in use if there are any.

        False if no other model is in the way.
        """
        with self._changed:
            while time.monotonic() < end:
                others = [m for m in self._models.values() if m is not wanting]
                ready = [m for m in others if m.state is State.READY]
                if ready:
                    victim = min(ready, key=lambda m: (m.in_flight > 0, m.last_used))
                    self.seen.counts["busy" if victim.in_flight else "idle"] += 1
                    victim.state = State.UNLOADING
                    break
                if not any(m.state in (State.LOADING, State.UNLOADING) for m in others):
                    return False
                self._changed.wait(0.05)
            else:
                return False
        self._unload(victim)
        return True

    def _unload(self, held: Held, *, delete: bool = False) -> None:
        started = time.monotonic()
        try:
            path = f"/models/{held.name}"
            answer = self._call("DELETE", path, timeout_s=self.limits.unload_s)
            outcome = "unloads" if answer.status in (200, 404) else "failed unloads"
        except requests.RequestException:
            outcome = "failed unloads"
        self._timed("unload", started)
        if delete:
            self.disk.delete(held.name)
        with self._changed:
            self.seen.counts[outcome] += 1
            held.state = State.ABSENT
            self._changed.notify_all()


def _hash(target: str) -> str:
    return hashlib.sha256(target.encode()).hexdigest()[:32]
