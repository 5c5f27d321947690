"""A running server under hostile requests: those of schemathesis from its OpenAPI document, and
those of `tests.fuzz.live` from the corpora. `python -m tests.fuzz --server` runs longer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import REPOSITORY
from tests.fuzz.lasting import Lasting
from tests.fuzz.live import Client, served
from tests.processes import clients_python

pytestmark = pytest.mark.slow

REQUESTS = 600
# Not positive_ and negative_data_: a document has neither the models nor what their code takes. Not
# ignored_auth: tokens are a setting (tests/e2e/test_red_team.py tests them on every route).
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance,unsupported_method,"
    "use_after_free,ensure_resource_availability"
)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    folder = tmp_path_factory.mktemp("fuzz")
    with served(folder) as server:
        yield Lasting(server, folder)


def test_no_request_is_an_error_of_the_server(lasting: Lasting) -> None:
    client = Client(lasting.server, seed=1)
    for _ in range(REQUESTS):
        client.ask()
    client.close()
    assert client.statuses[200] > REQUESTS / 10
    assert client.statuses[400] > REQUESTS / 10
    lasting.check()


def test_the_server_conforms_to_its_openapi_document(lasting: Lasting, tmp_path: Path) -> None:
    """The management port has the same code."""
    lasting.server.forget_log()  # which the test before has checked
    command = [clients_python(), "-m", "schemathesis.cli", "run"]
    command += [lasting.server.url("/openapi.json"), "--max-examples=2", "--request-timeout=90"]
    command += ["--phases=coverage,fuzzing,stateful", "--seed=1", f"--checks={CHECKS}"]
    command += ["--generation-database=none", "--no-color"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.fuzz.hooks"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Stateful" in done.stdout
    lasting.check()
