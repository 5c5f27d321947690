"""The Open Inference Protocol's routes, over a graph that tokens go into and logits come out of."""

from __future__ import annotations

import json
import re
import struct
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import requests
import tritonclient.http as triton
from onnx import TensorProto

from tests.e2e.server import Server
from tests.e2e.stores import SHORT, events, greedy, small, text
from tests.e2e.test_triton import given
from tests.handlers.tensors.graphs import TinyLM, identity

LM = TinyLM()
IDS = np.array([[3, 14, 15, 9, 2]])
GREEDY = 12


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    store = clean.store
    LM.save(store / "봄" / "1" / "model.onnx")
    TinyLM(seed=1).save(store / "two" / "1" / "model.onnx")
    LM.save(store / "two" / "10" / "model.onnx")
    identity(store / "texts" / "model.onnx", TensorProto.STRING, ["n"])
    identity(store / "pairs" / "model.onnx", TensorProto.INT64, ["n", 2])
    identity(store / "grid" / "model.onnx", TensorProto.INT64, ["n", "m"])
    (store / "broken").mkdir()
    (store / "broken" / "model.onnx").write_bytes(b"no graph")
    small(store / "text-model")
    return clean


def tensor(name: str, array: Any, **more: Any) -> dict[str, Any]:
    values = np.asarray(array)
    datatype = {"i": "INT64", "U": "BYTES"}[values.dtype.kind]
    shape = list(values.shape)
    return {"name": name, "shape": shape, "datatype": datatype, "data": values.tolist(), **more}


def feed(ids: Any = IDS, **more: Any) -> dict[str, Any]:
    mask = np.ones_like(np.asarray(ids))
    return {"inputs": [tensor("input_ids", ids), tensor("attention_mask", mask)], **more}


def infer(server: Server, name: str, body: Any, **headers: str) -> requests.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.post(f"/v2/models/{quote(name)}/infer", data=data, headers=headers)


def error(answer: requests.Response) -> tuple[int, str]:
    """An error in the protocol's shape."""
    assert set(answer.json()) == {"error"}, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert "Traceback" not in answer.text
    return answer.status_code, answer.json()["error"]


def test_a_model_is_ready_once_a_request_has_loaded_it(server: Server) -> None:
    assert server.get("/v2/health/live").json() == {"live": True}
    assert server.get("/v2/health/ready").json() == {"ready": True}
    server.unload(quote("봄"))
    path = f"/v2/models/{quote('봄')}"
    status, message = error(server.get(f"{path}/ready"))
    assert (status, "a request to it loads it" in message) == (503, True)
    assert server.get(path).json() == {
        "name": "봄",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]},
        ],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, -1, LM.vocab]}],
    }
    assert server.get(f"{path}/ready").json() == {"name": "봄", "ready": True}


@pytest.mark.parametrize("route", ["/v2/models/{}/infer", "/models/{}/invoke", "/predictions/{}"])
def test_a_client_that_takes_the_argmax_writes_the_same_text(server: Server, route: str) -> None:
    """As clients do who tokenize by themselves: a request for each token."""
    path = route.format(quote("봄"))
    ids, wanted = IDS, IDS
    for _ in range(GREEDY):
        (logits,) = server.post(path, json=feed(ids)).json()["outputs"]
        last = np.array(logits["data"]).reshape(logits["shape"])[:, -1]
        ids = np.append(ids, last.argmax(-1)[:, None], axis=1)
        best = LM.logits(wanted)[:, -1].argmax(-1)
        wanted = np.append(wanted, best[:, None], axis=1)
    assert ids.tolist() == wanted.tolist()
    assert len(set(ids[0, IDS.shape[1] :].tolist())) > 2  # a text, not one token for ever


def test_tensors_may_be_sent_as_bytes_the_way_sagemaker_does(server: Server) -> None:
    tensors = [
        given(array, name, "INT64", triton)
        for name, array in (("input_ids", IDS), ("attention_mask", np.ones_like(IDS)))
    ]
    body, size = triton.InferenceServerClient.generate_request_body(tensors)
    kind = "application/vnd.sagemaker-triton.binary+json;json-header-size="
    headers = {"Content-Type": f"{kind}{size}"}
    headers["X-Amzn-SageMaker-Target-Model"] = "two.tar.gz"
    answer = server.post("/invocations", data=body, headers=headers)
    told, _, length = answer.headers["content-type"].rpartition("=")
    assert told + "=" == kind
    found = triton.InferenceServerClient.parse_response_body(
        answer.content, header_length=int(length)
    )
    np.testing.assert_allclose(found.as_numpy("logits"), LM.logits(IDS), atol=1e-4)


def test_a_text_model_takes_a_text(server: Server) -> None:
    """With the protocol's own hints, and the name that KServe's client repeats in the body."""
    said = tensor("text", ["나는 오늘"])
    wanted = text(server.predict("text-model", SHORT))
    hints = {"timeout": 60_000_000, "priority": 1, "content_type": "str"}
    parameters = {**SHORT["parameters"], **hints}
    asked = {"inputs": [said], "model_name": "text-model", "parameters": parameters}
    body = infer(server, "text-model", asked).json()
    assert (body["model_name"], body["model_version"]) == ("text-model", "1")
    outputs = {output["name"]: output["data"] for output in body["outputs"]}
    assert outputs == {"generated_text": [wanted], "tokens": [16], "finish_reason": ["length"]}
    several = {"num_return_sequences": 3, "seed": 1, "max_new_tokens": 4}
    asked = {"inputs": [said], "parameters": several, "outputs": [{"name": "tokens"}], "id": "둘"}
    body = infer(server, "text-model", asked).json()
    assert body["id"] == "둘"
    (tokens,) = body["outputs"]
    assert (tokens["shape"], len(tokens["data"])) == ([3], 3)
    told = server.get("/v2/models/text-model").json()
    assert told["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [1]}]
    assert [output["name"] for output in told["outputs"]] == list(outputs)


def raw(server: Server, name: str, body: bytes) -> requests.Response:
    """Send one tensor's bytes without JSON, as Triton's clients do."""
    return infer(server, name, body, **{"Inference-Header-Content-Length": "0"})


def outputs(answer: requests.Response) -> dict[str, bytes]:
    """The bytes of each output of a binary answer, by name."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    end = int(answer.headers["Inference-Header-Content-Length"])
    found = {}
    for output in json.loads(answer.content[:end])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = answer.content[end : end + size]
        end += size
    return found


def test_the_body_may_be_the_bytes_of_the_only_input(server: Server) -> None:
    length = len(wanted := text(server.predict("text-model", {"inputs": "나는 오늘"})).encode())
    found = outputs(raw(server, "text-model", "나는 오늘".encode()))
    assert found["generated_text"] == struct.pack("<I", length) + wanted
    pairs = np.arange(6).tobytes()
    assert outputs(raw(server, "pairs", pairs)) == {"y": pairs}
    assert outputs(raw(server, "texts", "산에는".encode()))["y"][4:].decode() == "산에는"


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("pairs", 24, "24 bytes without JSON must be"),
        ("grid", 32, "the model takes x INT64 [n, m]"),
        ("봄", 40, "the model takes input_ids INT64 [batch, sequence], attention_mask"),
    ],
)
def test_bytes_whose_shape_is_not_known_are_refused(
    server: Server, name: str, size: int, said: str
) -> None:
    status, message = error(raw(server, name, bytes(size)))
    assert (status, said in message) == (400, True), message


@pytest.mark.parametrize("route", ["infer", "generate", "generate_stream"])
def test_a_request_has_no_longer_than_its_own_timeout(server: Server, route: str) -> None:
    """In microseconds, as Triton counts it."""
    body = {"inputs": [tensor("text", ["나는"])]} if route == "infer" else {"text_input": "나는"}
    sent = {**body, "parameters": {"timeout": 1}}
    answer = server.post(f"/v2/models/text-model/{route}", json=sent)
    if answer.status_code == 200:  # a stream that had its first token already
        assert route == "generate_stream"
        # by the engine or at the gateway's deadline, whichever is first
        assert re.search("the answer was not (finished within|ready in time)", answer.text)
        return
    assert error(answer)[0] == 504  # by the gateway or the engine, whichever is first


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v2/models/text-model/infer", 405, "takes POST"),
        ("GET", "/v2/models/text-model/versions/1/generate", 405, "takes POST"),
        ("PUT", "/v2/models/text-model", 405, "takes GET, HEAD"),
        ("POST", "/v2/models/text-model/ready", 405, "takes GET, HEAD"),
        ("DELETE", "/v2/repository/index", 405, "takes POST"),
        ("PROPFIND", "/v2/nothing", 404, "not found"),
        ("GET", "/v2/models/없음/ready", 404, "없음"),
    ],
)
def test_a_wrong_method_or_path_is_said_in_the_protocols_shape(
    server: Server, method: str, path: str, status: int, said: str
) -> None:
    answer = server.request(method, path)
    assert (answer.status_code, "Allow" in answer.headers) == (status, status == 405)
    assert said in error(answer)[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": [tensor("x", ["가"])]}, "inputs must be one text"),
        ({"inputs": [tensor("text", ["가", "나"])]}, "inputs must be one text"),
        ({"inputs": [tensor("text", [1])]}, "inputs must be one text"),
        ({"inputs": [tensor("text", [" "])]}, "inputs is empty"),
        ({"outputs": [{"name": "모름"}]}, "known are generated_text, tokens, finish_reason"),
        ({"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES"}]}, "must be one text"),
        ({"parameters": [1]}, "parameters must be a JSON object"),
        ({"outputs": [{"name": "tokens", "parameters": [1]}]}, "must be a JSON object"),
        ({"inputs": [tensor("text", ["가"], parameters=[1])], "id": 5}, "id must be a string"),
        ({"parameters": {"온도": 1}}, "parameters.온도 is not known"),
        ({"모름": 1}, "모름 is not known"),
        ({"id": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_a_text_model_tells_what_is_wrong(
    server: Server, change: dict[str, Any], said: str
) -> None:
    body = {"inputs": [tensor("text", ["가"])], **change}
    status, message = error(infer(server, "text-model", body))
    assert (status, said in message) == (400, True), message


@pytest.mark.parametrize(
    ("name", "body", "status", "said"),
    [
        ("없음", feed(), 404, "없음"),
        ("broken", feed(), 400, "model.onnx cannot be loaded"),
        ("봄", b"{", 400, "not JSON"),
        ("봄", feed(IDS[0]), 400, "shape [5], must be INT64 [batch, sequence]"),
    ],
)
def test_errors_say_what_is_right(
    server: Server, name: str, body: Any, status: int, said: str
) -> None:
    answer = infer(server, name, body)
    assert error(answer)[0] == status
    assert said in error(answer)[1]


# Triton's generate routes, as its LLM backends' quick starts use them

PROMPT = "나는 오늘"
ASKED = {"text_input": PROMPT, "max_tokens": 9}


def post(server: Server, route: str, body: Any, name: str = "text-model") -> requests.Response:
    """Post as curl does, without a content type of JSON."""
    return server.post(f"/v2/models/{name}/{route}", data=json.dumps(body).encode())


def generate(server: Server, **more: Any) -> Any:
    return post(server, "generate", {**ASKED, **more}).json()["text_output"]


def test_a_text_is_generated_as_the_servers_own_route_does_it(server: Server) -> None:
    wanted = greedy(server, "text-model")
    body = {"id": "요청 1", "text_input": PROMPT, "parameters": {"max_tokens": 16}}
    head = {"id": "요청 1", "model_name": "text-model", "model_version": "1"}
    for path in ("generate", "versions/1/generate"):
        answer = post(server, path, body)
        assert answer.json() == {**head, "text_output": wanted}
    beside = {"text_input": PROMPT, "max_new_tokens": 16, "exclude_input_in_output": False}
    assert post(server, "generate", beside).json()["text_output"] == PROMPT + wanted
    assert len(generate(server, num_return_sequences=3, seed=4)) == 3


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
    assert generate(server, **more) == generate(server)


def test_stop_words_end_a_text(server: Server) -> None:
    whole = generate(server)
    for words in (whole[4:6], [whole[4:6]]):
        assert generate(server, stop_words=words) == whole[: whole.index(whole[4:6])]


@pytest.mark.parametrize(
    ("route", "more", "is_cut"),
    [
        ("generate", {"stream": True}, True),
        ("generate_stream", {"stream": True, "exclude_input_in_output": False}, True),
        ("generate_stream", {"parameters": {"stream": False}}, False),
    ],
)
def test_a_stream_is_the_text_in_events(
    server: Server, route: str, more: dict[str, Any], is_cut: bool
) -> None:
    wanted = ("exclude_input_in_output" in more) * PROMPT + generate(server)
    values = [json.loads(e) for e in events(post(server, route, {**ASKED, **more}))]
    assert "".join(value["text_output"] for value in values) == wanted
    assert (len(values) > 1) == is_cut
    assert set(values[0]) == {"model_name", "model_version", "text_output"}


@pytest.mark.parametrize(
    ("route", "body", "status", "said"),
    [
        ("generate", {}, 400, "text_input"),
        ("generate", {"text_input": 1}, 400, "text_input"),
        ("generate", {"text_input": PROMPT, "id": 1}, 400, "id must be"),
        ("generate", {"text_input": PROMPT, "온도": 1}, 400, "온도 is not known"),
        ("generate", {"text_input": [PROMPT, PROMPT]}, 400, "text_input"),
        ("generate", {"text_input": PROMPT, "stream": "아니"}, 400, "stream must be"),
        ("generate", {"text_input": PROMPT, "bad_words": [1]}, 400, "bad_words must be a string"),
        ("generate", {"text_input": PROMPT, "stop_words": [1]}, 400, "stop"),
        ("generate_stream", {"text_input": PROMPT, "parameters": {"top_p": 2}}, 400, "top_p"),
        ("generate_stream", {**ASKED, "num_return_sequences": 2, "seed": 1}, 400, "one"),
        ("generate", [], 400, "must be a JSON object"),
        ("generate_stream", {"text_input": "가" * 3000}, 413, "context"),
        ("versions/7/generate", {"text_input": PROMPT}, 404, "version"),
        ("trace/setting", {}, 404, "no trace settings"),
    ],
)
def test_what_is_wrong_is_said_in_the_protocols_shape(
    server: Server, route: str, body: Any, status: int, said: str
) -> None:
    answer = post(server, route, body)
    assert error(answer)[0] == status
    assert said in error(answer)[1]


def test_a_model_of_tensors_generates_no_text(server: Server) -> None:
    answer = post(server, "generate", {"text_input": PROMPT}, "texts")
    assert error(answer)[0] == 400
    assert "/predictions/texts" in error(answer)[1]
