from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving.mms.worker_options import worker_options
from serving.settings import Settings
from tests.e2e.scripts import script

SETTINGS = Settings(handler="service:handle", script_workers=3, workers_per_model=7)


@pytest.mark.parametrize(
    ("files", "asked", "handler", "workers"),
    [
        (["service.py"], None, "service:handle", 3),
        (["code/service.py", "inference.py"], None, "service:handle", 3),
        (["service.py", "other.py"], "other:handle", "other:handle", 3),
        (["inference.py"], None, None, 3),
        (["kogpt2.params"], None, None, 7),
    ],
)
def test_the_handler_of_the_environment_is_for_models_that_hold_it_and_name_no_other(
    tmp_path: Path, files: list[str], asked: str | None, handler: str | None, workers: int
) -> None:
    for file in files:
        script(tmp_path, "def handle(data, context): return data", file)
    named = {} if asked is None else {"handler": asked}
    options, found = worker_options(tmp_path, named, SETTINGS)
    assert (found, options["initial_workers"]) == (handler, workers)


def test_an_archives_manifest_goes_before_it(tmp_path: Path) -> None:
    script(tmp_path, json.dumps({"model": {"handler": "own"}}), "MAR-INF/MANIFEST.json")
    for file in ("own.py", "service.py"):
        script(tmp_path, "def handle(data, context): return data", file)
    assert worker_options(tmp_path, {}, SETTINGS)[1] is None
