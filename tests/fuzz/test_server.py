"""A running server under hostile requests: what schemathesis makes of its OpenAPI document, and
what `tests.fuzz.live` makes of the corpora. `python -m tests.fuzz --server` does it for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import REPOSITORY, Server
from tests.fuzz.live import Client, check, lasting, served

pytestmark = pytest.mark.slow

REQUESTS = 600
CHECKS = "not_a_server_error,response_schema_conformance,unsupported_method"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@pytest.mark.parametrize("seed", [1])
def test_no_request_is_an_error_of_the_server(server: Server, seed: int) -> None:
    processes, client = lasting(server), Client(server, seed)
    for _ in range(REQUESTS):
        client.ask()
    client.close()
    assert client.statuses[200] > REQUESTS / 10
    assert client.statuses[400] > REQUESTS / 10
    check(server, processes)


def test_the_server_does_as_its_openapi_document_says(server: Server, tmp_path: Path) -> None:
    python = os.environ.get("CLIENTS_PYTHON")
    if python is None or sys.version_info < (3, 11):
        pytest.skip("CLIENTS_PYTHON names a Python >= 3.11 with requirements/clients.txt")
    processes = lasting(server)
    command = [str(Path(python).absolute()), "-m", "schemathesis.cli", "run"]
    command += [server.url("/openapi.json"), "--max-examples=2", "--seed=1", "--no-color"]
    command += ["--request-timeout=90", "--phases=coverage,fuzzing,stateful"]
    command += [f"--checks={CHECKS}", "--generation-database=none"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.fuzz.hooks"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Stateful" in done.stdout
    check(server, processes)
