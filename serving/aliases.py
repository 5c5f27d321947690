"""Aliases: names that stand for models, from `aliases.json` at the root of the store.

{"poem": "sowol-v3", "support": {"support-v7": 90, "support-v8": 10}}

docs/api/requests.md describes the file. `serving.api.naming` resolves the names of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ServiceError, SettingError, quoted
from serving.errors import ArtifactChanged, ServingError, UrlNotAllowed
from serving.json_file import parse_json
from serving.names import model_name
from serving.store import Lookups
from serving.store.disk import write_whole

logger = logging.getLogger(__name__)

FILE = "aliases.json"
# Poll interval for changes of the file. Shorter: requests to S3 cost more than 0.5 USD a month.
CHECK_S = 2.0
MAX_BYTES = 4 << 20  # some 40,000 aliases
MAX_MODELS = 64  # per alias
MAX_WEIGHT = 1_000_000
MAX_SHOWN = 5  # unknown models that a warning in the log names


@dataclass
class Alias:
    """A name that stands for one or more models, each with a share of the requests.

    `weights` has the share of each model, `requests` the number of requests it was chosen for.
    """

    name: str
    weights: Mapping[str, float]
    requests: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.models = tuple(sorted(self.weights, key=self.weights.__getitem__, reverse=True))
        self._credit = dict.fromkeys(self.models, 0.0)

    def choose(self, key: str = "") -> str:
        """Return the model that answers a request.

        A `key` always gets the same model, on each server, and a change of the weights moves as few
        keys as possible. Without a key the models take turns.
        """
        if len(self.models) == 1:
            return self.models[0]
        return self._by_hash(key) if key else self._in_turn()

    def _by_hash(self, key: str) -> str:
        """Choose a model for `key` by weighted rendezvous hashing."""

        def score(model: str) -> float:
            text = "\0".join((self.name, key, model)).encode("utf-8", "surrogateescape")
            number = int.from_bytes(hashlib.sha256(text).digest()[:6], "big")
            return -self.weights[model] / math.log((number + 0.5) / 2**48)

        return max(self.models, key=score)

    def _in_turn(self) -> str:
        """Choose by smooth weighted round-robin: at weights 9 and 1, exactly 9 of 10 in a row."""
        for model in self.models:
            self._credit[model] += self.weights[model]
        chosen = max(self.models, key=self._credit.__getitem__)
        self._credit[chosen] -= sum(self.weights.values())
        return chosen


class Aliases:
    """The store's aliases, read again when the file changes."""

    def __init__(self, lookups: Lookups | None = None, copy: Path | None = None) -> None:
        """Create an empty table, which `watch` fills. Without `lookups` it stays empty.

        copy: path of a copy of the last valid file, for a gateway that starts without the store
        """
        self._lookups, self._copy = lookups, copy
        self._aliases: dict[str, Alias] = {}
        self._of: dict[str, list[str]] = {}  # names of aliases, by model
        self._version: str | None = ""  # of the last file read; None: the store has no such file
        self._problem = ""  # the last logged error
        self._checked = True  # the models of the current aliases were searched for in the store
        self.wrong = False  # the aliases in use are not those of the store's file
        self.ready = asyncio.Event()  # set once requests may use the aliases
        if lookups is None:
            self.ready.set()

    def all(self) -> list[Alias]:
        return list(self._aliases.values())

    def find(self, name: str) -> Alias | None:
        return self._aliases.get(name)

    def of(self, model: str) -> Sequence[str]:
        """The names of the aliases that stand for a model."""
        return self._of.get(model, ())

    async def watch(self) -> None:
        """Read the file now and after each change, until it is cancelled."""
        if self._copy is not None:
            with contextlib.suppress(OSError, SettingError):
                self._take(parse(self._copy.read_bytes()))
                self.ready.set()
        while self._lookups is not None:
            with contextlib.suppress(RuntimeError):  # no thread can be started: poll again later
                await self.refresh()
                self.ready.set()
                await self._warn_of_unknown()
            await asyncio.sleep(CHECK_S)

    async def refresh(self) -> None:
        """Read the file again if it has changed.

        If it is invalid or cannot be read, the aliases stay as they are and the error is logged
        once.
        """
        if self._lookups is None:
            return
        try:
            version, content = await self._lookups.file(FILE, self._version, MAX_BYTES + 1)
        except ArtifactChanged:
            return
        except ServingError as error:
            self._version = ""
            self._failed(error)
            return
        if version == self._version:
            return
        self._version, before = version, self._aliases
        try:
            self._take({} if content is None else await asyncio.to_thread(parse, content))
        except SettingError as error:
            self._failed(error)
            return
        if content is not None or before:
            logger.info("%s has %d aliases", FILE, len(self._aliases))
        self._problem, self.wrong = "", False
        if self._copy is not None:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(_write, self._copy, content)

    def _failed(self, error: ServiceError) -> None:
        if error.message != self._problem:
            logger.error("%s; the %d aliases before stay", error.message, len(self._aliases))
        self._problem = error.message
        # With no aliases in use, a failed read is not a fault: the store may have no aliases.json.
        # S3 answers 403 for a missing file if the server may not list the bucket.
        self.wrong = bool(self._aliases) or isinstance(error, SettingError)

    def _take(self, aliases: dict[str, Alias]) -> None:
        for name, alias in aliases.items():
            before = self._aliases.get(name)
            if before is not None and before.weights == alias.weights:
                aliases[name] = before
            elif before is not None:
                alias.requests |= {m: n for m, n in before.requests.items() if m in alias.weights}
        self._aliases, self._checked, self._of = aliases, not aliases, {}
        for name, alias in aliases.items():
            for model in alias.models:
                self._of.setdefault(model, []).append(name)

    async def _warn_of_unknown(self) -> None:
        """Warn, once per file, of models that the store lacks; they may be loaded by their url."""
        if self._checked or self._lookups is None:
            return
        self._checked = True
        try:
            stored = {model.name for model in await self._lookups.models()}
        except ServingError as error:  # a server that may not list its bucket needs no list
            logger.warning("the models of %s are not checked: %s", FILE, error.message)
            return
        unknown = [
            f"{model} ({alias.name})"
            for alias in self._aliases.values()
            for model in alias.models
            if model not in stored
        ]
        if unknown:
            logger.warning(
                "%s names %d models that the store does not have: %s",
                FILE, len(unknown), ", ".join(unknown[:MAX_SHOWN]),
            )  # fmt: skip


class _Pairs(list[tuple[str, Any]]):
    """The members of a JSON object as pairs, so that duplicate names can be rejected."""


def _write(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    else:
        write_whole(path, content)


def parse(content: bytes) -> dict[str, Alias]:
    """Parse the content of aliases.json into aliases by name. Raises `SettingError`."""
    try:
        if len(content) > MAX_BYTES:
            raise SettingError(f"it has more than {MAX_BYTES} bytes")
        pairs = parse_json(content, object_pairs_hook=_Pairs)
        if not isinstance(pairs, _Pairs):
            raise SettingError('it must be {"ALIAS": "MODEL" or {"MODEL": WEIGHT, ...}, ...}')
        aliases: dict[str, Alias] = {}
        for given, value in pairs:
            name = _name(given)
            if name in aliases:
                raise SettingError(f"{quoted(name)} is there twice, must be once")
            aliases[name] = Alias(name, _weights(name, value))
        for alias in aliases.values():
            if other := next((m for m in alias.models if m in aliases and m != alias.name), None):
                raise SettingError(
                    f"{quoted(alias.name)}: {quoted(other)} is an alias itself, must be a model"
                )
    except SettingError as error:
        raise SettingError(f"{FILE}: {error.message}") from None
    return aliases


def _weights(name: str, value: Any) -> dict[str, float]:
    """Parse the models of an alias into weights by model. Raises `SettingError`."""
    if isinstance(value, str):
        return {_name(value): 1}
    if not isinstance(value, _Pairs) or not 1 <= len(value) <= MAX_MODELS:
        raise SettingError(
            f"{quoted(name)} must be a model's name, or an object of 1 to {MAX_MODELS} of them,"
            " each with its weight"
        )
    weights: dict[str, float] = {}
    for given, weight in value:
        model = _name(given)
        if model in weights:
            raise SettingError(f"{quoted(name)} has {quoted(model)} twice")
        if type(weight) not in (int, float) or not 0 < weight <= MAX_WEIGHT:  # NaN is neither
            raise SettingError(
                f"{quoted(name)}: the weight of {quoted(model)} must be a number above 0 and at"
                f" most {MAX_WEIGHT}"
            )
        weights[model] = weight
    return weights


def _name(given: str) -> str:
    try:
        return model_name(given)
    except UrlNotAllowed as error:
        raise SettingError(error.message) from None
