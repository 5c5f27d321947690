"""Which Python file of a model's folder answers for it.

In this order: what the load request names, a Multi Model Server archive's manifest, what
`SAGEMAKER_HANDLER` and `SAGEMAKER_PROGRAM` name, `inference.py`; each in `code/` first, then beside
the model. The gateway has `SAGEMAKER_HANDLER` (serving.mms.worker_options): a worker's is our own.
SageMaker's SDK requires an entry point: one that says nothing is none.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ArtifactError
from common.model_files import MANIFEST, programs, script_paths

MAX_MANIFEST_BYTES = 1 << 20
MAX_EMPTY_BYTES = 65_536  # of licences and the like
NOTHING = re.compile(rb"\s*(#.*|from __future__ import [\w, ]+)?")


@dataclass(frozen=True)
class Script:
    """`root` is the model's folder, `file` the script in it; `manifest` is an archive's.

    `entry` is the function or class that the manifest or the load request names, if any.
    """

    root: Path
    file: Path
    entry: str | None = None
    manifest: dict[str, Any] | None = None
    # Whether Multi Model Server's own conventions hold, rather than SageMaker's.
    is_service: bool = False

    @property
    def folders(self) -> list[Path]:
        """Where its modules are looked for, the script's own folder first."""
        return list(dict.fromkeys((self.file.parent, self.root)))

    @property
    def requirements(self) -> Path | None:
        """`requirements.txt` beside the script or in `code/`."""
        for folder in (self.file.parent, self.root / "code"):
            if (folder / "requirements.txt").is_file():
                return folder / "requirements.txt"
        return None

    def spec(self, name: str, max_answer_bytes: int) -> dict[str, Any]:
        """What a process is told that runs it alone; `handlers.user_code.handler` knows more."""
        return {
            "root": str(self.root),
            "file": str(self.file),
            "entry": self.entry,
            "manifest": self.manifest,
            "is_service": self.is_service,
            "folders": [str(folder) for folder in self.folders],
            "packages": None,
            "name": name,
            "engine_name": name,
            "gpu_id": None,
            "batch_size": 1,
            "memory_mib": 0,
            "temporary": tempfile.gettempdir(),
            "confinement": None,
            "max_answer_bytes": max_answer_bytes,
        }


def find_script(
    model_dir: str | os.PathLike[str],
    handler: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Script | None:
    """None where the model brings no script. Raises `ArtifactError` for one that is not there."""
    root = _root(Path(model_dir))
    manifest = _manifest(root)
    named = handler or _handler_of(manifest)
    if named is not None:
        module, _, entry = named.partition(":")
        file = _first(root, script_paths(named, environment))
        if file is not None:
            return Script(root, file, entry or None, manifest, is_service=manifest is not None)
        raise ArtifactError(f"the handler is {named}, but the model has no file {module} in it")
    for program in programs(environment):
        file = _first(root, script_paths(program, environment))
        if file is not None:
            return None if _says_nothing(file) else Script(root, file)
    return None


def manifest_name(model_dir: str | os.PathLike[str]) -> str | None:
    """What an archive's manifest calls the model, if it does. Raises `ArtifactError`."""
    manifest = _manifest(_root(Path(model_dir)))
    name = manifest["model"].get("modelName") if manifest is not None else None
    return name if isinstance(name, str) and name else None


def _says_nothing(file: Path) -> bool:
    """Whether it has comments and imports from `__future__` at most."""
    with file.open("rb") as opened:
        source = opened.read(MAX_EMPTY_BYTES)
    lines = source.removeprefix(codecs.BOM_UTF8).splitlines()
    return len(source) < MAX_EMPTY_BYTES and all(map(NOTHING.fullmatch, lines))


def _root(folder: Path) -> Path:
    """The model's folder; `model-archiver --archive-format tgz` puts all of it one folder down."""
    if not (folder / MANIFEST).is_file() and folder.is_dir():
        inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
        if len(inside) == 1 and (inside[0] / MANIFEST).is_file():
            return inside[0]
    return folder


def _first(root: Path, paths: Iterable[str]) -> Path | None:
    """The first that is there, if it is in the model's folder."""
    for path in paths:
        file = Path(os.path.normpath(root / path))
        with contextlib.suppress(OSError):  # a name that the file system cannot have
            if file.is_relative_to(root) and file.is_file():
                return file
    return None


def _manifest(root: Path) -> dict[str, Any] | None:
    path = root / MANIFEST
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ArtifactError(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes")
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ArtifactError(f"{MANIFEST} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("model"), dict):
        raise ArtifactError(f'{MANIFEST} must be an object with "model" in it')
    return manifest


def _handler_of(manifest: dict[str, Any] | None) -> str | None:
    if manifest is None:
        return None
    named = manifest["model"].get("handler")
    if not isinstance(named, str) or not named:
        raise ArtifactError(f'{MANIFEST} names no handler: {{"model": {{"handler": "service"}}}}')
    return named
