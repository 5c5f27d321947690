"""The history of a run: requests, faults and views of the server's parts, on one clock."""

from __future__ import annotations

from dataclasses import dataclass, field

# Kinds of an `Op`. ROUTES are answered by a model.
ROUTES = ("predictions", "predictions-stream", "completions", "completions-stream")
LOAD, UNLOAD, PUT, LIST = "load", "unload", "put", "list"


@dataclass(frozen=True)
class Op:
    """One request, as its client saw it. Times are `time.monotonic()`, in seconds.

    status: 0 without a whole answer, and then `lost` is the reason; a stream's error has its own
    version: of a PUT, the store's from then on
    hung_up: whether the client disconnected on purpose
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
    """A fault until it is taken back; `skipped`: why it was not possible here."""

    kind: str
    begin: float
    end: float
    skipped: str = ""


@dataclass(frozen=True)
class View:
    """The models that each part of the server has, after `quiet_s` without faults and requests."""

    at: float
    quiet_s: float
    listed: list[str]
    engine: list[str]  # name#id
    mms: list[str]  # ids
    folders: list[str]  # ids
    workers: int
    sockets: int

    def differences(self) -> list[str]:
        """The disagreements."""
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
    """A whole run. `texts` are the models' texts, learned beforehand, by `text_key`."""

    seed: int
    multi_model: bool
    request_s: float  # REQUEST_TIMEOUT_S
    load_s: float  # LOAD_TIMEOUT_S
    texts: dict[str, str]
    began: float
    ops: list[Op] = field(default_factory=list)
    faults: list[Done] = field(default_factory=list)
    view: View | None = None
    left: list[str] = field(default_factory=list)  # leftovers after all was unloaded
    lines: dict[str, int] = field(default_factory=dict)  # of the log, by request


def text_key(model: str, version: int, route: str, prompt: int) -> str:
    return "\n".join((model, str(version), route.removesuffix("-stream"), str(prompt)))
