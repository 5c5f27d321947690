"""Triton's own client over gRPC, as KServe and Seldon Core call a server."""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from serving.api.grpc.inference import SERVICE
from serving.api.grpc.messages import message
from tests.e2e.server import Server, eventually, free_port
from tests.e2e.stores import ENDLESS_TOKENS, endless, running, serving, slow, small, text
from tests.handlers.tensors.graphs import TinyGPT2, identity

PROMPT = "나는 오늘"
INFER, MANAGE = "infer-me", "manage-me"
HEADERS = {"authorization": f"Bearer {INFER}"}
MANAGING = {"authorization": f"Bearer {MANAGE}"}
GPT2 = TinyGPT2()
IDS = np.array([[3, 14, 15, 9, 2]])
WIDE_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("grpc")
    small(folder / "store" / "spring", 1)
    small(folder / "store" / "시" / "봄", 2)
    endless(folder / "store" / "slow")
    GPT2.save(folder / "store" / "gpt2" / "10" / "model.onnx")
    identity(folder / "store" / "texts" / "model.onnx", TensorProto.STRING, ["n"])
    tokens = {"INFERENCE_TOKEN": INFER, "MANAGEMENT_TOKEN": MANAGE}
    with serving(folder / "run", folder / "store", GRPC_PORT=str(free_port()), **tokens) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc_address) as client:
        yield client


def prompt(text: str = PROMPT) -> Any:
    given = triton.InferInput("text", [1], "BYTES")
    given.set_data_from_numpy(np.array([text.encode()], object))
    return given


def whole(server: Server, name: str, tokens: int, text_: str = PROMPT) -> str:
    """The greedy text by the server's own route."""
    body = {"inputs": text_, "parameters": {"max_new_tokens": tokens}}
    return text(server.predict(name, body, Authorization=f"Bearer {INFER}"))


def generated(result: Any) -> str:
    (made,) = result.as_numpy("generated_text")
    return str(made.decode())


def refused(call: Any) -> tuple[str, str]:
    """The status and the message."""
    with pytest.raises(InferenceServerException) as caught:
        call()
    return str(caught.value.status()).removeprefix("StatusCode."), str(caught.value.message())


class Stream:
    """A call of ModelStreamInfer, and what came back."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(
            lambda result, error: self._answers.put((result, error)), headers=HEADERS
        )

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


def test_the_server_lives_and_tells_what_it_is(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    told = client.get_server_metadata()
    assert told.name == "kogpt2-serving"
    assert {"model_repository", "statistics"} <= set(told.extensions)


def test_what_the_store_has_is_listed_loaded_and_unloaded(client: Any) -> None:
    def state(name: str) -> str:
        index = client.get_model_repository_index(headers=HEADERS).models
        assert {m.name for m in index} == {"spring", "시/봄", "slow", "gpt2", "texts"}
        return next(str(m.state) for m in index if m.name == name)

    client.load_model("시/봄", headers=MANAGING)
    assert state("시/봄") == "READY"
    assert client.is_model_ready("시/봄", headers=HEADERS)
    client.unload_model("시/봄", headers=MANAGING)
    assert state("시/봄") == "UNAVAILABLE"
    assert not client.is_model_ready("시/봄", headers=HEADERS)
    status, said = refused(lambda: client.unload_model("시/봄", headers=MANAGING))
    assert (status, said) == ("NOT_FOUND", "Model not found: 시/봄")


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
            return method(request, metadata=tuple(MANAGING.items()), timeout=WIDE_S)

        loaded = call("RepositoryModelLoad", "RepositoryModelLoadResponse")
        assert (loaded.model_name, loaded.isLoaded) == ("시/봄", True)
        unloaded = call("RepositoryModelUnload", "RepositoryModelUnloadResponse")
        assert (unloaded.model_name, unloaded.isUnloaded) == ("시/봄", True)


def test_metadata_and_configuration_agree(client: Any) -> None:
    told = client.get_model_metadata("spring", headers=HEADERS)
    config = client.get_model_config("spring", headers=HEADERS).config
    assert [t.name for t in told.inputs] == [t.name for t in config.input] == ["text"]
    assert [t.name for t in told.outputs] == [t.name for t in config.output]
    assert config.input[0].data_type == 13  # TYPE_STRING
    assert (list(told.versions), told.platform) == (["1"], "kogpt2")
    assert config.model_transaction_policy.decoupled
    tensors = client.get_model_config("gpt2", headers=HEADERS).config
    assert not tensors.model_transaction_policy.decoupled
    assert list(tensors.output[0].dims) == [-1, -1, GPT2.vocab]


def test_a_text_goes_in_and_out_as_bytes(client: Any, server: Server) -> None:
    parameters = {"max_new_tokens": 9}
    for name in ("spring", "시/봄"):
        answer = client.infer(
            name, [prompt()], request_id="요청 1", parameters=parameters, headers=HEADERS
        )
        assert generated(answer) == whole(server, name, 9)
        assert answer.as_numpy("tokens").tolist() == [9]
        assert answer.as_numpy("finish_reason").tolist() == [b"length"]
        assert (answer.get_response().id, answer.get_response().model_name) == ("요청 1", name)
    only = [triton.InferRequestedOutput("tokens")]
    answer = client.infer("spring", [prompt()], outputs=only, headers=HEADERS)
    assert [output.name for output in answer.get_response().outputs] == ["tokens"]


def test_tensors_go_in_and_out(client: Any) -> None:
    given = []
    for name, array in (("input_ids", IDS), ("attention_mask", np.ones_like(IDS))):
        tensor = triton.InferInput(name, list(IDS.shape), "INT64")
        tensor.set_data_from_numpy(array)
        given.append(tensor)
    answer = client.infer("gpt2", given, model_version="10", headers=HEADERS)
    np.testing.assert_allclose(answer.as_numpy("logits"), GPT2.logits(IDS), atol=1e-4)
    status, said = refused(lambda: client.infer("gpt2", given, model_version="1", headers=HEADERS))
    assert (status, said) == ("NOT_FOUND", "Model gpt2 has version 10, not 1")
    status, said = refused(lambda: client.infer("gpt2", given[:1], headers=HEADERS))
    assert (status, "attention_mask" in said) == ("INVALID_ARGUMENT", True)


def test_typed_contents_are_taken_too(server: Server) -> None:
    """As KServe's client sends them."""
    texts = ["산에는 꽃 피네", "", "🌸"]
    request = service_pb2.ModelInferRequest(model_name="texts")
    tensor = request.inputs.add(name="x", datatype="BYTES", shape=[3])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(request, metadata=tuple(HEADERS.items()), timeout=WIDE_S)
    found = triton.InferResult(answer).as_numpy("y")
    assert [text.decode() for text in found] == texts


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
    assert "".join(pieces) == whole(server, "시/봄", 16)
    assert (counted, len(pieces), reasons[-1]) == (16, 16, "length")
    stream.ask("시/봄", max_new_tokens=16, stream=False)
    result, error = stream.next()
    assert generated(result) == "".join(pieces)


def test_a_stream_of_what_is_no_text_has_one_response(client: Any) -> None:
    stream = Stream(client)
    given = triton.InferInput("x", [2], "BYTES")
    given.set_data_from_numpy(np.array(["봄".encode(), b"x"], object))
    for _ in range(3):
        stream.ask("texts", given)
    for _ in range(3):
        result, error = stream.next()
        assert error is None
        assert result.as_numpy("y").tolist() == ["봄".encode(), b"x"]


def test_an_error_in_a_stream_is_one_of_its_responses(client: Any) -> None:
    stream = Stream(client)
    for name, parameters in (
        ("없음", {}),
        ("spring", {"top_p": 2.0}),
        ("spring", {"온도": 1}),
        ("spring", {}),
    ):
        stream.ask(name, max_new_tokens=1, **parameters)
    said = [str(error) for _, error in (stream.next() for _ in range(4)) if error]
    assert len(said) == 3
    for words in ("there is no model 없음", "top_p", "온도 is not known"):
        assert any(words in message for message in said)


def test_requests_are_counted(client: Any) -> None:
    def success() -> int:
        (stat,) = client.get_inference_statistics("spring", headers=HEADERS).model_stats
        return int(stat.inference_stats.success.count)

    client.load_model("spring", headers=MANAGING)
    before = success()
    for _ in range(3):
        client.infer("spring", [prompt()], parameters={"max_new_tokens": 1}, headers=HEADERS)
    assert success() - before == 3
    everything = client.get_inference_statistics(headers=HEADERS).model_stats
    assert "spring" in {stat.name for stat in everything}


@pytest.mark.parametrize(
    ("given", "parameters", "status", "said"),
    [
        (prompt("가" * 3000), {}, "INVALID_ARGUMENT", "context"),
        (prompt(" "), {}, "INVALID_ARGUMENT", "empty"),
        (prompt(), {"max_new_tokens": -1}, "INVALID_ARGUMENT", "max_new_tokens"),
        (prompt(), {"온도": 1}, "INVALID_ARGUMENT", "온도 is not known"),
    ],
)
def test_what_is_wrong_is_said(
    client: Any, given: Any, parameters: Any, status: str, said: str
) -> None:
    found = refused(lambda: client.infer("spring", [given], parameters=parameters, headers=HEADERS))
    assert found[0] == status
    assert said in found[1]


def test_the_protocols_hints_are_no_parameters_of_a_text(client: Any, server: Server) -> None:
    answer = client.infer(
        "spring",
        [prompt()],
        priority=1,
        timeout=60_000_000,
        parameters={"max_new_tokens": 4},
        headers=HEADERS,
    )
    assert generated(answer) == whole(server, "spring", 4)
    stream = Stream(client)
    stream.ask("spring", max_new_tokens=4, content_type="str")
    assert "".join(stream.texts(1)[""]) == whole(server, "spring", 4)


def test_a_requests_own_timeout_ends_it(client: Any, server: Server) -> None:
    client.load_model("slow", headers=MANAGING)
    parameters = {"max_new_tokens": ENDLESS_TOKENS}
    status, said = refused(
        lambda: client.infer(
            "slow", [prompt()], timeout=300_000, parameters=parameters, headers=HEADERS
        )
    )
    assert (status, " within " in said) == ("DEADLINE_EXCEEDED", True)  # of the gateway or engine
    stream = Stream(client)
    client.async_stream_infer("slow", [prompt()], parameters=parameters, timeout=300_000)
    error = None
    for _ in range(ENDLESS_TOKENS):
        _, error = stream.next()
        if error is not None:
            break
    assert "no answer within 0.3 s" in str(error)
    eventually(lambda: running(server) == 0)
    stream.ask("spring", max_new_tokens=4)  # the call goes on
    assert "".join(stream.texts(1)[""]) == whole(server, "spring", 4)


@pytest.mark.slow
def test_a_stop_waits_for_what_is_being_streamed(tmp_path: Path) -> None:
    slow(tmp_path / "store" / "slow")
    with (
        serving(tmp_path / "run", tmp_path / "store", GRPC_PORT=str(free_port())) as server,
        triton.InferenceServerClient(server.grpc_address) as client,
    ):
        stream = Stream(client)
        stream.ask("slow", id="1", max_new_tokens=300)
        result, _ = stream.next()
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(InferenceServerException):  # it has ended already
            eventually(lambda: not client.is_server_ready())
        pieces = [generated(result), *stream.texts(1)["1"]]
        assert len(pieces) == 300
        client.stop_stream()
        assert server.process.wait(WIDE_S) == 0
