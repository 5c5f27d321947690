"""Settings of the store and its cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving.store.root_files import RootFiles


@dataclass(frozen=True)
class StoreSettings:
    """The settings of a store and its cache.

    `location` is the store's url or path, `roots` are folders whose models may be loaded by path,
    and `https_hosts` the hosts to download from, as `host` or `host:port`. `cache_max_bytes` may be
    0 for no limit; `model_max_bytes` limits an unpacked model. `root_files` reads models of `roots`
    that only root may read.
    """

    location: str
    cache_dir: Path
    cache_max_bytes: int
    model_max_bytes: int
    roots: tuple[Path, ...]
    https_hosts: tuple[str, ...]
    root_files: RootFiles | None = None
