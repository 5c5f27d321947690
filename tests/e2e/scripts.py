"""Models that are a script, for tests."""

from __future__ import annotations

import textwrap
from pathlib import Path


def script(folder: Path, source: str, path: str = "inference.py") -> Path:
    """A model of this one file; returns the model's folder."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    return folder


def transform(folder: Path, body: str, *, load: str = "return {}", top: str = "") -> Path:
    """A model with `model_fn` and `transform_fn(model, body, content_type, accept)` of these."""
    parts = [
        textwrap.dedent(top),
        "def model_fn(model_dir):\n" + textwrap.indent(textwrap.dedent(load), "    "),
        "def transform_fn(model, body, content_type, accept):\n"
        + textwrap.indent(textwrap.dedent(body), "    "),
    ]
    return script(folder, "\n\n".join(parts) + "\n")
