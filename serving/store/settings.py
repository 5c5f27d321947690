"""Settings of the store and its cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving.store.root_files import RootFiles


@dataclass(frozen=True)
class StoreSettings:
    """`location` is the store's address; `roots` are folders whose models may be loaded by path.

    `https_hosts` are the hosts that archives may be downloaded from, as `host` or `host:port`;
    none by default. `cache_max_bytes` 0: no limit but the disk. `model_max_bytes` bounds
    one model, unpacked. `root_files` reads models of `roots` that only root may read.
    """

    location: str
    cache_dir: Path
    cache_max_bytes: int
    model_max_bytes: int
    roots: tuple[Path, ...]
    https_hosts: tuple[str, ...]
    root_files: RootFiles | None = None
