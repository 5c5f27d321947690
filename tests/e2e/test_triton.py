"""Triton's own client over HTTP and gRPC, as KServe and Seldon Core call a server."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from serving.api.grpc.inference import SERVICE
from serving.api.grpc.messages import message
from tests.e2e.server import WIDE_S, Server, eventually
from tests.e2e.stores import ENDLESS_TOKENS, endless, greedy, running, small
from tests.handlers.tensors.graphs import TinyLM, identity

PROMPT = "나는 오늘"
LM = TinyLM()
IDS = np.array([[3, 14, 15, 9, 2]])


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    small(clean.store / "spring", 1)
    small(clean.store / "시" / "봄", 2)
    endless(clean.store / "slow")
    LM.save(clean.store / "gpt2" / "10" / "model.onnx")
    identity(clean.store / "texts" / "model.onnx", TensorProto.STRING, ["n"])
    return clean


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        yield client


def given(array: Any, name: str = "text", kind: str = "BYTES", by: Any = tritonclient.grpc) -> Any:
    tensor = by.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def prompt(text: str = PROMPT, by: Any = tritonclient.grpc) -> Any:
    return given(np.array([text.encode()], object), by=by)


def generated(result: Any) -> str:
    (made,) = result.as_numpy("generated_text")
    return made.decode() if isinstance(made, bytes) else str(made)


def refused(call: Any) -> tuple[str, str]:
    """The status and the message."""
    with pytest.raises(InferenceServerException) as caught:
        call()
    return str(caught.value.status()).removeprefix("StatusCode."), str(caught.value.message())


class Either:
    """The client of one transport; `told` gives what it answers as the protocol's JSON."""

    def __init__(self, module: Any, address: str) -> None:
        self.module, self.client = module, module.InferenceServerClient(address)
        self.as_json = {"as_json": True} if module is tritonclient.grpc else {}

    def told(self, what: str, *arguments: str) -> Any:
        return getattr(self.client, f"get_{what}")(*arguments, **self.as_json)

    def config(self, name: str) -> Any:
        found = self.told("model_config", name)
        return found["config"] if self.as_json else found

    def statistics(self, name: str = "") -> dict[str, Any]:
        return {
            stat["name"]: stat for stat in self.told("inference_statistics", name)["model_stats"]
        }

    def status(self, http: str, grpc: str) -> str:
        return grpc if self.as_json else http


@pytest.fixture(params=["http", "grpc"])
def either(server: Server, request: pytest.FixtureRequest) -> Iterator[Either]:
    if request.param == "grpc":
        made = Either(tritonclient.grpc, server.grpc_address)
    else:
        made = Either(tritonclient.http, f"127.0.0.1:{server.port}")
    yield made
    made.client.close()


def test_the_server_lives_and_tells_what_it_is(either: Either) -> None:
    assert either.client.is_server_live()
    assert either.client.is_server_ready()
    told = either.told("server_metadata")
    assert told["name"] == "kogpt2-serving"
    assert {"model_repository", "statistics", "generate"} <= set(told["extensions"])


def test_a_load_that_cannot_be_had_says_why(either: Either) -> None:
    status, said = refused(lambda: either.client.load_model("없음"))
    assert status == either.status("404", "NOT_FOUND")
    assert "there is no model 없음" in said
    told = refused(lambda: either.client.unload_model("없음"))
    assert told == (either.status("404", "NOT_FOUND"), "Model not found: 없음")
    _, said = refused(lambda: either.client.load_model("spring", config="{}"))
    assert "parameters.config is not known here" in said


def test_a_model_that_has_changed_in_the_store_is_loaded_anew(
    server: Server, either: Either
) -> None:
    texts = set()
    for seed in (5, 7):
        small(server.store / "changing", seed)
        either.client.load_model("changing")
        texts.add(generated(either.client.infer("changing", [prompt(by=either.module)])))
    assert len(texts) == 2
    # A broken version takes nothing away.
    (server.store / "changing" / "config.json").write_text("{")
    status, _ = refused(lambda: either.client.load_model("changing"))
    assert status == either.status("400", "INVALID_ARGUMENT")
    assert generated(either.client.infer("changing", [prompt(by=either.module)])) in texts
    either.client.unload_model("changing")
    shutil.rmtree(server.store / "changing")


def test_metadata_and_configuration_agree(either: Either) -> None:
    for name in ("gpt2", "spring"):
        told, config = either.told("model_metadata", name), either.config(name)
        for side in ("input", "output"):
            assert [t["name"] for t in told[f"{side}s"]] == [t["name"] for t in config[side]]
    assert [t["name"] for t in told["inputs"]] == ["text"]
    assert config["input"][0]["data_type"] == "TYPE_STRING"
    assert (told["versions"], told["platform"]) == (["1"], "kogpt2")
    if either.as_json:  # only gRPC streams
        assert config["model_transaction_policy"]["decoupled"]
    tensors = either.config("gpt2")
    assert tensors.get("max_batch_size", 0) == 0
    assert not tensors.get("model_transaction_policy", {}).get("decoupled")
    assert [int(size) for size in tensors["output"][0]["dims"]] == [-1, -1, LM.vocab]


def test_a_text_goes_in_and_out_as_bytes(server: Server, either: Either) -> None:
    parameters, client = {"max_new_tokens": 9}, either.client
    for name in ("spring", "시/봄"):
        given = [prompt(by=either.module)]
        answer = client.infer(name, given, request_id="요청 1", parameters=parameters)
        assert generated(answer) == greedy(server, name, 9)
        assert answer.as_numpy("tokens").tolist() == [9]
        assert answer.as_numpy("finish_reason").tolist() == [b"length"]
        head = answer.get_response(**either.as_json)
        assert (head["id"], head["model_name"]) == ("요청 1", name)
    only = [either.module.InferRequestedOutput("tokens")]
    answer = client.infer("spring", given, outputs=only)
    outputs = answer.get_response(**either.as_json)["outputs"]
    assert [output["name"] for output in outputs] == ["tokens"]


@pytest.mark.parametrize("binary", [(True, False), (False, True), (False, False)])
def test_inputs_and_outputs_may_be_bytes_or_json(server: Server, binary: tuple[bool, bool]) -> None:
    text = tritonclient.http.InferInput("text", [1], "BYTES")
    text.set_data_from_numpy(np.array([PROMPT.encode()], object), binary_data=binary[0])
    only = [tritonclient.http.InferRequestedOutput("generated_text", binary_data=binary[1])]
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        found = client.infer("spring", [text], outputs=only, parameters={"max_new_tokens": 9})
    assert generated(found) == greedy(server, "spring", 9)


def test_tensors_go_in_and_out(either: Either) -> None:
    both = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    tensors = [given(array, name, "INT64", either.module) for name, array in both.items()]
    answer = either.client.infer("gpt2", tensors, model_version="10")
    np.testing.assert_allclose(answer.as_numpy("logits"), LM.logits(IDS), atol=1e-4)
    told = refused(lambda: either.client.infer("gpt2", tensors, model_version="1"))
    assert told == (either.status("404", "NOT_FOUND"), "Model gpt2 has version 10, not 1")
    status, said = refused(lambda: either.client.infer("gpt2", tensors[:1]))
    assert status == either.status("400", "INVALID_ARGUMENT")
    assert "attention_mask" in said


def test_texts_go_in_and_out_of_a_graph(either: Either) -> None:
    texts = np.array(["산에는 꽃 피네".encode(), b"", "🌸".encode()], object)
    answer = either.client.infer("texts", [given(texts, "x", by=either.module)])
    assert answer.as_numpy("y").tolist() == texts.tolist()


def test_requests_are_counted(server: Server, either: Either) -> None:
    either.client.load_model("spring")
    before = either.statistics("spring")["spring"]
    for _ in range(2):
        either.client.infer("spring", [prompt(by=either.module)], parameters={"max_new_tokens": 1})
    body = {"text_input": PROMPT}
    assert server.post("/v2/models/spring/generate", json=body).status_code == 200
    refused(lambda: either.client.infer("spring", [prompt("가" * 3000, either.module)]))
    after = either.statistics("spring")["spring"]
    for name, more in (("success", 3), ("fail", 1), ("queue", 3)):
        was, now = (int(s["inference_stats"][name].get("count", 0)) for s in (before, after))
        assert now - was == more, name
    assert int(after["inference_count"]) - int(before.get("inference_count", 0)) == 3
    assert int(after["execution_count"]) > int(before.get("execution_count", 0))
    assert "spring" in either.statistics()


# Over gRPC alone


class Stream:
    """A call of ModelStreamInfer, and what came back."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: self._answers.put((result, error)))

    def ask(self, name: str, given: Any = None, id: str = "", **parameters: Any) -> None:
        self.client.async_stream_infer(
            name, [given or prompt()], request_id=id, parameters=parameters
        )

    def next(self) -> tuple[Any, Any]:
        return self._answers.get(timeout=WIDE_S)

    def texts(self, count: int) -> dict[str, list[str]]:
        """The pieces of so many requests, by id, each to its end."""
        found: dict[str, list[str]] = {}
        while count:
            result, error = self.next()
            assert error is None
            response = result.get_response()
            found.setdefault(response.id, []).append(generated(result))
            count -= response.parameters["triton_final_response"].bool_param
        return found


def test_kserves_clients_name_a_model_elsewhere(server: Server) -> None:
    """Their RepositoryModelLoadRequest has the name in the field that is a repository's here."""
    with grpc.insecure_channel(server.grpc_address) as channel:

        def call(name: str, answers: str) -> Any:
            method = channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=service_pb2.RepositoryModelLoadRequest.SerializeToString,
                response_deserializer=message(f"inference.{answers}").FromString,
            )
            request = service_pb2.RepositoryModelLoadRequest(repository_name="시/봄")
            return method(request, timeout=WIDE_S)

        loaded = call("RepositoryModelLoad", "RepositoryModelLoadResponse")
        assert (loaded.model_name, loaded.isLoaded) == ("시/봄", True)
        unloaded = call("RepositoryModelUnload", "RepositoryModelUnloadResponse")
        assert (unloaded.model_name, unloaded.isUnloaded) == ("시/봄", True)


def test_a_stream_is_the_text_token_by_token(client: Any, server: Server) -> None:
    stream = Stream(client)
    stream.ask("시/봄", max_new_tokens=16)
    pieces, counted, reasons = [], 0, []
    while not reasons or not reasons[-1]:
        result, error = stream.next()
        assert error is None
        pieces.append(generated(result))
        counted += int(result.as_numpy("tokens")[0])
        reasons.append(result.as_numpy("finish_reason")[0].decode())
    assert "".join(pieces) == greedy(server, "시/봄", 16)
    assert (counted, len(pieces), reasons[-1]) == (16, 16, "length")
    stream.ask("시/봄", max_new_tokens=16, stream=False)
    result, error = stream.next()
    assert generated(result) == "".join(pieces)


def test_a_requests_own_timeout_ends_it(client: Any, server: Server) -> None:
    client.load_model("slow")
    limits: Any = {"parameters": {"max_new_tokens": ENDLESS_TOKENS}, "timeout": 300_000}
    status, said = refused(lambda: client.infer("slow", [prompt()], **limits))
    assert (status, " within " in said) == ("DEADLINE_EXCEEDED", True)  # of the gateway or engine
    stream = Stream(client)
    client.async_stream_infer("slow", [prompt()], **limits)
    error = None
    for _ in range(ENDLESS_TOKENS):
        _, error = stream.next()
        if error is not None:
            break
    assert "no answer within 0.3 s" in str(error)
    eventually(lambda: running(server) == 0)
    stream.ask("spring", max_new_tokens=4, content_type="str")  # the call goes on; a hint
    assert "".join(stream.texts(1)[""]) == greedy(server, "spring", 4)
