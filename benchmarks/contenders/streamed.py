"""A request over HTTP whose tokens are timed as they come: llama.cpp's server and ours."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.process import BenchmarkError
from benchmarks.server import CALL_S, HEADERS


class Streamed:
    """To its end. Raises `BenchmarkError`."""

    def __init__(self, port: int, path: str, body: Mapping[str, Any]) -> None:
        self.ids: list[int] = []
        self.tokens = 0
        begun: dict[int, float] = {}
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_S)
        connection.request("POST", path, json.dumps(body).encode(), HEADERS)
        answer = connection.getresponse()
        if answer.status != 200:
            raise BenchmarkError(f"{path} answered {answer.status}: {answer.read()[:300]!r}")
        for line in answer:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            # One that ends an answer has it whole, or an empty list.
            ids = [event["token"]] if "token" in event else event.get("tokens")
            if isinstance(ids, list) and ids and not event.get("stop"):
                begun.setdefault(event["index"], time.perf_counter() - began)
                self.tokens += len(ids)
                self.ids += ids if event["index"] == 0 else []
        connection.close()
        if not begun:
            raise BenchmarkError(f"{path} made no token")
        self.first_s, self.all_begun_s = min(begun.values()), max(begun.values())
