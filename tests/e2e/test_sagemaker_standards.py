"""SageMaker's contract of adapters, case by case as vLLM is tested for it.

Each test names the test of vLLM's `tests/entrypoints/sagemaker` that it corresponds to. Handlers
and middleware in a customer's Python file are not here: a model's own script is what does that. Nor
are sessions, which this server refuses: tests/serving/api/test_bodies.py.
docs/reference/differences.md lists the answers that are not the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import requests

from tests.e2e.server import Server, eventually
from tests.e2e.stores import error, serving, small
from tests.engine.adapters import make_adapter

pytestmark = pytest.mark.slow

ADAPTER_ID = "X-Amzn-SageMaker-Adapter-Identifier"
COMPLETION = {"prompt": "나는 오늘", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in place of /opt/ml: the base in `model/`, an adapter in `models/`."""
    folder = tmp_path_factory.mktemp("ml")
    base = small(folder / "model")
    make_adapter(folder / "models" / "어댑터", base)
    return folder


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), None, SAGEMAKER_BASE_DIR=str(root)) as running:
        yield running


def register(server: Server, name: str, src: Path, **fields: bool) -> requests.Response:
    body = {"name": name, "src": str(src), **fields}
    return server.post("/adapters", json=body)


def unregister(server: Server, name: str) -> requests.Response:
    return server.delete(f"/adapters/{name}")


def invoke(server: Server, body: dict[str, Any], **headers: str) -> requests.Response:
    return server.post("/invocations", json=body, headers=headers)


def listed(server: Server) -> set[str]:
    models = server.get("/v1/models").json()["data"]
    return {model["id"] for model in models}


def test_adapters_are_loaded_listed_answer_and_are_unloaded(server: Server, root: Path) -> None:
    """`test_sagemaker_load_adapter_happy_path`, `..._unload_adapter_happy_path`,
    `test_sagemaker_invocations_with_adapter`, `test_sagemaker_multiple_adapters_load_unload`. Root
    and parent are in `GET /models`."""
    src, names = root / "models" / "어댑터", {f"lora-{i}" for i in range(3)}
    for name in names:
        answer = register(server, name, src, pin=False)
        assert (answer.status_code, answer.text) == (200, f"Adapter {name} registered")
    assert register(server, "lora-0", src).status_code == 409
    assert names <= listed(server)
    models = server.get("/models").json()["models"]
    [model] = [model for model in models if model["modelName"] == "lora-0"]
    assert (model["modelUrl"], model["baseModel"]) == (str(src), "model")
    [choice] = invoke(server, COMPLETION, **{ADAPTER_ID: "lora-0"}).json()["choices"]
    [base] = invoke(server, COMPLETION).json()["choices"]
    assert choice["text"]
    assert choice["text"] != base["text"]
    for name in names:
        answer = unregister(server, name)
        assert (answer.status_code, answer.text) == (200, f"Adapter {name} unregistered")
        assert invoke(server, COMPLETION, **{ADAPTER_ID: name}).status_code == 404
    assert not names & listed(server)
    assert register(server, "later", src, preload=False).status_code == 200
    eventually(lambda: invoke(server, COMPLETION, **{ADAPTER_ID: "later"}).status_code == 200)
    assert unregister(server, "later").status_code == 200


def test_a_name_that_a_request_gives_outranks_the_one_model(server: Server, root: Path) -> None:
    assert register(server, "가락", root / "models" / "어댑터").status_code == 200
    [base] = invoke(server, COMPLETION).json()["choices"]
    attribute = {"X-Amzn-SageMaker-Custom-Attributes": f"a=1;model={quote('가락')}"}
    for body, headers in (({"model": "가락"}, {}), ({}, attribute)):
        [choice] = invoke(server, {**COMPLETION, **body}, **headers).json()["choices"]
        assert choice["text"] != base["text"]
    by_name = invoke(server, {**COMPLETION, "model": "model"}).json()["choices"]
    assert by_name[0]["text"] == base["text"]
    assert unregister(server, "가락").status_code == 200
    assert invoke(server, {**COMPLETION, "model": "가락"}).status_code == 404
    attribute = {"X-Amzn-SageMaker-Custom-Attributes": "model=nonsense"}
    generate = {"inputs": "나는 오늘", "parameters": {"adapter_id": "nonsense"}}
    for path in ("/generate", "/generate_stream", "/invocations"):
        assert server.post(path, json=generate).status_code == 404, path
        sent = {"inputs": "나는 오늘"}
        assert server.post(path, json=sent, headers=attribute).status_code == 404, path
        assert server.post(f"{path}?model_name=nonsense", json=sent).status_code == 404, path
        assert server.post(path, json=sent).status_code == 200, path


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        # `test_sagemaker_load_adapter_not_found`. Outside of the models' folders it is 400 whether
        # there is such a path or not.
        ({"name": "lost", "src": "{root}/models/absent"}, 404, "absent"),
        ({"name": "lost", "src": "/path/does/not/exist"}, 400, "Allowed"),
        ({"name": "lost", "src": "/etc"}, 400, "Allowed"),
        # `test_sagemaker_load_adapter_invalid_files`
        ({"name": "damaged", "src": "{root}/models/damaged"}, 400, "adapter_config.json"),
        # `test_load_adapter_missing_required_field`, `test_load_adapter_empty_body`, of AWS's
        # `test_sagemaker_lora_integration.py`
        ({"name": "lora"}, 400, "src must be text that is not empty"),
        ({"src": "models/어댑터"}, 400, "name must be text that is not empty"),
        ({}, 400, "name must be text that is not empty"),
        ({"name": "x", "src": "y", "pin": "yes"}, 400, "pin"),
        ({"name": "x", "src": "y", "load": True}, 400, "load"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_refused(
    server: Server, root: Path, body: dict[str, Any], status: int, said: str
) -> None:
    (root / "models" / "damaged").mkdir(exist_ok=True)
    (root / "models" / "damaged" / "adapter_config.json").write_text("no JSON")
    sent = {k: v.format(root=root) if isinstance(v, str) else v for k, v in body.items()}
    refused = server.post("/adapters", json=sent)
    assert error(refused)[0] == status
    assert said in refused.json()["message"]
    assert not {"lost", "damaged", "lora", "x"} & listed(server)


@pytest.mark.parametrize("name", ["never-loaded", "model"])
def test_what_is_no_adapter_is_not_unloaded(server: Server, name: str) -> None:
    """`test_sagemaker_unload_nonexistent_adapter`."""
    refused = unregister(server, name)
    assert error(refused)[0] == 404
    assert refused.json()["message"] == f"The adapter {name} was not found"
