"""SageMaker's contract of adapters and sessions, case by case as vLLM is tested for it.

Each test names the test of vLLM's `tests/entrypoints/sagemaker` that it corresponds to. Those of
handlers and middleware in a customer's Python file are not here: a model's own script is what does
that. docs/reference/differences.md lists the answers that are not the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.server import Server, eventually
from tests.e2e.stores import error, serving, small
from tests.engine.adapters import make_adapter

pytestmark = pytest.mark.slow

ADAPTER_ID = "X-Amzn-SageMaker-Adapter-Identifier"
SESSION_ID = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION_ID = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION_ID = "X-Amzn-SageMaker-Closed-Session-Id"
OPEN, CLOSE = {"requestType": "NEW_SESSION"}, {"requestType": "CLOSE"}
COMPLETION = {"prompt": "나는 오늘", "max_tokens": 5, "temperature": 0}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "나는 오늘"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands for /opt/ml: the base in `model/`, an adapter in `models/`."""
    folder = tmp_path_factory.mktemp("ml")
    base = small(folder / "model")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    make_adapter(folder / "models" / "어댑터", base)
    return folder


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"SAGEMAKER_BASE_DIR": str(root), "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "True"}
    with serving(tmp_path_factory.mktemp("server"), None, **environment) as running:
        yield running


def register(server: Server, name: str, src: Path | str) -> requests.Response:
    body = {"name": name, "src": str(src)}
    return requests.post(server.url("/adapters"), json=body, timeout=60)


def unregister(server: Server, name: str) -> requests.Response:
    return requests.delete(server.url(f"/adapters/{name}"), timeout=60)


def invoke(server: Server, body: dict[str, Any], **headers: str) -> requests.Response:
    return requests.post(server.url("/invocations"), json=body, headers=headers, timeout=60)


def in_session(server: Server, body: dict[str, Any], id: str) -> requests.Response:
    return invoke(server, body, **{SESSION_ID: id})


def open_session(server: Server) -> str:
    answer = invoke(server, OPEN)
    assert answer.status_code == 200, answer.text
    id, _, expires = answer.headers[NEW_SESSION_ID].partition(";")
    assert id
    assert expires
    return id


def listed(server: Server) -> set[str]:
    models = requests.get(server.url("/v1/models"), timeout=60).json()["data"]
    return {model["id"] for model in models}


# test_sagemaker_lora_adapters.py


def test_an_adapter_is_loaded_and_listed(server: Server, root: Path) -> None:
    """`test_sagemaker_load_adapter_happy_path`. Its root and parent are in `GET /models`."""
    src = root / "models" / "어댑터"
    answer = register(server, "lora", src)
    assert (answer.status_code, answer.text) == (200, "Adapter lora registered")
    assert "lora" in listed(server)
    [model] = [
        model
        for model in requests.get(server.url("/models"), timeout=60).json()["models"]
        if model["modelName"] == "lora"
    ]
    assert (model["modelUrl"], model["baseModel"]) == (str(src), "model")
    assert unregister(server, "lora").status_code == 200


def test_an_adapter_is_unloaded_and_not_listed(server: Server, root: Path) -> None:
    """`test_sagemaker_unload_adapter_happy_path`."""
    assert register(server, "lora-unload", root / "models" / "어댑터").status_code == 200
    assert "lora-unload" in listed(server)
    answer = unregister(server, "lora-unload")
    assert (answer.status_code, answer.text) == (200, "Adapter lora-unload unregistered")
    assert "lora-unload" not in listed(server)


def test_an_adapter_that_is_not_there_is_not_found(server: Server, root: Path) -> None:
    """`test_sagemaker_load_adapter_not_found`. Outside of the models' folders it is 400 whether
    there is such a path or not."""
    assert error(register(server, "lost", root / "models" / "absent"))[0] == 404
    assert error(register(server, "lost", "/path/does/not/exist"))[0] == 400
    assert error(register(server, "lost", "/etc"))[0] == 400
    assert "lost" not in listed(server)


def test_an_adapter_that_cannot_be_read_is_refused(server: Server, root: Path) -> None:
    """`test_sagemaker_load_adapter_invalid_files`."""
    damaged = root / "models" / "damaged"
    damaged.mkdir()
    (damaged / "adapter_config.json").write_text("no JSON")
    assert error(register(server, "damaged", damaged))[0] == 400
    assert "damaged" not in listed(server)


def test_an_unknown_adapter_is_not_unloaded(server: Server) -> None:
    """`test_sagemaker_unload_nonexistent_adapter`."""
    assert error(unregister(server, "never-loaded"))[0] == 404


@pytest.mark.parametrize("body", [{"name": "lora"}, {"src": "models/어댑터"}, {}])
def test_a_field_that_is_missing_is_named(server: Server, body: dict[str, str]) -> None:
    """`test_load_adapter_missing_required_field`, `test_load_adapter_empty_body`, of AWS's
    `test_sagemaker_lora_integration.py`."""
    refused = requests.post(server.url("/adapters"), json=body, timeout=60)
    assert error(refused)[0] == 400
    missing = "src" if "name" in body else "name"
    assert refused.json()["message"] == f"{missing} must be text that is not empty"


def test_invocations_are_answered_by_the_adapter_that_they_name(server: Server, root: Path) -> None:
    """`test_sagemaker_invocations_with_adapter`."""
    assert register(server, "lora-invoke", root / "models" / "어댑터").status_code == 200
    [choice] = invoke(server, COMPLETION, **{ADAPTER_ID: "lora-invoke"}).json()["choices"]
    [base] = invoke(server, COMPLETION).json()["choices"]
    assert choice["text"]
    assert choice["text"] != base["text"]
    assert unregister(server, "lora-invoke").status_code == 200
    assert invoke(server, COMPLETION, **{ADAPTER_ID: "lora-invoke"}).status_code == 404


def test_several_adapters_come_and_go(server: Server, root: Path) -> None:
    """`test_sagemaker_multiple_adapters_load_unload`."""
    names = {f"lora-{i}" for i in range(5)}
    for name in names:
        assert register(server, name, root / "models" / "어댑터").status_code == 200
    assert names <= listed(server)
    for name in names:
        assert unregister(server, name).status_code == 200
    assert not names & listed(server)


# test_sagemaker_stateful_sessions.py


def test_a_request_to_open_a_session_has_no_other_field(server: Server) -> None:
    """`test_create_session_badrequest`."""
    answer = invoke(server, {**OPEN, "extra-field": "extra-field-data"})
    assert error(answer)[0] == 400
    assert NEW_SESSION_ID not in answer.headers


@pytest.mark.parametrize(
    ("id", "more", "message"),
    [
        ("nonexistent-session-id", {}, "session not found"),
        ("", {"extra-field": "extra-field-data"}, "the only field"),
    ],
    ids=["nonexistent_session_id", "malformed_close_request"],
)
def test_a_close_that_is_refused_closes_nothing(
    server: Server, id: str, more: dict[str, str], message: str
) -> None:
    """`test_close_session_badrequest`."""
    opened = open_session(server)
    refused = in_session(server, {**CLOSE, **more}, id or opened)
    assert error(refused)[0] == 400
    assert message in refused.json()["message"]
    assert in_session(server, CLOSE, opened).status_code == 200


def test_a_close_without_an_id_is_refused(server: Server) -> None:
    """`test_close_session_invalidrequest`. There it is 424: here 400, as any header that is
    missing; AWS's own tests take both."""
    opened = open_session(server)
    refused = invoke(server, CLOSE)
    assert error(refused)[0] == 400
    assert SESSION_ID in refused.json()["message"]
    assert in_session(server, CLOSE, opened).status_code == 200


def test_a_session_is_used_and_closed(server: Server) -> None:
    """`test_session`; and `test_use_after_close_fails` of AWS's
    `test_sagemaker_sessions_integration.py`."""
    id = open_session(server)
    for body in (COMPLETION, CHAT):
        answer = in_session(server, body, id)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"]
    closed = in_session(server, CLOSE, id)
    assert closed.status_code == 200
    assert closed.headers[CLOSED_SESSION_ID] == id
    for body in (COMPLETION, CLOSE):
        refused = in_session(server, body, id)
        assert error(refused)[0] == 400
        assert "session not found" in refused.json()["message"]


def test_a_session_outlives_the_gateway(server: Server) -> None:
    """No case of vLLM's: its sessions, too, are there again after a restart."""
    id = open_session(server)
    [gateway] = server.descendants("-m serving.gateway ")
    gateway.kill()
    eventually(lambda: server.is_ready())
    assert in_session(server, COMPLETION, id).status_code == 200
    assert in_session(server, CLOSE, id).headers[CLOSED_SESSION_ID] == id


# test_sagemaker_handler_overrides.py


def test_without_a_script_the_server_answers_itself(server: Server) -> None:
    """`test_framework_default_handlers`."""
    assert requests.get(server.url("/ping"), timeout=60).status_code == 200
    answer = invoke(server, {"model": "any/name", **CHAT})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"]
