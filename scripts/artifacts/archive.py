"""Checks a model's folder as the server does, and packs it for the store and SageMaker."""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm.utils import CallbackIOWrapper

from command.documents import check_writable
from command.errors import Problem
from common.errors import EngineError, ServiceError
from common.model_files import BASE_NAME, is_adapter, is_delta
from engine.artifacts import adapter as adapters
from engine.artifacts.artifact import CONFIG_FILE, Artifact
from engine.artifacts.files import read_json
from engine.artifacts.open import open_artifact
from engine.native.delta_folder import read_folder
from engine.prepared.folder import MODEL
from engine.prepared.folder import NAME as PREPARED
from engine.prepared.manifest import content_of
from engine.text.prompts import Prompts
from handlers.dispatch import handler_for
from handlers.user_code.entry_point import Script
from scripts.artifacts.folder import belongs
from serving.models.model_settings import ModelSettings
from serving.settings import Settings
from serving.store.archive_limits import MAX_FILES

SUFFIX = ".tar.gz"
# gzip's level: 6 takes five times as long, and weights hardly shrink at any.
COMPRESSION = 1


@dataclass(frozen=True)
class Checked:
    """A folder that the server would load, a summary for the user, and the files to pack."""

    folder: Path
    summary: str
    files: tuple[Path, ...]
    in_int8: Artifact | None = None  # a model that the server computes in int8 unless configured

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def check(folder: Path) -> Checked:
    """Check what the server checks before it loads a model. Raises `Problem`."""
    if not folder.is_dir():
        raise Problem(f"there is no folder {folder}")
    files = tuple(_files(folder))
    total = sum(file.stat().st_size for file in files)
    if len(files) > MAX_FILES or total > Settings.model_max_mib << 20:
        raise Problem(
            f"{folder} has {len(files)} files and {total >> 20} MiB; the server unpacks at most"
            f" {MAX_FILES} files and {Settings.model_max_mib} MiB (MODEL_MAX_MIB)"
        )
    in_int8 = None
    try:
        precision = ModelSettings.read(folder).precision
        handler = handler_for(str(folder))
        if isinstance(handler, Script):  # scripts are never run here
            summary = "the model's own script"
        elif not handler.IN_ENGINE:
            summary = _check_tensors(handler, folder)
        elif is_adapter(folder):
            summary = _check_adapter(folder)
        elif is_delta(folder):
            summary = _check_delta(folder)
        else:
            artifact = open_artifact(folder)
            summary = _check_model(artifact)
            if artifact.classifier is None and precision in (None, "int8"):
                in_int8 = artifact
    except (EngineError, ServiceError) as error:
        raise Problem(f"{folder} cannot be served: {error.message}") from None
    return Checked(folder, summary, files, in_int8)


def _check_model(artifact: Artifact) -> str:
    content_of(artifact)  # raises for NaN or infinity
    prompts = Prompts(artifact)
    c = artifact.config
    template = "" if artifact.generation.template is None else ", with a template"
    return (
        f"{c.num_layers} layers, {c.units} units, {c.num_heads} heads, context {c.max_length},"
        f" vocabulary {c.vocab_size} ({artifact.tokenizer_file.name},"
        f" {prompts.tokenizer.vocab_size} pieces), {c.num_parameters:,} parameters in"
        f" {', '.join(file.name for file in artifact.weight_files)}{template}{_labels(artifact)}"
    )


def _labels(artifact: Artifact | adapters.Adapter) -> str:
    """Describe the labels of a classifier."""
    classifier = artifact.classifier
    if classifier is None:
        return ""
    named = ", ".join(classifier.labels[:5]) + (", ..." if len(classifier.labels) > 5 else "")
    what = "tokens" if classifier.of_tokens else "texts"
    return f"; a classifier of {what} with {len(classifier.labels)} labels: {named}"


def _check_adapter(folder: Path) -> str:
    """Check an adapter without its base; return its rank, layers and base's name."""
    adapter = adapters.read(folder)
    content_of(adapter)
    ranks = sorted({t.shape[0] for name, t in adapter.index.items() if name.endswith(".down")})
    layers = {name.partition(".")[0] for name in adapter.scales}
    products = sorted({name.partition(".")[2] for name in adapter.scales})
    base = adapter.base or "a base that it does not name"
    return (
        f"an adapter of {base}: rank {', '.join(map(str, ranks))} on {', '.join(products)} of"
        f" {len(layers)} layers{_labels(adapter)}"
    )


def _check_delta(folder: Path) -> str:
    """Check a delta without its base; return its size, parameters and base's name."""
    delta = read_folder(folder)
    Prompts(delta.described)
    base = read_json(folder / CONFIG_FILE).get(BASE_NAME) or "a base that it does not name"
    parameters = delta.described.config.num_parameters
    size = f"{delta.num_bytes / 1e6:.1f} MB for {parameters:,} parameters"
    return f"a delta of {base}: {size}{_labels(delta.described)}"


def _check_tensors(handler: Any, folder: Path) -> str:
    """Load the model as its worker would; return its platform, inputs and outputs."""
    metadata = handler.describe(handler.model_fn(str(folder)))
    sides = [
        ", ".join(f"{t['name']} {t['datatype']} {t['shape']}" for t in metadata[side])
        for side in ("inputs", "outputs")
    ]
    return f"{metadata['platform']}, {' -> '.join(sides)}"


def _files(folder: Path) -> Iterator[Path]:
    """Yield the model's files, sorted by name, those of prepared models last.

    This puts config.json in the first bytes of an archive, where `kogpt2 deploy` reads it.
    """
    for entry in sorted(folder.iterdir(), key=lambda path: (path.name == PREPARED, path.name)):
        try:
            entry.name.encode("utf-8")
        except UnicodeEncodeError:
            raise Problem(
                f"{folder} holds a file whose name is not UTF-8: {entry.name!a}"
            ) from None
        if entry.name == PREPARED and entry.is_dir() and not entry.is_symlink():
            models = sorted(entry.glob("*" + MODEL))
            yield from (file for file in models if file.is_file() and not file.is_symlink())
            continue
        if not belongs(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _files(entry)
            continue
        try:
            mode = entry.stat().st_mode
        except OSError as error:
            raise Problem(f"{entry} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(mode):
            raise Problem(f"{entry} is not a regular file, and only those can be packed")
        yield entry


def check_target(target: Path) -> None:
    """Raise `Problem` unless `target` can be written as a new archive."""
    if not target.name.endswith(SUFFIX) or target.name == SUFFIX:
        raise Problem(f"{target} must be called NAME{SUFFIX}")
    if target.exists():
        raise Problem(f"{target} exists: remove it or choose another name")
    check_writable(target)


def write_archive(
    checked: Checked, target: Path, progress: Callable[[int], object] = lambda size: None
) -> None:
    """Write `target`, NAME.tar.gz, atomically; the same files give the same bytes.

    `progress` is called with bytes read. Raises `Problem` if the file exists.
    """
    check_target(target)
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.") as file:
            write_tar(checked.folder, checked.files, file, progress)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.link(file.name, target)  # fails if it exists by now
    except FileExistsError:
        raise Problem(f"{target} exists: remove it or choose another name") from None
    except OSError as error:
        raise Problem(f"cannot write {target}: {error.strerror}") from None


def write_tar(
    folder: Path,
    files: Iterable[Path],
    target: IO[bytes],
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    with (
        gzip.GzipFile("", "wb", COMPRESSION, target, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in files:
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            status = path.stat()
            member.size = status.st_size
            member.mode = 0o755 if status.st_mode & 0o100 else 0o644
            with path.open("rb") as file:
                tar.addfile(member, CallbackIOWrapper(progress, file))
