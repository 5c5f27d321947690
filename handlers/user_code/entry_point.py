"""Finds the Python file that serves a model: its entry point.

It is the first of: the handler in the load request, in a Multi Model Server archive's manifest, in
`SAGEMAKER_HANDLER` and `SAGEMAKER_PROGRAM`, and `inference.py`; each in `code/`, then beside the
model. `SAGEMAKER_HANDLER` is the gateway's (serving.mms.worker_options): in a worker it names
`handlers.handler_service`. A file without code is no entry point: SageMaker's SDK requires one.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ArtifactError, InvalidRequest
from common.json_body import read_json
from common.model_files import MANIFEST, programs, script_paths, visible

MAX_MANIFEST_BYTES = 1 << 20
MAX_COMMENT_BYTES = 65_536  # a larger file of comments counts as code
NO_CODE = re.compile(rb"\s*(#.*|from __future__ import [\w, ]+)?")


@dataclass(frozen=True)
class Script:
    """A model's script: `file` in the model's folder `root`; `manifest` is an MMS archive's.

    `entry` is the function or class that the manifest or the load request names, if any.
    `is_service`: the script follows Multi Model Server's conventions rather than SageMaker's.
    """

    root: Path
    file: Path
    entry: str | None = None
    manifest: dict[str, Any] | None = None
    is_service: bool = False

    @property
    def folders(self) -> list[Path]:
        """Folders for `sys.path`, the script's own first."""
        return list(dict.fromkeys((self.file.parent, self.root)))

    @property
    def requirements(self) -> Path | None:
        """The path of `requirements.txt` beside the script or in `code/`, if there is one."""
        folders = (self.file.parent, self.root / "code")
        files = (folder / "requirements.txt" for folder in folders)
        return next(filter(Path.is_file, files), None)

    def spec(self, name: str) -> dict[str, Any]:
        """Return the JSON object by which `handlers.user_code.child` loads the script."""
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
        }


def find_script(
    model_dir: str | os.PathLike[str],
    handler: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Script | None:
    """Find the model's entry point, or None. Raises `ArtifactError` if its handler is missing."""
    root = _root(Path(model_dir))
    manifest = _manifest(root)
    name = handler or _handler_of(manifest)
    if name is not None:
        module, _, entry = name.partition(":")
        file = _first(root, script_paths(name, environment))
        if file is not None:
            return Script(root, file, entry or None, manifest, is_service=manifest is not None)
        raise ArtifactError(f"the handler is {name}, but the model has no file {module} in it")
    for program in programs(environment):
        file = _first(root, script_paths(program, environment))
        if file is not None:
            return None if _has_no_code(file) else Script(root, file)
    return None


def manifest_name(model_dir: str | os.PathLike[str]) -> str | None:
    """Read the model's name in an archive's manifest, or None. Raises `ArtifactError`."""
    manifest = _manifest(_root(Path(model_dir)))
    name = manifest["model"].get("modelName") if manifest is not None else None
    return name if isinstance(name, str) and name else None


def _has_no_code(file: Path) -> bool:
    """Return whether a file has only comments, blank lines and imports from `__future__`."""
    with file.open("rb") as opened:
        source = opened.read(MAX_COMMENT_BYTES)
    lines = source.removeprefix(codecs.BOM_UTF8).splitlines()
    return len(source) < MAX_COMMENT_BYTES and all(map(NO_CODE.fullmatch, lines))


def _root(folder: Path) -> Path:
    """Find the model's folder: `folder`, or the subfolder that `model-archiver` writes for tgz."""
    if not (folder / MANIFEST).is_file() and folder.is_dir():
        inside = visible(folder)
        if len(inside) == 1 and (inside[0] / MANIFEST).is_file():
            return inside[0]
    return folder


def _first(root: Path, paths: Iterable[str]) -> Path | None:
    """Find the first of `paths` that is a file inside `root`."""
    for path in paths:
        file = Path(os.path.normpath(root / path))
        with contextlib.suppress(OSError):  # a name that the file system does not allow
            if file.is_relative_to(root) and file.is_file():
                return file
    return None


def _manifest(root: Path) -> dict[str, Any] | None:
    path = root / MANIFEST
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ArtifactError(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes, the limit")
        manifest = read_json(path.read_bytes(), source=MANIFEST)
    except InvalidRequest as error:
        raise ArtifactError(error.message) from None
    except OSError as error:
        raise ArtifactError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("model"), dict):
        raise ArtifactError(f'{MANIFEST} must be an object with "model" in it')
    return manifest


def _handler_of(manifest: dict[str, Any] | None) -> str | None:
    if manifest is None:
        return None
    handler = manifest["model"].get("handler")
    if not isinstance(handler, str) or not handler:
        raise ArtifactError(
            f'{MANIFEST} names no handler, must be like {{"model": {{"handler": "service"}}}}'
        )
    return handler
