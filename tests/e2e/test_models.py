"""The life of a model over HTTP: loaded, listed, asked, unloaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, eventually
from tests.e2e.stores import error


@pytest.fixture(scope="module")
def sowol(server: Server) -> Iterator[Server]:
    """With `sowol` loaded, once for all tests that ask it."""
    assert server.load("sowol").status_code == 200
    yield server
    server.unload("sowol")


def test_both_demo_models_load_continue_their_poems_and_unload(server: Server) -> None:
    answers = {}
    for name, prompt in (("sowol", "나 보기가 역겨워"), ("dongju", "죽는 날까지 하늘을 우러러")):
        loaded = server.load(name)
        assert (loaded.status_code, loaded.json()) == (200, {"status": "Workers scaled"})
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 40}}
        answers[name] = server.predict(name, body).json()["generated_text"]
    assert answers["sowol"].lstrip().startswith("가실 때에는")
    assert answers["dongju"].lstrip().startswith("한 점 부끄럼이 없기를")
    listed = server.get("/models", management=True).json()["models"]
    assert sorted(model["modelName"] for model in listed) == ["dongju", "sowol"]
    for name in answers:
        gone = server.unload(name)
        assert gone.status_code == 200
        assert gone.json() == {"status": f'Model "{name}" unregistered'}
    assert server.get("/models", management=True).json() == {"models": []}
    eventually(lambda: not server.descendants("model_service_worker"))


JSON = "application/json"


@pytest.mark.parametrize(
    ("body", "content_type", "status", "names"),
    [
        ('{"inputs": "a", "parameters": {"온도": 1}}'.encode(), JSON, 400, "온도"),
        (('"' + "가 나 다 " * 2000 + '"').encode(), JSON, 413, "tokens"),
        ("가".encode("euc-kr"), "text/plain; charset=euc-kr", 415, "euc-kr"),
        (b"inputs=a", "application/x-www-form-urlencoded", 415, "curl"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_the_worker_lives(
    sowol: Server, body: bytes, content_type: str, status: int, names: str
) -> None:
    workers = {p.pid for p in sowol.descendants("model_service_worker")}
    answer = sowol.predict("sowol", body, **{"Content-Type": content_type})
    assert error(answer)[0] == status
    assert names in answer.json()["message"]
    good = sowol.predict("sowol", {"inputs": "가", "parameters": {"max_new_tokens": 1}})
    assert good.status_code == 200
    assert not {p.pid for p in sowol.descendants("model_service_worker")} - workers
