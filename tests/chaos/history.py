"""What happened in a run: requests, faults, and looks at the server's parts, all on one clock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Kinds of an `Op`. ROUTES are answered by a model.
ROUTES = ("predictions", "predictions-stream", "completions", "completions-stream")
LOAD, UNLOAD, PUT, LIST = "load", "unload", "put", "list"


@dataclass(frozen=True)
class Op:
    """One request, as its client saw it. Times are `time.monotonic()`, in seconds.

    status: 0 where no whole answer came, and then `lost` says why. A stream that ends with an error
        has that error's.
    text: what a model has said
    version: of a PUT, what the store has from then on
    hung_up: whether the client went away by itself
    """

    id: str
    client: int
    kind: str
    model: str
    begin: float
    end: float
    status: int = 0
    text: str = ""
    type: str = ""
    message: str = ""
    retry_after_s: float | None = None
    lost: str = ""
    hung_up: bool = False
    prompt: int = 0
    version: int = 0
    first_s: float | None = None  # until the first token of a stream


@dataclass(frozen=True)
class Done:
    """A fault from its beginning until all that it did is taken back. One that was not possible
    here has a `skipped`."""

    kind: str
    begin: float
    end: float
    skipped: str = ""


@dataclass(frozen=True)
class View:
    """What each part of the server says it has, after `quiet_s` without faults and requests.

    ids: of the gateway's models, by name, and as the engine, Multi Model Server, the processes and
        the folders have them
    """

    at: float
    quiet_s: float
    listed: list[str]
    engine: list[str]  # name#id
    mms: list[str]  # ids
    folders: list[str]  # ids
    workers: int
    sockets: int

    def differences(self) -> list[str]:
        """Where they do not agree."""
        ids = sorted(name.rpartition("#")[2] for name in self.engine)
        names = sorted(name.rpartition("#")[0] for name in self.engine)
        found = []
        for what, theirs, ours in (
            ("the engine has the models", names, sorted(self.listed)),
            ("Multi Model Server has", sorted(self.mms), ids),
            ("folders of workers are", sorted(self.folders), ids),
        ):
            if theirs != ours:
                found.append(f"{what} {theirs}, not {ours}")
        for what, count in (("workers", self.workers), ("sockets", self.sockets)):
            if count != len(ids):
                found.append(f"there are {count} {what} for {len(ids)} models")
        return found


@dataclass
class History:
    """A whole run. `texts` is what each model says, known beforehand: by model, version, route and
    prompt, with a line break between."""

    seed: int
    multi_model: bool
    request_s: float  # REQUEST_TIMEOUT_S
    load_s: float  # LOAD_TIMEOUT_S
    texts: dict[str, str]
    began: float
    ops: list[Op] = field(default_factory=list)
    faults: list[Done] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # after all was unloaded
    # What the server held when it was started, and after all was unloaded.
    empty: list[dict[str, int]] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)  # of the server's log, by request

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), ensure_ascii=False), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> History:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        said["ops"] = [Op(**op) for op in said["ops"]]
        said["faults"] = [Done(**fault) for fault in said["faults"]]
        said["views"] = [View(**view) for view in said["views"]]
        return cls(**said)


def text_key(model: str, version: int, route: str, prompt: int) -> str:
    return "\n".join((model, str(version), route.removesuffix("-stream"), str(prompt)))


def of_kind(ops: Iterable[Op], *kinds: str) -> Iterator[Op]:
    return (op for op in ops if op.kind in kinds)
