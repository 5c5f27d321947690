"""Runs a script with the project's own Python, .venv, whichever one it was started with."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("mxnet", "sentencepiece", "tokenizers", "onnxruntime", "boto3", "tqdm")


def use_project_environment(script: str) -> None:
    """Starts the script again with .venv's Python where this one lacks a package."""
    if all(map(importlib.util.find_spec, NEEDED)):
        return
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists() or Path(sys.prefix) == python.parent.parent:
        message = "packages are missing: run ./scripts/test or ./scripts/serve once first"
        print(f"{script}: {message}", file=sys.stderr)
        sys.exit(2)
    os.execv(python, [str(python), *sys.argv])  # noqa: S606
