"""The life of a model over HTTP: loaded, listed, asked, unloaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, eventually


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


def test_an_unknown_model_is_not_found(server: Server) -> None:
    assert server.load("없음").status_code == 404
    assert server.predict("nobody", {"inputs": "안녕"}).status_code == 404
    assert server.unload("nobody").status_code == 404


def test_the_object_form_says_how_the_answer_ended(sowol: Server) -> None:
    prompt = {"inputs": "나 보기가 역겨워", "parameters": {"max_new_tokens": 5}}
    answer = sowol.predict("sowol", prompt)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"generated_text", "tokens", "finish_reason", "seconds"}
    assert (body["tokens"], body["finish_reason"]) == (5, "length")
    whole = sowol.predict("sowol", {"inputs": prompt["inputs"], "parameters": {}}).json()
    assert whole["generated_text"].startswith(body["generated_text"])


def test_a_stop_text_ends_the_answer_before_it(sowol: Server) -> None:
    parameters = {"max_new_tokens": 40}
    prompt = {"inputs": "나 보기가 역겨워", "parameters": parameters}
    text = sowol.predict("sowol", prompt).json()["generated_text"]
    stop = text[4:6]
    stopped = sowol.predict(
        "sowol", {**prompt, "parameters": {**parameters, "stop": [stop]}}
    ).json()
    assert stopped["finish_reason"] == "stop"
    assert stopped["generated_text"] == text[: text.index(stop)]


def test_a_json_string_gets_the_guides_list(sowol: Server) -> None:
    # As a JSON serializer writes it: ASCII, with \u escapes.
    body = '"\\ub098 \\ubcf4\\uae30\\uac00 \\uc5ed\\uaca8\\uc6cc"'.encode("ascii")
    text, steps, seconds = sowol.predict(
        "sowol", body, **{"Content-Type": "application/json", "Accept": "application/json"}
    ).json()
    assert text.startswith("나 보기가 역겨워 가실 때에는")
    assert steps > 10
    assert 0 < seconds < 60


def test_text_comes_back_as_text(sowol: Server) -> None:
    body = "나 보기가 역겨워".encode()
    answer = sowol.predict("sowol", body, **{"Content-Type": "text/plain; charset=utf-8"})
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
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
    error = answer.json()
    assert answer.status_code == status, error
    assert set(error) == {"code", "type", "message"}
    assert error["code"] == status
    assert names in error["message"]
    assert "Traceback" not in answer.text
    good = sowol.predict("sowol", {"inputs": "가", "parameters": {"max_new_tokens": 1}})
    assert good.status_code == 200
    assert not {p.pid for p in sowol.descendants("model_service_worker")} - workers
