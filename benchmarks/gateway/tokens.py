"""Measure what a check of a token costs among 10,000 tokens of TOKENS_FILE.

python -m benchmarks.gateway.tokens
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request

from serving.aliases import Aliases
from serving.api.naming import name_model
from serving.api.shared import Right, check_token
from serving.settings import Settings
from serving.tokens import Tokens

TOKENS, PATTERNS = 10_000, 4
RUNS = 5


def check(gateway: Any, request: Request, name: str) -> None:
    """All that a token costs a request."""
    check_token(gateway, request, Right.CALL)
    name_model(gateway, request, name)
    request.state.token.end()


def request_with(token: str) -> Request:
    scope = {
        "type": "http",
        "headers": [
            (b"host", b"localhost:8080"),
            (b"authorization", f"Bearer {token}".encode()),
            (b"content-type", b"application/json"),
        ],
        "state": {"token": None, "token_name": None, "model": None},
    }
    return Request(scope)


def microseconds(gateway: Any, given: Sequence[tuple[Request, str]]) -> float:
    """The mean of a check."""
    begin = time.perf_counter()
    for request, name in given:
        check(gateway, request, name)
    return (time.perf_counter() - begin) / len(given) * 1e6


def main() -> None:
    sent = [secrets.token_urlsafe(32) for _ in range(TOKENS)]
    entries = [
        {
            "name": f"팀-{i}",
            "sha256": hashlib.sha256(token.encode()).hexdigest(),
            "models": [f"팀-{i}/{kind}*" for kind in range(PATTERNS)],
            "requests_per_minute": 1_000_000,
            "concurrency": 8,
        }
        for i, token in enumerate(sent)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.json")
        path.write_text(json.dumps({"tokens": entries}))
        parts = {"tokens": Tokens(str(path)), "aliases": Aliases()}
        gateway = SimpleNamespace(settings=Settings(), **parts)
        begin = time.perf_counter()
        asyncio.run(gateway.tokens.refresh())
        read_s = time.perf_counter() - begin
    runs = []
    for _ in range(RUNS):
        order = random.sample(range(TOKENS), TOKENS)
        given = [(request_with(sent[i]), f"팀-{i}/{PATTERNS - 1}-봄") for i in order]
        runs.append(microseconds(gateway, given))
    print(f"{TOKENS} tokens of {PATTERNS} patterns each, read in {read_s:.2f} s on a thread")
    print(f"a check: {statistics.median(runs):.1f} us")


if __name__ == "__main__":
    main()
