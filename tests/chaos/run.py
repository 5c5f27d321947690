"""Runs a server, clients and faults; the checker reads the history."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from command.errors import Failed
from testbed import random_model
from testbed.control_group import ControlGroup
from testbed.process import ProgramError
from tests.chaos.checker import AGREE_S, Violation, check
from tests.chaos.clients import MIX, PROMPTS, Clients, Models
from tests.chaos.clock import Clock
from tests.chaos.faults import Injector
from tests.chaos.history import LOAD, ROUTES, UNLOAD, History, Op, View, text_key
from tests.chaos.plan import Plan
from tests.chaos.store import Store, store
from tests.chaos.system import SETTLED, System, left_of

MODELS = Models(("소월", "동주", "steady"), ("봄", "여름", "moving"), 3)
GROUP_MIB = 4096
LOST_S = 90  # after the limit of a load, until an answer is lost
Beside = Callable[[System], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Size:
    """How large a run is.

    memory_mib: the engine's budget
    heal: a factor on recovery times, for a slow or busy machine
    image: run the server as a container of this image; "" for processes
    request_s, load_s: REQUEST_TIMEOUT_S, LOAD_TIMEOUT_S
    """

    clients: int = 8
    models: Models = MODELS
    mix: Mapping[str, int] = field(default_factory=lambda: MIX)
    memory_mib: int = 64
    heal: float = 1.0
    image: str = ""
    request_s: int = 30
    load_s: int = 60


@dataclass
class Result:
    history: History
    violations: list[Violation]
    log: str  # of the server


def run(
    plan: Plan,
    size: Size | None = None,
    say: Callable[[str], None] = print,
    beside: Beside = lambda system: contextlib.nullcontext(),
) -> Result:
    """Carries out a plan on a server of its own and checks the history. `beside` is entered before
    the clients start and left after they have ended."""
    size = size or Size()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        kept = stack.enter_context(store(folder / "moto.log"))
        environment = {**kept.environment, **_limits(plan, size)}
        broken = {fault.kind.partition(" ")[0] for fault in plan.faults}
        group = _group(stack) if "memory" in broken and not size.image else None
        clock = Clock(folder) if "clock" in broken and not size.image else None
        small = "disk" in broken
        system = stack.enter_context(System(folder, environment, group, size.image, clock, small))
        one = _Run(plan, size, system, kept, archives(size.models, folder / "archives"), say)
        try:
            history = one.carry_out(beside)
        except BaseException:
            say(system.log.read_text(encoding="utf-8", errors="replace")[-4000:])
            raise
        log = system.log.read_text(encoding="utf-8", errors="replace")
    return Result(history, check(history, size.heal), log)


def _limits(plan: Plan, size: Size) -> dict[str, str]:
    return {
        "REQUEST_TIMEOUT_S": str(size.request_s),
        "LOAD_TIMEOUT_S": str(size.load_s),
        "ENGINE_MEMORY_MIB": str(size.memory_mib),
        "SAGEMAKER_MULTI_MODEL": str(plan.multi_model).lower(),
        "DRAIN_S": "5",
    }


def _group(stack: contextlib.ExitStack) -> ControlGroup | None:
    try:
        return stack.enter_context(ControlGroup(GROUP_MIB))
    except ProgramError:
        return None


class _Run:
    def __init__(
        self,
        plan: Plan,
        size: Size,
        system: System,
        store: Store,
        archives: dict[tuple[str, int], Path],
        say: Callable[[str], None],
    ) -> None:
        self.plan, self.size, self.say = plan, size, say
        self.system, self.store, self.archives = system, store, archives
        self.clients = Clients(
            system.ports,
            size.models,
            plan.seed,
            size.clients,
            self._put,
            size.mix,
            lost_s=size.load_s + LOST_S,
        )
        store.changing = self._change
        self.injector = Injector(system, store)
        self.history = History(
            plan.seed, plan.multi_model, size.request_s, size.load_s, {}, time.monotonic()
        )

    def _put(self, model: str, version: int) -> None:
        self.store.put(model, self.archives[model, version].read_bytes())

    def _change(self, model: str) -> None:
        """Replaces a moving model in mid-download."""
        if model in self.size.models.moving:
            self.clients.replace(-1, f"{self.plan.seed}-change-{time.monotonic_ns()}", model)

    def carry_out(self, beside: Beside) -> History:
        history, clients, system = self.history, self.clients, self.system
        history.texts = learn_texts(clients, self._put, [*self.archives])
        before, names = system.counted(), system.files("run")
        reserved = system.reserved_bytes()
        files = {kind: _open_files(system, kind) for kind in SETTLED}
        clients.ops = clients.first_versions(history.began)
        for model in self.size.models.steady:
            _must(clients, LOAD, model)
        self.say(f"{len(self.plan.faults)} faults in {self.plan.seconds:.0f} s")
        clients.start()
        try:
            with beside(system):
                self.injector.run(self.plan)
                clients.pause()
            history.view = self._agreed()
        finally:
            self.injector.stop()
            clients.stop()
        self._answers_again()
        history.left = list(self._left(before, names, reserved, files))
        history.ops = sorted(clients.ops, key=lambda op: op.begin)
        history.faults = sorted(self.injector.done, key=lambda fault: fault.begin)
        history.lines = dict(system.request_lines())
        return history

    def _agreed(self) -> View:
        return self.system.agreed(AGREE_S * self.size.heal)

    def _answers_again(self) -> None:
        """Calls all models on all routes after the last fault."""
        for model in self.size.models.all:
            if self.plan.multi_model:
                self.clients.ask(-1, LOAD, model)
            for route in ROUTES:
                op = self.clients.ask(-1, route, model)
                if op.status != 200:
                    error = f"{op.status} {op.message}{op.lost}"
                    self.history.left.append(f"{model} does not answer {route}: {error}")

    def _more(self, before: Counter[str], names: set[str]) -> list[str]:
        """Processes that are new or gone, and new files in RUN_DIR. Fetched and prepared models
        stay, in other folders."""
        now = self.system.counted()
        found = [f"{now[k] - before[k]:+d} {k}" for k in now if now[k] != before[k]]
        return [*found, *sorted(self.system.files("run") - names)]

    def _left(
        self,
        before: Counter[str],
        names: set[str],
        reserved: int,
        files: dict[str, dict[int, int]],
    ) -> Iterator[str]:
        """New files and processes that remain after all models are unloaded."""
        yield from self.history.left
        ids = dict(name.rsplit("#", 1) for name in self._agreed().engine)
        for model in self.size.models.all:
            op = self.clients.ask(-1, UNLOAD, model)
            if op.status == 200 and model in ids:
                yield from left_of(self.system.run_dir, ids[model])
            elif op.status not in (200, 404):
                yield f"{model} is not unloaded: {op.status} {op.message}"
        view = self._agreed()
        yield from view.differences()
        if view.engine:
            yield f"the engine still has {view.engine}"
        end = time.monotonic() + AGREE_S * self.size.heal
        while (more := self._more(before, names)) and time.monotonic() < end:
            time.sleep(0.2)
        yield from more
        if (bytes_now := self.system.reserved_bytes()) != reserved:
            yield f"the engine has reserved {bytes_now} bytes, at the start {reserved}"
        for kind in SETTLED:
            for pid, count in _open_files(self.system, kind).items():
                # More than kept connections and threads.
                if count > files[kind].get(pid, count) + 40:
                    yield f"{kind} has {count} files open, {files[kind][pid]} at the start"


def learn_texts(
    clients: Clients, put: Callable[[str, int], None], versions: Sequence[tuple[str, int]]
) -> dict[str, str]:
    """The text of each version of each model, before the first fault. Afterwards no model is loaded
    and the store has the first versions."""
    texts = {}
    for model, version in reversed(versions):  # the first version comes last
        put(model, version)
        _must(clients, LOAD, model)
        for route in ("predictions", "completions"):
            for prompt in range(len(PROMPTS)):
                key = text_key(model, version, route, prompt)
                texts[key] = _must(clients, route, model, prompt).text
        _must(clients, UNLOAD, model)
    first = [text for key, text in texts.items() if key.endswith("predictions\n0")]
    if len(set(first)) < len(first):
        raise Failed("two models have the same text, so they cannot be distinguished")
    return texts


def _must(clients: Clients, kind: str, model: str, prompt: int = 0) -> Op:
    op = clients.ask(-1, kind, model, prompt)
    if op.status != 200:
        raise Failed(f"{kind} of {model}: {op.status} {op.message}{op.lost}")
    return op


def _open_files(system: System, kind: str) -> dict[int, int]:
    found = {}
    for process in system.processes(kind):
        with contextlib.suppress(Exception):
            found[process.pid] = process.num_fds()
    return found


def archives(models: Models, folder: Path) -> dict[tuple[str, int], Path]:
    """Archives by model and version, each with weights of its own, in the new `folder`."""
    folder.mkdir()
    found: dict[tuple[str, int], Path] = {}
    for model in (model for model in models.all if model not in models.full):
        for version in range(models.versions_of(model)):
            made = random_model.make(folder, random_model.TINY, len(found))
            found[model, version] = _packed(made)
    tuned = random_model.fine_tunes(folder, random_model.FULL, len(models.full))
    found |= {(model, 0): _packed(made) for model, made in zip(models.full, tuned, strict=True)}
    return found


def _packed(folder: Path) -> Path:
    """Replaces the folder by an archive."""
    packed = random_model.pack(folder, folder.with_suffix(".tar.gz"))
    shutil.rmtree(folder)
    return packed
