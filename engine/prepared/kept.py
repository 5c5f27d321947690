"""Finds a prepared model in its folder, or has it built there; whatever form it has."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from common.errors import OutOfMemory
from common.memory import MIB
from engine.artifacts.artifact import Artifact
from engine.prepared.entries import MALFORMED
from engine.prepared.folder import cache_folder, remove_abandoned
from engine.prepared.manifest import NICENESS, Run, to_manifest
from engine.prepared.prune import in_use
from engine.sandbox import Limits

# To build: libraries and threads, and the weights as given, quantized, packed and written.
BUILD_MIB, BUILD_TIMES_FP32 = 1024, 3
BUILD_CPU_S, BUILD_BYTES_PER_CPU_S = 60, 10 * MIB

Prepared = TypeVar("Prepared")

logger = logging.getLogger(__name__)


@contextmanager
def kept(
    artifact: Artifact,
    key: str,
    cache_dir: Path | None,
    read: Callable[[Path], Prepared],
    build: Callable[[Path], str | None],
) -> Iterator[Prepared]:
    """What `read` makes of the key's entry; if it raises one of `MALFORMED`, `build` is called
    before, which says what is wrong with a folder, if it is that.

    The folder is `cache_dir` or `.prepared` in the artifact's. Where it cannot be written, the
    model is built in a temporary one, which is gone after the `with` (what has mapped its files
    remains usable). Raises `OutOfMemory`, also where no disk has room.
    """
    folder = cache_folder(artifact.path, cache_dir)

    def find(folder: Path) -> Prepared | None:
        try:
            return read(folder / f"{key}.json")
        except MALFORMED:
            return None

    def built(folder: Path) -> Prepared:
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder)
        began = time.monotonic()
        problem = build(folder)
        logger.info("prepared %s in %.2f s", artifact.path.name, time.monotonic() - began)
        found = find(folder)
        if problem is not None or found is None:
            raise OSError(problem or f"{folder} does not keep what is written")
        return found

    with ExitStack() as stack:
        found = None
        if folder is None:
            logger.warning("%s: its prepared models are another user's", artifact.path)
        else:
            stack.enter_context(in_use(folder))
            found = find(folder)
            try:
                found = found or built(folder)
            except OSError as error:
                logger.warning("cannot keep a prepared model in %s: %s", folder, error)
            if found is not None:
                with suppress(OSError):  # when it was used last
                    os.utime(folder / f"{key}.json")
        if found is None:
            try:
                temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="prepared-"))
                found = built(Path(temporary))
            except OSError as error:
                raise OutOfMemory(f"no disk has room to prepare {artifact.path.name}") from error
        yield found


def run_build(run: Run, target: Any, artifact: Artifact, *arguments: str) -> Any:
    """`target`, with the artifact's path, its manifest, and the `arguments`."""
    return run(
        target,
        str(artifact.path),
        to_manifest(artifact),
        *arguments,
        what=artifact.path.name,
        limits=build_limits(artifact.fp32_bytes, NICENESS),
    )


def build_limits(fp32_bytes: int, niceness: int) -> Limits:
    """For a child that builds what belongs to weights of that size."""
    return Limits(
        memory_mib=BUILD_MIB + BUILD_TIMES_FP32 * fp32_bytes // MIB,
        cpu_s=BUILD_CPU_S + fp32_bytes // BUILD_BYTES_PER_CPU_S,
        write_mib=64 + BUILD_TIMES_FP32 * fp32_bytes // MIB,
        niceness=niceness,
    )
