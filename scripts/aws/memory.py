"""Estimates a model's kind and engine memory from the beginning of its archive in S3."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.model_files import ADAPTER, DELTA, PARAMS
from scripts.aws.account import Account
from scripts.aws.locations import Artifact, Location

if TYPE_CHECKING:
    from engine.artifacts.config import GPT2Config

CONFIG = "config.json"
# Bytes read of an archive; kogpt2 package writes config.json before the weights.
HEAD_BYTES = 256 << 10
ADAPTER_BYTES = 64 << 20  # a larger archive of an adapter counts as a whole model
READS_AT_ONCE = 10  # boto3's connections
MOST_READ = 20  # archives read in search of a text model
# Bytes of weights per byte of archive, for models that are not the engine's: gzip takes 8% off.
UNPACKED = 1.1


@dataclass(frozen=True)
class Needs:
    """Bytes of the engine's budget: for weights, and for the K/V of a request of full context."""

    weights: int
    row: int


def all_needs(
    account: Account, location: Location, artifacts: list[Artifact], precision: str
) -> list[Needs]:
    """Estimate the bytes that each model needs in this precision, as the engine counts them."""

    def needs(artifact: Artifact) -> Needs:
        files = first_files(begin(account, location, artifact))
        if ADAPTER in files and artifact.size_bytes <= ADAPTER_BYTES:
            whole = first_files(begin(account, location, artifact, ADAPTER_BYTES))
            adapter = _of_adapter(whole, precision)
            if adapter is not None:
                return adapter
        return of_model(files, artifact.size_bytes, precision)

    account.client("s3")  # made once, before the threads
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        return list(pool.map(needs, artifacts))


def text_model(account: Account, location: Location, models: list[Artifact]) -> Artifact | None:
    """Return a small model that answers prompts and has no script or base; None if not found."""
    callable_ones = [model for model in models if model.name.isascii()]  # others cannot be called
    for artifact in sorted(callable_ones, key=lambda model: model.size_bytes)[:MOST_READ]:
        files = first_files(begin(account, location, artifact))
        weights = CONFIG in files or any(name.endswith(PARAMS) for name in files)
        needs_base = ADAPTER in files or DELTA in files
        if weights and not needs_base and not any(name.endswith(".py") for name in files):
            return artifact
    return None


def begin(
    account: Account, location: Location, artifact: Artifact, most: int = HEAD_BYTES
) -> bytes:
    """Read the first bytes of an archive in S3, at most `most`."""
    if not artifact.size_bytes:  # S3 refuses a range of nothing
        return b""
    answer = account.client("s3").get_object(
        Bucket=location.bucket, Key=location.key + artifact.name, Range=f"bytes=0-{most - 1}"
    )
    data: bytes = answer["Body"].read()
    return data


def first_files(archive: bytes) -> dict[str, bytes]:
    """List the files in the beginning of a `.tar.gz`; only those with sizes have contents."""
    files = {}
    cut_off = (tarfile.TarError, EOFError, OSError, zlib.error)
    with (
        contextlib.suppress(*cut_off),
        tarfile.open(fileobj=io.BytesIO(archive), mode="r|gz") as tar,
    ):
        for member in tar:
            name = member.name.removeprefix("./")
            read = name == CONFIG or name.startswith("adapter_")
            content = tar.extractfile(member) if read else None
            files[name] = b"" if content is None else content.read(ADAPTER_BYTES)
    return files


def of_model(files: Mapping[str, bytes], archive_bytes: int, precision: str) -> Needs:
    """Estimate, from the first files of its archive, the memory that a model or delta needs."""
    from engine import backends
    from engine.artifacts.config import KOGPT2

    is_v1 = any(name.endswith(PARAMS) for name in files)
    config = _config(files.get(CONFIG, b""), is_v1)
    if config is None and (ADAPTER in files or DELTA in files or is_v1):
        config = KOGPT2  # the release for MXNet has no config.json
    if config is None:  # tensors or a script: a worker process holds the weights as they are
        return Needs(int(archive_bytes * UNPACKED), 0)
    weights = backends.weight_bytes(config, precision, "cpu")
    if DELTA in files:
        weights = int(archive_bytes * UNPACKED)
    return Needs(weights, backends.row_bytes(config, precision))


def _config(content: bytes, is_v1: bool) -> GPT2Config | None:
    """Parse the sizes in KoGPT2's or Hugging Face's `config.json`; None if any is missing."""
    from common.errors import ArtifactError
    from engine.artifacts.artifact import SIZES, V1_NAMES, ConfigFile
    from engine.artifacts.config import GPT2Config
    from engine.artifacts.hugging_face import NAMES

    try:
        given = ConfigFile(json.loads(content), V1_NAMES if is_v1 else NAMES)
        sizes = {size: given.get(size, None)[1] for size in SIZES}
        sizes["hidden_size"] = sizes["hidden_size"] or 4 * sizes["units"]
        sizes["max_length"] = sizes["max_length"] or 1024
        if not all(type(size) is int and size > 0 for size in sizes.values()):
            return None
        return GPT2Config(**sizes, tie_word_embeddings=given.flag("tie_word_embeddings", True))
    except (ValueError, TypeError, AttributeError, ArtifactError):
        return None


def _of_adapter(files: Mapping[str, bytes], precision: str) -> Needs | None:
    """Return the bytes of an adapter's matrices; None if it needs as much as a whole model."""
    from common.errors import ArtifactError
    from engine import backends
    from engine.artifacts import adapter as adapters
    from engine.artifacts.config import KOGPT2
    from engine.native.adapter import num_bytes

    with tempfile.TemporaryDirectory() as folder:
        for name in {ADAPTER, *adapters.WEIGHT_FILES} & files.keys():
            Path(folder, name).write_bytes(files[name])
        try:
            adapter = adapters.read(Path(folder))
        except ArtifactError:
            return None
        if not adapter.is_thin:  # the engine merges it into a copy of its base
            return None
        return Needs(num_bytes(adapter, precision), backends.row_bytes(KOGPT2, precision))
