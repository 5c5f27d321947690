"""The life of a model over HTTP: loaded, listed, asked, unloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import Server, eventually
from tests.e2e.stores import error


@pytest.fixture(scope="module")
def sowol(server: Server) -> Iterator[Server]:
    """A server with `sowol` loaded, once for all tests that call it."""
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


PROMPT = "나 보기가 역겨워"
ASCII = json.dumps(PROMPT).encode("ascii")  # as a JSON serializer writes it, with \u escapes


def test_the_object_form_says_how_the_answer_ended(sowol: Server) -> None:
    def said(**parameters: Any) -> dict[str, Any]:
        answer = sowol.predict("sowol", {"inputs": PROMPT, "parameters": parameters})
        assert answer.headers["content-type"] == "application/json"
        found: dict[str, Any] = answer.json()
        assert set(found) == {"generated_text", "tokens", "finish_reason", "seconds"}
        return found

    whole, cut = said()["generated_text"], said(max_new_tokens=5)
    assert (cut["tokens"], cut["finish_reason"]) == (5, "length")
    assert whole.startswith(cut["generated_text"])
    stopped = said(stop=[whole[4:6]])
    assert stopped["finish_reason"] == "stop"
    assert stopped["generated_text"] == whole[: whole.index(whole[4:6])]


def test_a_json_string_gets_the_guides_list_and_a_text_a_text(sowol: Server) -> None:
    kinds = {"Content-Type": "application/json", "Accept": "application/json"}
    text, steps, seconds = sowol.predict("sowol", ASCII, **kinds).json()
    assert text.startswith(f"{PROMPT} 가실 때에는")
    assert steps > 10
    assert 0 < seconds < 60
    plain = "text/plain; charset=utf-8"
    answer = sowol.predict("sowol", PROMPT.encode(), **{"Content-Type": plain})
    assert answer.headers["content-type"] == plain
    assert answer.content.decode("utf-8").lstrip().startswith("가실 때에는")


JSON = "application/json"


@pytest.mark.parametrize(
    ("body", "content_type", "status", "names"),
    [
        (b'{"inputs": ""}', JSON, 400, "inputs"),
        (b"", JSON, 400, "JSON"),
        (b'{"inputs": "\\ud800"}', JSON, 400, "surrogate"),
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
