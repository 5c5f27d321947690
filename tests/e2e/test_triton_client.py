"""Triton's own client lists, loads, asks and counts models, as KServe and Seldon Core do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import requests
import tritonclient.http as triton
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from tests.e2e.server import Server
from tests.e2e.stores import endless, serving, small, text
from tests.handlers.tensors.graphs import identity

PROMPT = "나는 오늘"
MANAGE = "manage-me"
TOKENS = {"MANAGEMENT_TOKEN": MANAGE}
HEADERS = {"Authorization": f"Bearer {MANAGE}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("triton")
    small(folder / "store" / "spring", 1)
    small(folder / "store" / "봄", 2)
    endless(folder / "store" / "slow")
    identity(folder / "store" / "texts" / "model.onnx", TensorProto.STRING, ["n"])
    with serving(folder / "run", folder / "store", **TOKENS) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60)
    yield client
    client.close()


def state(client: Any, name: str) -> str:
    entries = client.get_model_repository_index(headers=HEADERS)
    found: str = next(entry["state"] for entry in entries if entry["name"] == name)
    return found


def refused(call: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call()
    return str(caught.value)


def post(server: Server, name: str, route: str, body: Any, **more: Any) -> requests.Response:
    """As curl sends it: no content type that says JSON."""
    url = server.url(f"/v2/models/{quote(name)}/{route}")
    return requests.post(url, data=json.dumps(body).encode(), timeout=60, **more)


def test_what_the_store_has_is_listed_loaded_and_unloaded(client: Any) -> None:
    index = client.get_model_repository_index(headers=HEADERS)
    assert {entry["name"] for entry in index} == {"spring", "봄", "slow", "texts"}
    client.load_model("spring", headers=HEADERS)
    assert state(client, "spring") == "READY"
    assert client.is_model_ready("spring")
    client.load_model("spring", headers=HEADERS)
    client.unload_model("spring", headers=HEADERS)
    assert state(client, "spring") == "UNAVAILABLE"
    assert not client.is_model_ready("spring")
    assert "Model not found: spring" in refused(
        lambda: client.unload_model("spring", headers=HEADERS)
    )


def test_a_load_that_cannot_be_had_says_why(client: Any) -> None:
    assert "there is no model 없음" in refused(lambda: client.load_model("없음", HEADERS))
    message = refused(lambda: client.load_model("spring", headers=HEADERS, config="{}"))
    assert "parameters.config is not known here" in message


def test_a_model_that_has_changed_in_the_store_is_loaded_anew(
    client: Any, server: Server, tmp_path: Path
) -> None:
    store = Path(server.run_dir).parents[1] / "store" / "봄"
    body = {"text_input": PROMPT}
    client.load_model("봄", headers=HEADERS)
    before = post(server, "봄", "generate", body).json()["text_output"]
    new = small(tmp_path / "new", 7)
    for file in new.iterdir():
        shutil.copyfile(file, store / file.name)
    client.load_model("봄", headers=HEADERS)
    assert post(server, "봄", "generate", body).json()["text_output"] != before


def test_a_text_goes_in_and_out_as_bytes(client: Any, server: Server) -> None:
    wanted = text(server.predict("spring", {"inputs": PROMPT, "parameters": {"max_new_tokens": 9}}))
    given = triton.InferInput("text", [1], "BYTES")
    for binary in (True, False):
        given.set_data_from_numpy(np.array([PROMPT.encode()], object), binary_data=binary)
        asked = [triton.InferRequestedOutput("generated_text", binary_data=binary)]
        found = client.infer("spring", [given], outputs=asked, parameters={"max_new_tokens": 9})
        (out,) = found.as_numpy("generated_text")
        assert (out.decode() if isinstance(out, bytes) else out) == wanted


def test_metadata_and_configuration_agree(client: Any) -> None:
    assert {"model_repository", "statistics", "generate"} <= set(
        client.get_server_metadata()["extensions"]
    )
    told, configured = client.get_model_metadata("texts"), client.get_model_config("texts")
    assert [t["name"] for t in configured["input"]] == [t["name"] for t in told["inputs"]]
    assert configured["input"][0]["data_type"] == "TYPE_STRING"
    assert configured["max_batch_size"] == 0


def test_requests_are_counted(client: Any, server: Server) -> None:
    def stat() -> Any:
        (found,) = client.get_inference_statistics("spring")["model_stats"]
        return found

    client.load_model("spring", headers=HEADERS)
    before = stat()
    for _ in range(3):
        assert post(server, "spring", "generate", {"text_input": PROMPT}).status_code == 200
    assert post(server, "spring", "generate", {"text_input": "가" * 3000}).status_code == 413
    after = stat()
    for name, more in (("success", 3), ("fail", 1), ("queue", 3)):
        counts = (s["inference_stats"][name]["count"] for s in (before, after))
        assert -next(counts) + next(counts) == more
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] > before["execution_count"]
    assert after["last_inference"] >= before["last_inference"] > 0
    everything = client.get_inference_statistics()["model_stats"]
    assert "spring" in {found["name"] for found in everything}


def test_a_text_is_generated_as_the_servers_own_route_does_it(server: Server) -> None:
    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 16}}
    wanted = text(server.predict("spring", asked))
    body = {"id": "요청 1", "text_input": PROMPT, "parameters": {"max_tokens": 16}}
    head = {"id": "요청 1", "model_name": "spring", "model_version": "1"}
    for path in ("generate", "versions/1/generate"):
        answer = post(server, "spring", path, body)
        assert answer.json() == {**head, "text_output": wanted}
    beside = {"text_input": PROMPT, "max_new_tokens": 16, "exclude_input_in_output": False}
    assert post(server, "spring", "generate", beside).json()["text_output"] == PROMPT + wanted
    several = {"text_input": PROMPT, "num_return_sequences": 3, "seed": 4, "max_tokens": 5}
    assert len(post(server, "spring", "generate", several).json()["text_output"]) == 3


@pytest.mark.parametrize(
    "more",
    [
        {"bad_words": "", "stop_words": ""},  # TensorRT-LLM's
        {"bad_words": [], "stop_words": [], "timeout": 60_000_000, "priority": 0},
        {"parameters": {"stream": False, "exclude_input_in_output": True}},  # vLLM's
        {"text_input": [PROMPT], "stream": False},
    ],
)
def test_the_quick_starts_of_llm_backends_are_answered(
    server: Server, more: dict[str, Any]
) -> None:
    wanted = post(server, "spring", "generate", {"text_input": PROMPT, "max_tokens": 9}).json()
    answer = post(server, "spring", "generate", {"text_input": PROMPT, "max_tokens": 9, **more})
    assert answer.json() == wanted


def test_stop_words_end_a_text(server: Server) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 9}
    whole = post(server, "spring", "generate", asked).json()["text_output"]
    for words in (whole[4:6], [whole[4:6]]):
        answer = post(server, "spring", "generate", {**asked, "stop_words": words})
        assert answer.json()["text_output"] == whole[: whole.index(whole[4:6])]


def events(answer: requests.Response) -> list[str]:
    """The texts of a stream."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *found, rest = answer.content.decode("utf-8").split("\n\n")
    assert rest == ""
    return [json.loads(event.removeprefix("data: "))["text_output"] for event in found]


def test_stream_says_whether_a_text_is_sent_in_pieces(server: Server) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 9}
    wanted = post(server, "spring", "generate", asked).json()["text_output"]
    pieces = events(post(server, "spring", "generate", {**asked, "stream": True}))
    assert "".join(pieces) == wanted
    assert len(pieces) > 1
    once = {**asked, "parameters": {"stream": False}}
    assert events(post(server, "spring", "generate_stream", once)) == [wanted]


def test_a_stream_is_the_text_in_events(server: Server) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 16, "exclude_input_in_output": False}
    wanted = post(server, "spring", "generate", asked).json()["text_output"]
    answer = post(server, "spring", "generate_stream", {**asked, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.content.decode("utf-8").split("\n\n")
    assert rest == ""
    values = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(value["text_output"] for value in values) == wanted
    assert set(values[0]) == {"model_name", "model_version", "text_output"}


@pytest.mark.parametrize(
    ("route", "body", "status", "said"),
    [
        ("generate", {}, 400, "text_input"),
        ("generate", {"text_input": 1}, 400, "text_input"),
        ("generate", {"text_input": PROMPT, "id": 1}, 400, "id must be"),
        ("generate", {"text_input": PROMPT, "온도": 1}, 400, "온도 is not known"),
        ("generate", {"text_input": PROMPT, "parameters": [1]}, 400, "parameters"),
        ("generate", {"text_input": [PROMPT, PROMPT]}, 400, "text_input"),
        ("generate", {"text_input": PROMPT, "stream": "아니"}, 400, "stream must be"),
        ("generate", {"text_input": PROMPT, "bad_words": [1]}, 400, "bad_words must be a string"),
        ("generate", {"text_input": PROMPT, "stop_words": [1]}, 400, "stop"),
        ("generate_stream", {"text_input": PROMPT, "parameters": {"top_p": 2}}, 400, "top_p"),
        (
            "generate_stream",
            {"text_input": PROMPT, "num_return_sequences": 2, "seed": 1},
            400,
            "one",
        ),
        ("generate", [], 400, "must be a JSON object"),
        ("generate_stream", {"text_input": "가" * 3000}, 413, "context"),
        ("versions/7/generate", {"text_input": PROMPT}, 404, "version"),
        ("trace/setting", {}, 404, "no traces here"),
    ],
)
def test_what_is_wrong_is_said_in_the_protocols_shape(
    server: Server, route: str, body: Any, status: int, said: str
) -> None:
    answer = post(server, "spring", route, body)
    assert (answer.status_code, set(answer.json())) == (status, {"error"})
    assert said in answer.json()["error"]


def test_a_model_of_tensors_generates_no_text(server: Server) -> None:
    answer = post(server, "texts", "generate", {"text_input": PROMPT})
    assert (answer.status_code, set(answer.json())) == (400, {"error"})
    assert "/predictions/texts" in answer.json()["error"]
