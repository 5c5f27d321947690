"""The server as the containers of an endpoint's inference components: one model each, by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from botocore.exceptions import ClientError

from tests.e2e.server import Server, eventually
from tests.e2e.stores import ENDLESS, SHORT, endless, serving, small, statistics, text
from tests.platform.endpoint import Components, SingleModel
from tests.platform.limits import Limits
from tests.platform.runtime import client_of

pytestmark = pytest.mark.slow

MODELS: dict[str, Callable[[Path], Path]] = {"sowol": small, "endless": endless}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """By their components' names."""
    with contextlib.ExitStack() as started:
        found = {}
        for name, make in MODELS.items():
            folder = tmp_path_factory.mktemp(name)
            make(folder / "ml" / "model")
            found[name] = started.enter_context(
                serving(folder, SAGEMAKER_BASE_DIR=str(folder / "ml"))
            )
        yield found


@contextlib.contextmanager
def client(servers: dict[str, Server], limits: Limits | None = None) -> Iterator[Any]:
    named = {name: SingleModel(server.url(""), limits) for name, server in servers.items()}
    with client_of(Components("poets", named)) as made:
        yield made


def request(component: str, body: dict[str, Any]) -> dict[str, Any]:
    named = {"InferenceComponentName": component} if component else {}
    data = json.dumps(body).encode()
    return {"EndpointName": "poets", "ContentType": "application/json", "Body": data, **named}


def own(server: Server) -> str:
    """What its one model says."""
    return text(requests.post(server.url("/invocations"), json=SHORT, timeout=90))


def test_a_name_reaches_the_container_of_its_component(servers: dict[str, Server]) -> None:
    with client(servers) as asked:
        said = {
            name: json.load(asked.invoke_endpoint(**request(name, SHORT))["Body"])["generated_text"]
            for name in servers
        }
        assert said == {name: own(server) for name, server in servers.items()}
        assert said["sowol"] != said["endless"]
        for name, why in (("", "is required"), ("dongju", "dongju of account test not found")):
            with pytest.raises(ClientError, match=why) as caught:
                asked.invoke_endpoint(**request(name, SHORT))
            assert caught.value.response["Error"]["Code"] == "ValidationError"


def test_a_component_streams_token_by_token(servers: dict[str, Server]) -> None:
    with client(servers) as asked:
        answer = asked.invoke_endpoint_with_response_stream(
            **request("sowol", {**SHORT, "stream": True}), Accept="application/x-ndjson"
        )
        with contextlib.closing(answer["Body"]) as events:
            parts = [event["PayloadPart"]["Bytes"] for event in events]
    *tokens, end = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert end["generated_text"] == own(servers["sowol"])
    assert "".join(token["text"] for token in tokens) == end["generated_text"]


def test_past_the_platforms_limit_a_request_leaves_its_place_in_the_batch(
    servers: dict[str, Server],
) -> None:
    with client(servers, Limits(answer_s=1.0)) as asked:
        with pytest.raises(asked.exceptions.ModelError, match="timed out") as caught:
            asked.invoke_endpoint(**request("endless", ENDLESS))
        assert caught.value.response["OriginalStatusCode"] == 0
    eventually(lambda: statistics(servers["endless"])["kv_bytes"] == 0)
    assert own(servers["endless"])
