"""The caches of the compose files fit into their volumes; those of pods: test_composed.py."""

from __future__ import annotations

import pytest
import yaml

from tests.deploy import volumes
from tests.e2e.server import REPOSITORY


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"CACHE_MAX_MIB": "12288"}, 1),  # the other one has its default
        ({"CACHE_MAX_MIB": "10240", "ENGINE_CACHE_MAX_MIB": "4096"}, 0),
        ({"CACHE_MAX_MIB": "10240", "ENGINE_CACHE_MAX_MIB": "6144"}, 1),  # it fits to the byte
        ({"CACHE_MAX_MIB": "10240", "ENGINE_CACHE_MAX_MIB": "4096", "MODEL_CACHE": ""}, 1),
    ],
)
def test_a_volume_that_is_too_small_for_the_caches_on_it_is_noticed(
    settings: dict[str, str], count: int
) -> None:
    folders = {"MODEL_CACHE": "/c/models", "ENGINE_CACHE_DIR": "/c/prepared"}
    mounts, sizes = {"/c": "cache", volumes.RUN_DIR: "run"}, {"cache": 16 * 1024, "run": 64}
    assert len(list(volumes.overfull({**folders, **settings}, mounts, sizes))) == count


@pytest.mark.parametrize(
    ("file", "service"), [("compose.yaml", "server"), ("compose.fleet.yaml", "node1")]
)
def test_what_compose_gives_the_caches_has_no_limit_or_one_that_is_large_enough(
    file: str, service: str
) -> None:
    composed = yaml.safe_load((REPOSITORY / file).read_text("utf-8"))
    server = composed["services"][service]
    mounts = {path: name for name, path in (v.split(":") for v in server["volumes"])}
    sizes = {}
    for path, _, options in (entry.partition(":") for entry in server["tmpfs"]):
        mounts[path] = path
        given = dict(option.partition("=")[::2] for option in options.split(","))
        if "size" in given:
            sizes[path] = int(given["size"].removesuffix("m"))
    assert composed["volumes"] == dict.fromkeys(["cache", "store"])  # of any size
    assert list(volumes.overfull(server["environment"], mounts, sizes)) == []
