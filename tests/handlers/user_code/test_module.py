"""A script's modules with the names of the server's packages, in a script process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from serving.settings import REPOSITORY
from tests.e2e.scripts import script
from tests.handlers.tensors.graphs import classifier
from tests.handlers.test_handler_service import Worker
from tests.handlers.user_code.conventions.test_toolkit import BLOCK

pytestmark = pytest.mark.slow

OURS = ("common", "engine", "handlers")
SAYS = f"import {', '.join(OURS)}\nprint({' + '.join(f'{name}.WORD' for name in OURS)})\n"


@pytest.mark.parametrize("has_block", [True, False])
def test_a_script_may_have_modules_named_as_the_servers_packages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    has_block: bool,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    for name in OURS:
        script(tmp_path / "model", "WORD = '봄'", f"{name}.py")
    if not has_block:
        classifier(tmp_path / "model")
    worker = Worker(tmp_path, SAYS + BLOCK * has_block)
    request.addfinalizer(worker.stop)
    assert worker.handler.load_error is None
    rows = [[1.0, 2.0, 3.0]] if has_block else np.ones((1, 3, 16, 16)).tolist()
    reply = worker.ask(json.dumps(rows), "application/json")
    assert reply.status == 200, reply.body.decode()
    assert len(json.loads(reply.body)) == 1
