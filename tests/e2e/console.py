"""The sessions that documents show."""

from __future__ import annotations

import re
from pathlib import Path


def session(document: Path) -> list[tuple[str, str]]:
    """(command, shown output) of every `$ ` line in the console blocks."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", document.read_text("utf-8"), re.DOTALL):
        for part in ("\n" + block).split("\n$ ")[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found
