"""The AWS client, unmodified, with `endpoint_url` set to a server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.e2e.server import Server
from tests.e2e.stores import SHORT, packed, small, text
from tests.engine.hugging_face import make_hugging_face

EVENTS = "text/event-stream; charset=utf-8"
TEMPLATE = "{% for m in messages %}<usr>{{ m.content }}{% endfor %}<sys>"
CHAT = {"messages": [{"role": "user", "content": "안녕?"}], "temperature": 0, "max_tokens": 9}


@pytest.fixture(scope="module")
def client(clean: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("aws")
    for seed, name in enumerate(("a", "team/b", "봄")):
        packed(small(folder / name, seed), clean.store / f"{name}.tar.gz")
    chat = make_hugging_face(folder / "chat", tokenizer_config={"chat_template": TEMPLATE})
    packed(chat, clean.store / "chat.tar.gz")
    made = boto3.client(
        "sagemaker-runtime",
        endpoint_url=clean.url(""),
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106
        config=Config(retries={"total_max_attempts": 1}),
    )
    made.server = clean
    yield made
    made.close()


def invoke(client: Any, target: str, body: bytes | None = None, **options: Any) -> Any:
    options = {"ContentType": "application/json", **options}
    content = json.dumps(SHORT).encode() if body is None else body
    return client.invoke_endpoint(EndpointName="e", TargetModel=target, Body=content, **options)


@pytest.mark.parametrize("target", ["a.tar.gz", "/team/b.tar.gz", "team/b.tar.gz", "a"])
def test_a_target_model_answers(client: Any, target: str) -> None:
    answer = invoke(client, target)
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert answer["ContentType"] == "application/json"
    made = json.loads(answer["Body"].read())["generated_text"]
    name = target.strip("/").removesuffix(".tar.gz")
    assert made == text(client.server.predict(name, SHORT))
    more = {"Accept": "text/plain", "CustomAttributes": "trace=1", "InferenceId": "i"}
    plain = invoke(client, target, **more)
    assert plain["ContentType"].startswith("text/plain")
    assert plain["Body"].read().decode() == made


@pytest.mark.parametrize(
    ("body", "status", "said", "kind"),
    [
        (b'{"inputs": ""}', 400, "inputs", "application/json"),
        (b"a", 415, "text/csv", "text/csv"),
    ],
)
def test_an_error_of_the_model_is_a_model_error(
    client: Any, body: bytes, status: int, said: str, kind: str
) -> None:
    with pytest.raises(client.exceptions.ModelError) as caught:
        invoke(client, "a.tar.gz", body, ContentType=kind)
    answer = caught.value.response
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert answer["OriginalStatusCode"] == status
    assert said in json.loads(answer["OriginalMessage"])["message"]
    assert said in answer["Error"]["Message"]


@pytest.mark.parametrize(
    "target",
    [
        {"TargetModel": "nothing.tar.gz"},
        {"TargetModel": "../a.tar.gz"},
        {"TargetModel": "a/../../etc.tar.gz"},
        {},
    ],
)
def test_an_unknown_model_or_none_is_a_validation_error(
    client: Any, target: dict[str, str]
) -> None:
    body = json.dumps(SHORT).encode()
    with pytest.raises(ClientError) as caught:
        client.invoke_endpoint(
            EndpointName="e", Body=body, ContentType="application/json", **target
        )
    assert caught.value.response["Error"]["Code"] == "ValidationError"
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400


def stream(client: Any, kind: str = "application/json", **request: Any) -> list[bytes]:
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName="e", ContentType="application/json", **request
    )
    assert answer["ContentType"] == request.get("Accept", kind)
    with contextlib.closing(answer["Body"]) as events:
        return [event["PayloadPart"]["Bytes"] for event in events]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("a", {"InferenceComponentName": "a"}),
        ("봄", {"CustomAttributes": "model=%EB%B4%84"}),
    ],
)
def test_a_stream_comes_in_the_clients_own_events(
    client: Any, name: str, target: dict[str, str]
) -> None:
    body = json.dumps({**SHORT, "stream": True}).encode()
    parts = stream(client, Accept="application/x-ndjson", Body=body, **target)
    *tokens, end = [json.loads(part) for part in b"".join(parts).splitlines()]
    assert len(parts) > 1
    assert end["generated_text"] == text(client.server.predict(name, SHORT))
    assert "".join(token["text"] for token in tokens) == end["generated_text"]


def test_what_is_no_stream_comes_in_one_event(client: Any) -> None:
    (part,) = stream(client, InferenceComponentName="a", Body=json.dumps(SHORT).encode())
    assert json.loads(part)["generated_text"] == text(client.server.predict("a", SHORT))


def test_an_error_of_a_stream_is_typed(client: Any) -> None:
    with pytest.raises(ClientError) as caught:
        stream(client, InferenceComponentName="none", Body=b"{}")
    assert caught.value.response["Error"]["Code"] == "ValidationError"
    with pytest.raises(ClientError, match="CustomAttributes model=NAME"):
        stream(client, Body=json.dumps({**SHORT, "stream": True}).encode())


def test_a_chat_is_asked_as_on_openais_route(client: Any) -> None:
    asked = {**CHAT, "model": "chat"}
    expected = client.server.post("/v1/chat/completions", json=asked).json()["choices"]
    answer = json.loads(invoke(client, "chat.tar.gz", json.dumps(CHAT).encode())["Body"].read())
    assert (answer["object"], answer["choices"]) == ("chat.completion", expected)

    body = json.dumps({**CHAT, "model": "chat", "stream": True}).encode()
    parts = b"".join(stream(client, EVENTS, Body=body)).decode()  # the body alone names the model
    *events, done = parts.split("\n\n")[:-1]
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    said = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    assert said == expected[0]["message"]["content"]


def test_an_error_of_openais_is_a_model_error(client: Any) -> None:
    with pytest.raises(client.exceptions.ModelError) as caught:
        invoke(client, "chat.tar.gz", json.dumps({**CHAT, "n": 0}).encode())
    error = json.loads(caught.value.response["OriginalMessage"])["error"]
    assert (caught.value.response["OriginalStatusCode"], error["param"]) == (400, "n")
