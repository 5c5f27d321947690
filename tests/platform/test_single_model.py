"""The server as containers of one model, with stateful sessions, whose requests are all at one of
two containers."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from testbed import s3
from tests.e2e.server import Server
from tests.e2e.stores import FAST, SHORT, small, statistics, text
from tests.platform.conftest import A_USER, IS_ROOT
from tests.platform.endpoint import NEW_SESSION, Endpoint, SingleModel
from tests.platform.runtime import client_of
from tests.processes import readable_by_all

pytestmark = pytest.mark.slow

OPEN, CLOSE = {"requestType": "NEW_SESSION"}, {"requestType": "CLOSE"}
EXPIRES = re.compile(r"; Expires=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Server]]:
    """Where the tests are root they start as the platform's do: only root may read their models."""
    with contextlib.ExitStack() as started:
        servers = []
        for seed in range(2):
            folder = Path(started.enter_context(tempfile.TemporaryDirectory()))
            folder.chmod(0o711)  # pytest's folders are closed to other users
            model = small(folder / "ml" / "model", seed)
            environment = {
                **FAST,
                "SAGEMAKER_BASE_DIR": str(folder / "ml"),
                "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true",
                "SAGEMAKER_MODEL_NAME": unicodedata.normalize("NFD", "봄노래"),
                "MODEL_STORE": str(small(folder / "store" / "시", 2).parent),
                **({"RUN_AS_USER": str(A_USER)} if IS_ROOT else {}),
            }
            if IS_ROOT:
                for path in (model.parent, model, *model.iterdir()):
                    path.chmod(0o700 if path.is_dir() else 0o600)
            prefix = readable_by_all(sys.executable) if IS_ROOT else ()
            options: Any = {"prefix": prefix, "options": False, "one_port": True}
            servers.append(Server(folder, None, environment, **options))
            started.callback(servers[-1].stop)
        yield [server.wait_until_ready() for server in servers]
        assert [server.stop() for server in servers] == [0, 0]


def test_the_model_is_loaded_at_the_start_on_the_port_that_sagemaker_names(
    pair: list[Server],
) -> None:
    server = pair[0]
    assert f"port {server.port} serves both requests and management" in server.text()
    before = own(server)
    assert server.loaded() == ["봄노래"]
    assert text(server.predict("봄노래", SHORT)) == before
    assert text(server.predict("시", SHORT)) != before  # the store is MODEL_STORE's
    assert server.unload("시").status_code == 200
    server.kill_gateway()
    assert own(server) == before


def own(server: Server) -> str:
    """The text of its one model."""
    return text(server.post("/invocations", json=SHORT))


# Sessions


def invoke(client: Any, body: dict[str, Any], session: str) -> dict[str, Any]:
    """boto3's answer, whose `Body` is read."""
    answer: dict[str, Any] = client.invoke_endpoint(
        EndpointName="poets",
        ContentType="application/json",
        SessionId=session,
        Body=json.dumps(body).encode(),
    )
    with contextlib.closing(answer["Body"]) as data:
        return {**answer, "Body": data.read().decode()}


def opened(client: Any) -> str:
    answer = invoke(client, OPEN, NEW_SESSION)
    id: str = answer["NewSessionId"].partition(";")[0]
    assert EXPIRES.fullmatch(answer["NewSessionId"].removeprefix(id))
    assert answer["Body"] == f"Session {id} created"
    return id


def closed(client: Any, id: str) -> bool:
    answer = invoke(client, CLOSE, id)
    return bool(answer["ClosedSessionId"] == id and answer["Body"] == f"Session {id} closed")


def cached_tokens(server: Server) -> int:
    """The tokens of all prompts that the prefix cache had."""
    return sum(model["cached_tokens"] for model in statistics(server)["models"])


def test_a_session_stays_with_the_container_that_opened_it(pair: list[Server]) -> None:
    endpoint = Endpoint("poets", [SingleModel(server.url("")) for server in pair])
    with client_of(endpoint) as client:
        ids = [opened(client) for _ in pair]
        assert [endpoint.sessions(number) for number in range(2)] == [1, 1]
        for id, server, other in zip(ids, pair, pair[::-1], strict=True):
            before = [cached_tokens(server), cached_tokens(other)]
            first, second = (json.loads(invoke(client, SHORT, id)["Body"]) for _ in range(2))
            assert first["generated_text"] == second["generated_text"]
            # What a session is worth: the second request finds the prompt of the first.
            assert cached_tokens(server) > before[0]
            assert cached_tokens(other) == before[1]
            headers = {"X-Amzn-SageMaker-Session-Id": id}
            elsewhere = other.post("/invocations", json=SHORT, headers=headers)
            assert elsewhere.status_code == 400
            assert "session not found" in elsewhere.json()["message"]
        for id in ids:
            assert closed(client, id)
            with pytest.raises(ClientError, match="not found") as caught:
                invoke(client, SHORT, id)
            assert caught.value.response["Error"]["Code"] == "ValidationError"
        assert [endpoint.sessions(number) for number in range(2)] == [0, 0]


def test_boto3_has_sessions_of_a_server_without_the_platform(pair: list[Server]) -> None:
    with contextlib.closing(s3.client(pair[0].url(""), "sagemaker-runtime")) as client:
        id = opened(client)
        assert json.loads(invoke(client, SHORT, id)["Body"])["generated_text"]
        with pytest.raises(ClientError, match="the only field"):
            invoke(client, {**CLOSE, "inputs": "나는"}, id)
        assert closed(client, id)
        with pytest.raises(ClientError, match="session not found"):
            invoke(client, SHORT, id)
