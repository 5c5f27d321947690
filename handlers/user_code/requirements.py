"""Installs a model's `requirements.txt` into a folder of that model."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from common.errors import ArtifactError, DeadlineExceeded
from handlers.model_spec import ModelSpec
from handlers.settings import Settings
from handlers.user_code import descendants
from handlers.user_code.confinement.rules import Confinement, pip_environment
from handlers.user_code.entry_point import Script

logger = logging.getLogger(__name__)

PACKAGES, TEMPORARY = "packages", "temporary"
DONE = "packages.installed"
# Of pip's output, from its end: a package's build may print any amount, and a line of two bytes
# takes some 200 in the log.
MAX_LOG_BYTES, MAX_LOG_LINES = 65_536, 300
OUTPUT_TIMEOUT_S = 5.0  # for reading the rest after pip's end; its processes are killed before
PROGRAM = Path(__file__).with_name("pip_child.py")


def install(
    script: Script, spec: ModelSpec, settings: Settings, confinement: Confinement | None
) -> str | None:
    """Return the folder with the packages; None without `requirements.txt`.

    Raises `ArtifactError`, or `DeadlineExceeded` after `LOAD_TIMEOUT_S`.
    """
    file = script.requirements
    if file is None:
        return None
    shown = file.relative_to(script.root)
    if not settings.allow_model_requirements:
        raise ArtifactError(
            f"the model brings {shown}, and this server installs no packages for models: set"
            " ALLOW_MODEL_REQUIREMENTS=true, or build an image with these packages and remove the"
            " file"
        )
    folder, done = Path(spec.folder) / PACKAGES, Path(spec.folder) / DONE
    if not done.exists():
        folder.mkdir(exist_ok=True)
        if confinement is not None:
            if confinement.uid is not None:
                os.chown(folder, confinement.uid, confinement.uid)
            write = [*confinement.write, str(folder)]
            confinement = replace(confinement, write=write, network=True, shared_memory=True)
        _pip(file, str(shown), folder, settings.load_timeout_s, confinement)
        done.touch()
    return str(folder)


def _pip(
    file: Path, shown: str, folder: Path, timeout_s: float, confinement: Confinement | None
) -> None:
    confined = json.dumps(confinement and asdict(confinement))
    command = [sys.executable, str(PROGRAM), str(os.getpid()), confined]
    command += ["install", "--no-input", "--quiet", "--disable-pip-version-check"]
    command += ["--target", str(folder), "-r", str(file)]
    process = descendants.start(
        command,
        env=pip_environment(str(folder.parent / TEMPORARY)),
        cwd=file.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = bytearray()
    assert process.stdout is not None
    reader = threading.Thread(target=_keep_end, args=(process.stdout, output), daemon=True)
    try:
        reader.start()
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(
            f"{shown} was not installed within {timeout_s:g} s (LOAD_TIMEOUT_S)"
        ) from None
    finally:
        descendants.end(process)
    reader.join(OUTPUT_TIMEOUT_S)
    if process.returncode != 0:
        lines, reason = failure(bytes(output))
        for line in lines:
            logger.error("pip: %s", line)
        raise ArtifactError(f"{shown} could not be installed: {reason}")


def failure(output: bytes) -> tuple[list[str], str]:
    """Return the last lines of pip's output, for the log, and the last error, for the client."""
    log = output.decode("utf-8", "replace")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "ERROR" in line), "pip failed")
    return lines[-MAX_LOG_LINES:], reason[:300]


def _keep_end(stream: IO[bytes], output: bytearray) -> None:
    """Read a stream to its end; keep the last `MAX_LOG_BYTES` in `output`."""
    with stream:
        while chunk := os.read(stream.fileno(), MAX_LOG_BYTES):
            output += chunk
            del output[:-MAX_LOG_BYTES]
