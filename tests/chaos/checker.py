"""Checks a history for what no correct server does.

Every request is answered once and before its deadline: with the text of its model in a version that
the store had, or with an error that a fault or the model's state explains. A loaded model stays
until it is unloaded, an unloaded one is gone. All parts agree once faults and requests have ended,
and nothing is left over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.chaos.history import LOAD, PUT, ROUTES, UNLOAD, Done, History, Op, text_key

# How much later than its deadline an answer may come: the gateway's own work, on a busy machine.
LATE_S = 3.0
AGREE_S = 5.0
# From the end of a fault until it is no reason for an error any more.
HEALED_S = 10.0
STORE_HEALED_S = 30.0  # five attempts of boto3's with their pauses
# The errors that a fault explains, by its name or first word. 404, 409 and 504 need other reasons.
EXPLAINS = {
    "kill": {503},
    "stop": {503},
    "kill gateway": {0, 503},
    # A request whose worker was lost three times is not sent again.
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
    message: str
    op: Op | None = None


def check(history: History, heal: float = 1.0) -> list[Violation]:
    """The violations. `heal` is a factor on the times that a slow or busy machine needs."""
    return list(_Checker(history, heal).violations())


class _Checker:
    def __init__(self, history: History, heal: float) -> None:
        self.history, self.heal = history, heal
        self.faults = [fault for fault in history.faults if not fault.skipped]

    def violations(self) -> Iterator[Violation]:
        rules = (self.answered, self.right, self.true, self.in_time)
        for op in self.history.ops:
            if op.kind != PUT:
                for rule in rules:
                    yield from rule(op)
        yield from self.agreed()
        for message in self.history.left:
            yield Violation("left", message)

    # One request

    def answered(self, op: Op) -> Iterator[Violation]:
        """Exactly one answer: at the client, and in the server's log."""
        lines = self.history.lines.get(op.id, 0)
        if lines > 1:
            yield Violation("answered", f"{lines} times by the log", op)
        if op.status and not lines and not self._explained(0, op):
            yield Violation("answered", "but the log has no line of it", op)
        if not op.status and not op.hung_up and not self._explained(0, op):
            yield Violation("answered", f"never: {op.lost}", op)

    def right(self, op: Op) -> Iterator[Violation]:
        if op.status != 200 or op.hung_up or op.kind not in ROUTES:
            return
        if self.history.multi_model and self._is_gone(op):
            yield Violation("unloaded", f"{op.model} answers though it is not loaded", op)
        may_be = self._versions(op)
        texts = self.history.texts
        if op.text in (texts[text_key(op.model, v, op.kind, op.prompt)] for v in may_be):
            return
        keys = [k for k, text in texts.items() if text == op.text]
        of = " of ".join(reversed(keys[0].split("\n")[:2])) if keys else "no model"
        yield Violation(
            "right", f"the text is that of {of}, not of {sorted(may_be)} of {op.model}", op
        )

    def true(self, op: Op) -> Iterator[Violation]:
        """An error has a reason, and a 503 has Retry-After unless it ends a stream."""
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
        """Time without a gateway is not counted: connections wait for the next one."""
        stood = sum(
            max(min(op.end, end) - max(op.begin, begin), 0) for begin, end in self._without_gateway
        )
        took = op.end - op.begin - stood
        if op.status and not op.hung_up and took > self._limit_s(op) + LATE_S * self.heal:
            yield Violation("in time", f"after {took:.1f} s", op)

    @cached_property
    def _without_gateway(self) -> list[tuple[float, float]]:
        """Until it continues, or its successor has answered a request begun after the kill."""
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
        if view := self.history.view:
            for difference in view.differences():
                at, quiet_s = view.at - self.history.began, view.quiet_s
                yield Violation("agree", f"at {at:.1f} s, {quiet_s:.1f} s quiet: {difference}")

    # Possible states

    def _limit_s(self, op: Op) -> float:
        """An unload waits for requests in flight."""
        request_s, load_s = self.history.request_s, self.history.load_s
        return {LOAD: load_s, UNLOAD: load_s + request_s}.get(op.kind, request_s)

    def _explained(self, status: int, op: Op) -> bool:
        return any(status in self._errors(fault, op) for fault in self.faults)

    def _errors(self, fault: Done, op: Op) -> set[int]:
        healed_s = STORE_HEALED_S if fault.kind.startswith("store") else HEALED_S
        if op.begin > fault.end + healed_s * self.heal or op.end < fault.begin:
            return set()
        found = EXPLAINS.get(fault.kind) or EXPLAINS.get(fault.kind.split()[0], set())
        # Connections while there is no gateway wait for the next one.
        return found if op.begin <= fault.end else found - {0}

    @cached_property
    def _by_model(self) -> dict[str, list[Op]]:
        found: dict[str, list[Op]] = {}
        for op in self.history.ops:
            found.setdefault(op.model, []).append(op)
        return found

    def _ends(self, op: Op) -> float:
        """The end of its effects: without an answer, it may continue on the server."""
        whole = op.status in (200, 404, 409) and not op.hung_up
        return op.end if whole else op.end + self.history.load_s + self.history.request_s

    def _changing(self, op: Op, kinds: tuple[str, ...], since: float) -> bool:
        """Whether another request of these kinds ran between `since` and the end of `op`."""
        return any(
            other is not op
            and other.kind in kinds
            and other.begin <= op.end
            and self._ends(other) >= since
            for other in self._by_model[op.model]
        )

    def _last(self, op: Op, kind: str) -> Op | None:
        """The last successful one before `op` began."""
        done = (
            other
            for other in self._by_model[op.model]
            if other.kind == kind and other.status == 200 and other.end <= op.begin
        )
        return max(done, key=lambda other: other.begin, default=None)

    def _is_there(self, op: Op) -> bool:
        """Whether the model must have been loaded throughout. Short of memory the server evicts
        models; on a full disk it cannot note which are loaded."""
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
        """Whether the model must have been unloaded throughout."""
        loading = (LOAD,) if self.history.multi_model else (LOAD, *ROUTES)
        unload = self._last(op, UNLOAD)
        return not self._changing(op, loading, unload.begin if unload else -math.inf)

    def _may_conflict(self, op: Op) -> bool:
        """Whether a 409 is right: the model may be loaded, or be unloaded during its load."""
        if op.kind == LOAD and not self._is_gone(op):
            return True
        return op.kind != UNLOAD and self._changing(op, (UNLOAD,), op.begin)

    def _versions(self, op: Op) -> set[int]:
        """The versions that the store had when the answering model may have been loaded: since the
        last unload, and during the last load if the model has stayed since."""
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
