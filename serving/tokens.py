"""The tokens of `TOKENS_FILE`: the models that each may call, and its limits.

{"tokens": [{"name", "sha256", "models": [patterns], "load"?, "requests_per_minute"?,
             "concurrency"?}]}

docs/reference/settings.md describes the fields. `serving.api.access.check_token` applies them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import re
import time
import unicodedata
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import SettingError, quoted
from serving.errors import Forbidden, TooManyRequests
from serving.json_file import parse_json
from serving.names import normal_name

logger = logging.getLogger(__name__)

CHECK_S = 1.0  # poll interval for changes of the file
MAX_NAME = 100  # characters
REFUSALS = ("model", "load", "rate", "concurrency")
REQUIRED = {"name", "sha256", "models"}
FIELDS = REQUIRED | {"load", "requests_per_minute", "concurrency"}
SHA256 = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)


@dataclass
class Usage:
    """Counters of one token since the gateway's start. A reload of the file preserves them."""

    in_flight: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REFUSALS, 0))
    allowance: float = math.inf  # requests in the token bucket at the time `allowance_at`
    allowance_at: float = 0.0

    def count(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens


@dataclass(frozen=True)
class Token:
    """A token of the file; `requests_per_minute` and `concurrency` are None if unlimited."""

    name: str
    models: frozenset[str]
    prefixes: tuple[str, ...]  # of allowed names, from patterns that end with `*`
    load: bool
    requests_per_minute: int | None
    concurrency: int | None
    usage: Usage

    def begin(self, now: float) -> None:
        """Count a request against the limits. `end` must be called when the request ends.

        `requests_per_minute` is also the burst size: the token bucket holds a minute's requests.
        Raises `TooManyRequests`.
        """
        usage = self.usage
        usage.requests += 1
        if self.concurrency is not None and usage.in_flight >= self.concurrency:
            usage.refused["concurrency"] += 1
            raise TooManyRequests(
                f"{self.name} may have {self.concurrency} requests in flight", retry_after_s=1
            )
        if self.requests_per_minute is not None:
            per_s = self.requests_per_minute / 60
            refilled = usage.allowance + (now - usage.allowance_at) * per_s
            usage.allowance, usage.allowance_at = min(refilled, self.requests_per_minute), now
            if usage.allowance < 1:
                usage.refused["rate"] += 1
                raise TooManyRequests(
                    f"{self.name} may send {self.requests_per_minute} requests a minute",
                    retry_after_s=(1 - usage.allowance) / per_s,
                )
            usage.allowance -= 1
        usage.in_flight += 1

    def end(self) -> None:
        self.usage.in_flight -= 1

    def may_call(self, model: str) -> bool:
        return model in self.models or model.startswith(self.prefixes)

    def check_model(self, model: str) -> None:
        """Raise `Forbidden` for a model that no pattern matches."""
        if not self.may_call(model):
            self.usage.refused["model"] += 1
            raise Forbidden(f"{self.name} may not use model {model[:200]}")

    def check_base(self, base: str) -> None:
        """Raise `Forbidden`, without the name, for a model's base that no pattern matches."""
        if not self.may_call(base):
            self.usage.refused["model"] += 1
            raise Forbidden(f"{self.name} may not use the base of this model")

    def check_load(self) -> None:
        """Raise `Forbidden` if the token may not load and unload models."""
        if not self.load:
            self.usage.refused["load"] += 1
            raise Forbidden(f"{self.name} may not load or unload models")


# The token of the current request. Prompt and completion tokens of the engine are counted for it.
current: ContextVar[Token | None] = ContextVar("current", default=None)


class Tokens:
    """The table of tokens, read again when TOKENS_FILE changes."""

    def __init__(self, path: str) -> None:
        """Create an empty table, which `refresh` fills. `path` is TOKENS_FILE, or empty."""
        self.now: Callable[[], float] = time.monotonic
        self._path = Path(path) if path else None
        self._tokens: Mapping[str, Token] = {}  # by the SHA-256 of each, in hex
        self.version: object = ()  # result of `_version` at the last read of the file

    @property
    def exist(self) -> bool:
        """True if TOKENS_FILE is set; then each request needs a token."""
        return self._path is not None

    def all(self) -> list[Token]:
        return list(self._tokens.values())

    def find(self, sent: bytes) -> Token | None:
        """Return the token of a request, None if it is unknown.

        The time of the lookup can reveal a part of a hash at most, but not the token.
        """
        return self._tokens.get(hashlib.sha256(sent).hexdigest())

    async def watch(self) -> None:
        """Read the file again after each change, until it is cancelled."""
        while self._path is not None:
            await asyncio.sleep(CHECK_S)
            with contextlib.suppress(RuntimeError):  # no thread can be started: poll again later
                await self.refresh()

    async def refresh(self) -> None:
        """Read the file again if it has changed.

        If it is invalid, the tokens stay as they are and the error is logged once.
        """
        if self._path is None:
            return
        version = await asyncio.to_thread(_version, self._path)
        if version == self.version:
            return
        usages = {token.name: token.usage for token in self._tokens.values()}
        try:
            self._tokens = await asyncio.to_thread(read, self._path, usages)
        except SettingError as error:
            logger.error("%s; the %d tokens before stay", error.message, len(self._tokens))
        else:
            logger.info("TOKENS_FILE has %d tokens", len(self._tokens))
        self.version = version


def _version(path: Path) -> object:
    """Return modification time, size and inode of a file, to detect changes; None on error."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def read(path: Path, usages: Mapping[str, Usage] | None = None) -> dict[str, Token]:
    """Read a file of tokens; return them by their SHA-256 in hex.

    usages: counters of the previous tokens, by name
    Raises `SettingError`. Its message contains no sha256 value: it may be a token by mistake.
    """
    usages = usages or {}
    try:
        value = parse_json(path.read_bytes())
        if not isinstance(value, dict) or set(value) != {"tokens"}:
            raise SettingError('it must be {"tokens": [...]}')
        if not isinstance(value["tokens"], list):
            raise SettingError("tokens must be a list")
        tokens: dict[str, Token] = {}
        names: set[str] = set()
        for i, entry in enumerate(value["tokens"]):
            hash_, token = _token(f"tokens[{i}]", entry, usages)
            if token.name in names:
                raise SettingError(f"tokens[{i}]: another one has the name {quoted(token.name)}")
            if hash_ in tokens:
                raise SettingError(f"tokens[{i}]: {quoted(tokens[hash_].name)} has the same sha256")
            names.add(token.name)
            tokens[hash_] = token
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise SettingError(f"TOKENS_FILE {path}: {reason}") from None
    except SettingError as error:
        raise SettingError(f"TOKENS_FILE {path}: {error.message}") from None
    return tokens


def _token(where: str, entry: Any, usages: Mapping[str, Usage]) -> tuple[str, Token]:
    """Parse an entry of the file into the token's hash and the token. Raises `SettingError`."""
    if not isinstance(entry, dict):
        raise SettingError(f"{where} must be an object")
    if unknown := sorted(set(entry) - FIELDS):
        raise SettingError(
            f"{where}: {quoted(unknown[0])} is not known; known are {', '.join(sorted(FIELDS))}"
        )
    if missing := sorted(REQUIRED - set(entry)):
        raise SettingError(f"{where}: {missing[0]} is missing")
    name, hash_, models = entry["name"], entry["sha256"], entry["models"]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise SettingError(f"{where}: name must be printable text of at most {MAX_NAME} characters")
    if not isinstance(hash_, str) or not SHA256.fullmatch(hash_):
        raise SettingError(f"{where}: sha256 must be the 64 hex digits of the token's SHA-256")
    if not isinstance(models, list) or not all(isinstance(m, str) and m for m in models):
        raise SettingError(f"{where}: models must be a list of names")
    if inner := next((m for m in models if "*" in m[:-1]), None):
        raise SettingError(f"{where}: {quoted(inner)} has a * that is not at its end")
    load = entry.get("load", False)
    if not isinstance(load, bool):
        raise SettingError(f"{where}: load must be true or false")
    for limit in ("requests_per_minute", "concurrency"):
        number = entry.get(limit)
        if number is not None and (type(number) is not int or not 1 <= number < 1_000_000_000):
            raise SettingError(f"{where}: {limit} must be a whole number, at least 1")
    name = unicodedata.normalize("NFC", name)
    token = Token(
        name=name,
        models=frozenset(normal_name(m) for m in models if not m.endswith("*")),
        # In NFC only: without its suffix, `team.mar*` would allow `teammates`, too.
        prefixes=tuple(unicodedata.normalize("NFC", m[:-1]) for m in models if m.endswith("*")),
        load=load,
        requests_per_minute=entry.get("requests_per_minute"),
        concurrency=entry.get("concurrency"),
        usage=usages.get(name) or Usage(),
    )
    return hash_.lower(), token
