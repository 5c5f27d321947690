"""Whether a history is one that a correct server could have made.

Every request was answered once; by the right model, in a version that it could have had, with the
text that this one gives; or with an error that was true. What was loaded was there until somebody
unloaded it, and what was unloaded was gone. Nothing was answered after its deadline. When all was
quiet, all parts agreed. At the end nothing was left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.chaos.history import LOAD, PUT, ROUTES, UNLOAD, Done, History, Op, text_key

# How much later than its deadline an answer may come: the gateway's own work, on a busy machine.
LATE_S = 3.0
AGREE_S = 5.0
# From the end of a fault until it is no reason for an error any more.
HEALED_S = 10.0
STORE_HEALED_S = 30.0  # five attempts of boto3's with their pauses
# By the first word of a fault, or all of it, the errors it explains. 404, 409 and 504 need a reason
# of their own.
EXPLAINS = {
    "kill": {503},
    "stop": {503},
    "kill gateway": {0, 503},
    # A request that was lost with its worker three times is given up.
    "kill worker": {500, 503},
    "kill host": {500, 503},
    "kill java": {500, 503},
    "kill launcher": {500, 503},
    "store": {503},
    "store 403": {403, 503},
    "disk": {503, 507},
    "memory": {0, 500, 503, 507},  # the kernel may kill any process
}


@dataclass(frozen=True)
class Violation:
    rule: str
    said: str
    op: Op | None = None


def check(history: History, heal: float = 1.0) -> list[Violation]:
    """What no correct server could have done. `heal` stretches the times that a slow or busy
    machine needs."""
    return list(_Checker(history, heal).violations())


def explained(history: History, heal: float) -> Counter[tuple[int, str]]:
    """Of the answers of 5xx, how many each kind of fault explains: the last to have begun, where
    several do."""
    checker = _Checker(history, heal)
    found: Counter[tuple[int, str]] = Counter()
    for op in history.ops:
        if op.status >= 500 and not op.hung_up:
            faults = checker.explaining(op.status, op)
            if last := max(faults, key=lambda fault: fault.begin, default=None):
                found[op.status, last.kind] += 1
    return found


class _Checker:
    def __init__(self, history: History, heal: float) -> None:
        self.history, self.heal = history, heal
        self.faults = [fault for fault in history.faults if not fault.skipped]

    def violations(self) -> Iterator[Violation]:
        rules: tuple[Callable[[Op], Iterator[Violation]], ...] = (
            self.answered,
            self.right,
            self.true,
            self.in_time,
        )
        for op in self.history.ops:
            if op.kind != PUT:
                for rule in rules:
                    yield from rule(op)
        yield from self.agreed()
        for said in self.history.left:
            yield Violation("left", said)

    # One request

    def answered(self, op: Op) -> Iterator[Violation]:
        """Once: by the client, and by the server's log."""
        lines = self.history.lines.get(op.id, 0)
        if lines > 1:
            yield Violation("answered", f"{lines} times, as the log has it", op)
        if op.status and not lines and not self._explained(0, op):
            yield Violation("answered", "and the log knows nothing of it", op)
        if not op.status and not op.hung_up and not self._explained(0, op):
            yield Violation("answered", f"never: {op.lost}", op)

    def right(self, op: Op) -> Iterator[Violation]:
        if op.status != 200 or op.hung_up or op.kind not in ROUTES:
            return
        if self.history.multi_model and self._is_gone(op):
            yield Violation("unloaded", f"{op.model} answers, and nobody has loaded it", op)
        may_be = self._versions(op)
        texts = self.history.texts
        if op.text in (texts[text_key(op.model, v, op.kind, op.prompt)] for v in may_be):
            return
        said = [k for k, text in texts.items() if text == op.text]
        of = " of ".join(reversed(said[0].split("\n")[:2])) if said else "nobody"
        yield Violation(
            "right", f"the text is that of {of}, not of {sorted(may_be)} of {op.model}", op
        )

    def true(self, op: Op) -> Iterator[Violation]:
        """An error has a reason, and a 503 says when to come back, unless it ends a stream."""
        status = op.status
        if status == 503 and not op.hung_up and op.retry_after_s is None and op.first_s is None:
            yield Violation("true", f"503 {op.type} has no Retry-After: {op.message}", op)
        if status in (0, 200) or op.hung_up or self._explained(status, op):
            return
        # On demand a call loads what it asks for.
        absent = op.kind == UNLOAD or (self.history.multi_model and op.kind in ROUTES)
        reasons = {
            404: absent and not self._is_there(op),
            409: self._may_conflict(op),
            504: op.end - op.begin >= self._limit_s(op) - 1,
        }
        if not reasons.get(status):
            yield Violation("true", f"{status} {op.type} has no reason: {op.message}", op)

    def in_time(self, op: Op) -> Iterator[Violation]:
        """Time without a gateway is not counted: who connects then waits for the next one, which
        counts from when it takes the request."""
        stood = sum(
            max(min(op.end, end) - max(op.begin, begin), 0) for begin, end in self._without_gateway
        )
        took = op.end - op.begin - stood
        if op.status and not op.hung_up and took > self._limit_s(op) + LATE_S * self.heal:
            yield Violation("in time", f"after {took:.1f} s", op)

    @cached_property
    def _without_gateway(self) -> list[tuple[float, float]]:
        """Until it goes on, or another one has answered what was asked after the kill."""
        found = []
        for fault in self.faults:
            end = fault.end
            if fault.kind == "kill gateway":
                answered = (o.end for o in self.history.ops if o.status and o.begin > fault.begin)
                end = min(answered, default=math.inf)
            if fault.kind in ("kill gateway", "stop gateway"):
                found.append((fault.begin, end))
        return found

    # All together

    def agreed(self) -> Iterator[Violation]:
        for view in self.history.views:
            for said in view.differences():
                at = view.at - self.history.began
                yield Violation("agree", f"at {at:.1f} s, {view.quiet_s:.1f} s quiet: {said}")

    # What could have been

    def _limit_s(self, op: Op) -> float:
        """An unload waits for requests in flight."""
        request_s, load_s = self.history.request_s, self.history.load_s
        return {LOAD: load_s, UNLOAD: load_s + request_s}.get(op.kind, request_s)

    def explaining(self, status: int, op: Op) -> Iterator[Done]:
        return (fault for fault in self.faults if status in self._errors(fault, op))

    def _explained(self, status: int, op: Op) -> bool:
        return any(self.explaining(status, op))

    def _errors(self, fault: Done, op: Op) -> set[int]:
        healed_s = STORE_HEALED_S if fault.kind.startswith("store") else HEALED_S
        if op.begin > fault.end + healed_s * self.heal or op.end < fault.begin:
            return set()
        found = EXPLAINS.get(fault.kind) or EXPLAINS.get(fault.kind.split()[0], set())
        # Who connects while the gateway is away waits for the next one.
        return found if op.begin <= fault.end else found - {0}

    @cached_property
    def _by_model(self) -> dict[str, list[Op]]:
        found: dict[str, list[Op]] = {}
        for op in self.history.ops:
            found.setdefault(op.model, []).append(op)
        return found

    def _ends(self, op: Op) -> float:
        """When it has no effect any more: one that was not answered, or given up, may go on."""
        whole = op.status in (200, 404, 409) and not op.hung_up
        return op.end if whole else op.end + self.history.load_s + self.history.request_s

    def _changing(self, op: Op, kinds: tuple[str, ...], since: float) -> bool:
        """Whether another one of these kinds was under way between `since` and the end of `op`."""
        return any(
            other is not op
            and other.kind in kinds
            and other.begin <= op.end
            and self._ends(other) >= since
            for other in self._by_model[op.model]
        )

    def _last(self, op: Op, kind: str) -> Op | None:
        """The last that succeeded before `op` began."""
        done = (
            other
            for other in self._by_model[op.model]
            if other.kind == kind and other.status == 200 and other.end <= op.begin
        )
        return max(done, key=lambda other: other.begin, default=None)

    def _is_there(self, op: Op) -> bool:
        """Whether the model must have been loaded all the time. Where there is no room the server
        unloads some, and on a full disk what is loaded cannot be written down."""
        load = self._last(op, LOAD)
        return (
            load is not None
            and not self._changing(op, (UNLOAD,), load.begin)
            and not any(
                fault.kind.startswith(("disk", "memory"))
                and fault.begin <= op.end
                and fault.end >= load.begin
                for fault in self.faults
            )
        )

    def _is_gone(self, op: Op) -> bool:
        """Whether the model must have been unloaded all the time."""
        loading = (LOAD,) if self.history.multi_model else (LOAD, *ROUTES)
        unload = self._last(op, UNLOAD)
        return not self._changing(op, loading, unload.begin if unload else -math.inf)

    def _may_conflict(self, op: Op) -> bool:
        """Whether a 409 is true: the model to load may be there already, or somebody unloads it
        while its load is waited for."""
        if op.kind == LOAD and not self._is_gone(op):
            return True
        return op.kind != UNLOAD and self._changing(op, (UNLOAD,), op.begin)

    def _versions(self, op: Op) -> set[int]:
        """Those that the store had when what answered may have been loaded: not before the last
        unload, and if a load since then was not undone, during that load."""
        unload, load = self._last(op, UNLOAD), self._last(op, LOAD)
        since, until = unload.begin if unload else -math.inf, op.end
        if load is not None and self._is_there(op):
            since, until = load.begin, load.end
        puts = sorted(
            (put for put in self._by_model[op.model] if put.kind == PUT), key=lambda put: put.begin
        )
        found = set()
        for number, put in enumerate(puts):
            replaced = puts[number + 1].end if number + 1 < len(puts) else math.inf
            if put.begin <= until and replaced >= since:
                found.add(put.version)
        return found
