"""What the server may write to each volume, by its settings and their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import engine.settings
from common.settings import read_settings
from serving.settings import Settings

UNLIMITED_MIB = 1024  # kept free for what has no limit: notes of downloads, locks, blocks' ends
MIB = {"Mi": 1, "Gi": 1024}
RUN_DIR = "/run/kogpt2"  # the image's


def caches(settings: Mapping[str, str]) -> dict[PurePath, int]:
    """The folders of the server's caches, with their limits in MiB."""
    serving, computing = (
        Settings.read((), settings),
        read_settings(engine.settings.Settings, settings),
    )
    return {
        PurePath(serving.model_cache or f"{RUN_DIR}/models"): serving.cache_max_mib,
        PurePath(computing.cache_dir or f"{RUN_DIR}/prepared"): computing.cache_max_mib,
    }


def sizes(pod: Mapping[str, Any], claims: Sequence[Mapping[str, Any]] = ()) -> dict[str, int]:
    """The sizes in MiB of a pod's volumes that have one, by name."""
    given = {v["name"]: v.get("emptyDir", {}).get("sizeLimit") for v in pod.get("volumes", [])}
    for claim in claims:
        given[claim.get("metadata", claim)["name"]] = claim["spec"]["resources"]["requests"][
            "storage"
        ]
    return {name: int(size[:-2]) * MIB[size[-2:]] for name, size in given.items() if size}


def overfull(
    settings: Mapping[str, str], mounts: Mapping[str, str], sizes: Mapping[str, int]
) -> Iterator[str]:
    """Yields the volumes that the caches on them may fill: `mounts` are their names by path."""
    wanted = dict.fromkeys(mounts.values(), 0)
    for folder, limit_mib in caches(settings).items():
        inside = [path for path in mounts if folder.is_relative_to(path)]
        wanted[mounts[max(inside, key=len)]] += limit_mib
    for name, mib in wanted.items():
        if mib and mib + UNLIMITED_MIB > sizes.get(name, mib + UNLIMITED_MIB):
            yield f"{name} has {sizes[name]} MiB, its caches may take {mib}"


def overfull_of(
    container: Mapping[str, Any],
    pod: Mapping[str, Any],
    settings: Mapping[str, str],
    claims: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """The same of a container of a pod: `settings` are those that are not in its own `env`."""
    own = {v["name"]: v["value"] for v in container.get("env", []) if "value" in v}
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    return list(overfull({**settings, **own}, mounts, sizes(pod, claims)))
