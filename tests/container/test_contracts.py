"""The contracts of `docker run`, curl and SageMaker against running containers."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests

from tests.container.conftest import Start
from tests.container.containers import CACHE, HARDENED, PROMPT, TEXT, Container, docker, mount
from tests.e2e import test_readme
from tests.e2e.stores import SHORT, small, text
from tests.engine.models import make_artifact

pytestmark = pytest.mark.container

HASH = "7f3e" * 16


def test_the_session_of_the_documents_answers_as_it_is_shown(shared: Container) -> None:
    page = "docs/api/requests.md"
    test_readme.test_the_session_answers_as_it_is_shown(shared, page)  # type: ignore[arg-type]


def test_korean_names_work_on_both_ports(shared: Container) -> None:
    assert shared.load("소월", "sowol").ok
    assert shared.predict("소월").json()["generated_text"].startswith(TEXT)
    listed = requests.get(shared.url("/models"), timeout=60).json()["models"]
    assert listed == [{"modelName": "소월", "modelUrl": "sowol", "residency": "hot"}]
    assert shared.unload("소월").ok


def test_the_backend_without_mxnet_runs_hardened_on_a_store_that_cannot_be_written(
    start: Start, tmp_path: Path
) -> None:
    make_artifact(tmp_path / "store" / "봄", units=64)
    options = [*HARDENED, *CACHE, *mount(tmp_path / "store", "/models")]
    container = start(*options, ENGINE_BACKEND="native", MODEL_STORE="/models")
    assert text(container.predict("봄", SHORT))


def test_sagemaker_loads_invokes_and_unloads_models(start: Start, tmp_path: Path) -> None:
    small(tmp_path / "models" / HASH / "model")
    container = start(
        *mount(tmp_path / "models", "/opt/ml/models"),
        command=("serve",),
        SAGEMAKER_MULTI_MODEL="true",
        SAGEMAKER_BIND_TO_PORT="9123",
    )
    target = {"X-Amzn-SageMaker-Target-Model": "시/봄.tar.gz".encode()}
    models, model = container.url("/models"), container.url(f"/models/{HASH}")
    place = f"/opt/ml/models/{HASH}/model"

    def status(method: str, url: str, body: object = None) -> int:
        return requests.request(method, url, json=body, headers=target, timeout=60).status_code

    assert status("POST", f"{model}/invoke", SHORT) == 404
    assert status("POST", models, {"model_name": HASH, "url": place}) == 200
    assert status("POST", models, {"model_name": HASH, "url": place}) == 409
    described = {"modelName": HASH, "modelUrl": place, "residency": "hot"}
    assert requests.get(models, timeout=60).json() == {"models": [described]}
    assert requests.get(model, timeout=60).json().items() >= described.items()
    assert text(requests.post(f"{model}/invoke", json=SHORT, headers=target, timeout=60))
    assert "시/봄.tar.gz" in container.log()
    assert status("DELETE", model) == 200
    assert status("DELETE", model) == 404
    assert requests.get(models, timeout=60).json() == {"models": []}


def test_a_container_that_starts_as_root_gives_it_up_and_serves_what_only_root_may_read(
    start: Start, tmp_path: Path
) -> None:
    model = small(tmp_path / "models" / HASH / "model")
    for path in (model.parent, model, *model.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    models = mount(tmp_path / "models", "/opt/ml/models")
    container = start("--user", "0", *models, command=("serve",), SAGEMAKER_MULTI_MODEL="true")
    body = {"model_name": HASH, "url": f"/opt/ml/models/{HASH}/model"}
    assert requests.post(container.url("/models"), json=body, timeout=60).ok
    assert text(requests.post(container.url(f"/models/{HASH}/invoke"), json=SHORT, timeout=60))
    lines = docker("top", container.id, "-eo", "pid,uid,args").splitlines()[1:]
    assert {line.split()[1] for line in lines} == {"0", "10001"}
    (opener,) = (line for line in lines if line.split()[1] == "0")
    assert "file_opener.py" in opener


def test_root_that_may_not_change_its_user_starts_nothing(image: str) -> None:
    said = docker("run", "--rm", "--user", "0", "--cap-drop", "ALL", image, check=False)
    assert "docker run --user 10001" in said


def test_a_single_model_answers_on_the_port_that_sagemaker_names(
    start: Start, tmp_path: Path
) -> None:
    small(tmp_path / "model")
    container = start(
        *mount(tmp_path / "model", "/opt/ml/model"),
        command=("serve",),
        SAGEMAKER_BIND_TO_PORT="9123",
    )
    assert text(requests.post(container.url("/invocations"), json=SHORT, timeout=60))


def test_a_target_model_is_loaded_from_the_images_store(start: Start) -> None:
    container = start(SAGEMAKER_BIND_TO_PORT="9123")
    headers = {"X-Amzn-SageMaker-Target-Model": "sowol.tar.gz"}
    answer = requests.post(container.url("/invocations"), json=PROMPT, headers=headers, timeout=60)
    assert answer.json()["generated_text"].startswith(TEXT)
