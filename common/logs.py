"""Writes logs to stdout, as one JSON object per line."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

from common.errors import cut

# Characters that are valid in JSON, but that terminals and readers of lines interpret: controls,
# line ends, changes of the text's direction.
ODD = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, process, message, and `extra={"fields": {...}}`.

    Long texts are shortened: a line has a few kilobytes at most, tracebacks aside.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        created = time.gmtime(record.created)
        entry: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', created)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        entry = {k: cut(v) if isinstance(v, str) else v for k, v in entry.items()}
        if record.exc_info:
            lines = self.formatException(record.exc_info).split("\n")
            entry["traceback"] = "\n".join(cut(line) for line in lines)
        text = json.dumps(entry, ensure_ascii=False)
        text = ODD.sub(lambda odd: f"\\u{ord(odd[0]):04x}", text)
        return text.encode("utf-8", "backslashreplace").decode()  # file names may be no UTF-8


def log_as_json(process: str) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
