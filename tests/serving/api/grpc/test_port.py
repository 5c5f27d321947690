"""gRPC clients against the gateway, over workers and an engine that a test has in its hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import grpc
import pytest

from common.errors import Overloaded
from serving.aliases import Alias
from serving.api.grpc import health, port
from serving.api.grpc.calls import Call, Idle, Routes
from serving.api.grpc.health import HEALTH, NOT_SERVING, SERVICE_UNKNOWN, SERVING
from serving.api.grpc.inference import SERVICE
from serving.api.grpc.port import grpc_port
from serving.api.grpc.stream import AT_ONCE
from serving.api.http_protocol import HTTPProtocol
from serving.errors import StartError
from serving.mms.client import Answer
from tests.e2e.server import free_port
from tests.serving.api.gateways import FakeEngine, World, always, answered, model
from tests.serving.api.grpc.clients import (
    PROMPT,
    WIDE_S,
    Client,
    ModelInferRequest,
    asked,
    final,
    values,
)

PIECES = ["가실 ", "때", "에는"]


def pieces(name: str, inputs: str, parameters: Any, *_: Any) -> Iterator[dict[str, Any]]:
    """PIECES behind the prompt's first character, each sequence its own."""
    for i, text in enumerate(PIECES):
        end = {"finish_reason": "stop"} if i == len(PIECES) - 1 else {}
        for index in range(parameters.get("num_return_sequences", 1)):
            yield {"index": index, "token": i, "text": f"{inputs[:1]}{text}", **end}


def streaming() -> FakeEngine:
    return FakeEngine(streamed=pieces)


@contextlib.asynccontextmanager
async def served(engine: FakeEngine | None, **settings: Any) -> AsyncIterator[tuple[Client, World]]:
    """Serve a model, without an `engine` by a worker of its own."""
    port = free_port()
    world = World(model(capacity=8), engine, host="127.0.0.1", grpc_port=port, **settings)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    async with grpc_port(world.gateway, world.app, 1), channel:
        yield Client(channel), world


async def responses(client: Client, *requests: Any) -> list[Any]:
    return [response async for response in client("ModelStreamInfer", iter(requests))]


# Streams


async def test_each_token_is_a_response_and_the_last_one_says_so() -> None:
    async with served(streaming()) as (client, world):
        request = asked(id="요청 1", max_new_tokens=9, stream=True)
        made = await responses(client, request)
        assert [values(r) for r in made] == [
            {"generated_text": "나가실 ", "tokens": 1, "finish_reason": ""},
            {"generated_text": "나때", "tokens": 1, "finish_reason": ""},
            {"generated_text": "나에는", "tokens": 1, "finish_reason": "stop"},
        ]
        assert [final(r) for r in made] == [False, False, True]
        assert {(r.infer_response.id, r.infer_response.model_name) for r in made} == {
            ("요청 1", "봄")
        }
        assert [call[1:3] for call in world.engine.asked] == [(PROMPT, {"max_new_tokens": 9})]
        request.outputs.add(name="generated_text")
        made = await responses(client, request)
        assert [list(values(r)) for r in made] == [["generated_text"]] * 3
        request.outputs[0].name = "로짓"
        (refused,) = await responses(client, request)
        assert "로짓 is not known; known are generated_text" in refused.error_message


async def test_several_sequences_have_their_index_and_one_end() -> None:
    async with served(streaming()) as (client, _):
        made = await responses(
            client, asked(num_return_sequences=2, do_sample=True, return_full_text=True)
        )
        texts = {0: "", 1: ""}
        for response in made:
            index = response.infer_response.parameters["index"].int64_param
            texts[index] += values(response)["generated_text"]
        assert set(texts.values()) == {f"{PROMPT}나가실 나때나에는"}
        assert [final(r) for r in made] == [False] * 5 + [True]


async def test_requests_of_one_call_are_worked_on_at_once_and_not_mixed_up() -> None:
    count = 3 * AT_ONCE
    async with served(streaming()) as (client, world):
        engine = world.engine
        world.model.line.capacity = count
        engine.go.clear()

        async def requests() -> AsyncIterator[Any]:
            for i in range(count):
                yield asked(text=f"{chr(0xAC00 + i)}", id=str(i))

        texts: dict[str, str] = {}
        async for response in client("ModelStreamInfer", requests()):
            inner = response.infer_response
            texts[inner.id] = texts.get(inner.id, "") + values(response)["generated_text"]
            if len(texts) == AT_ONCE:
                engine.go.set()
        assert engine.most == AT_ONCE
        assert texts == {
            str(i): "".join(chr(0xAC00 + i) + piece for piece in PIECES) for i in range(count)
        }


async def test_a_stream_that_breaks_off_says_why_and_the_call_goes_on() -> None:
    first, second, _ = pieces("봄", PROMPT, {})
    broken = FakeEngine(streamed=[first, second, Overloaded("가득 찼다")])
    async with served(broken, sagemaker_multi_model=True) as (client, world):
        made = await responses(client, asked(id="1"))
        assert [r.error_message for r in made] == ["", "", "가득 찼다"]
        assert (made[-1].infer_response.id, final(made[-1])) == ("1", True)
        bad = ModelInferRequest(model_name="봄", id="2")
        world.gateway.engine = streaming()  # type: ignore[assignment]
        made = await responses(
            client, bad, asked(id="3", top_p=2), asked(id="4", name="없음"), asked()
        )
        said = {r.infer_response.id: r.error_message for r in made if r.error_message}
        assert "must be one text" in said["2"]
        assert said["4"] == "Model not found: 없음"
        assert "".join(values(r)["generated_text"] for r in made if not r.error_message)


async def test_a_cancelled_call_leaves_the_engine() -> None:
    async with served(streaming()) as (client, world):
        engine = world.engine
        engine.go.clear()
        call = client("ModelStreamInfer", iter([asked(), asked("산에는")]))
        await call.read()
        await call.read()
        assert engine.running == 2
        call.cancel()
        with anyio.fail_after(WIDE_S):
            while engine.running or world.gateway.requests or world.model.in_flight:
                await asyncio.sleep(0)
        assert world.model.line.running == 0


async def test_calls_that_their_clients_end_log_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with served(streaming()) as (client, world):
        world.model.line.capacity = 100
        for _ in range(30):
            call = client("ModelStreamInfer", iter([asked(num_return_sequences=8, do_sample=True)]))
            await call.read()
            call.cancel()
        method = client._channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", request_serializer=ModelInferRequest.SerializeToString
        )
        for _ in range(100):
            call = method(iter([asked(num_return_sequences=8, do_sample=True)]), timeout=0.001)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                _ = [response async for response in call]
        for name in ("ServerLive", "ModelMetadata", "ModelInfer"):
            for i in range(20):
                request = asked().SerializeToString() if name == "ModelInfer" else b""
                call = client._channel.unary_unary(f"/{SERVICE}/{name}")(request, timeout=i / 5000)
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                    await call
        with anyio.fail_after(WIDE_S):
            while world.engine.running or world.gateway.requests or world.model.in_flight:
                await asyncio.sleep(0)
        assert await responses(client, asked())
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("name", ["ModelInfer", "ModelStreamInfer", "ServerLive"])
async def test_a_malformed_message_is_the_clients_fault(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(streaming()) as (client, _):
        call = client._channel.stream_unary(f"/{SERVICE}/{name}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(iter(["\xff봄".encode()]), timeout=WIDE_S)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        kind = "ModelInfer" if "Infer" in name else name
        assert caught.value.details() == f"the request is not a inference.{kind}Request"
        assert await responses(client, asked())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def number_of_the_call(number: int) -> Answer:
    """A worker's tensor."""
    await asyncio.sleep(0.01 if number == 0 else 0)  # the first takes longest
    outputs = [{"name": "y", "datatype": "INT64", "shape": [1], "data": [number]}]
    told = {"model_name": "표", "model_version": "1", "outputs": outputs}
    return answered(body=json.dumps(told).encode())


async def test_a_model_that_streams_nothing_answers_in_order() -> None:
    async with served(None) as (client, world):
        world.mms.answer = number_of_the_call
        made = await responses(client, asked(), asked(), asked())
        outputs = [r.infer_response.outputs[0].contents.int64_contents for r in made]
        assert outputs == [[0], [1], [2]]
        assert all(final(r) for r in made)


async def test_an_alias_may_have_models_of_texts_and_of_tensors() -> None:
    async with served(streaming()) as (client, world):
        world.add(model("표"), in_engine=False)
        alias = Alias("섞임", {"표": 1, "봄": 1})
        world.gateway.aliases._take({"섞임": alias})
        world.mms.answer = number_of_the_call
        made = await responses(client, *(asked(name="섞임") for _ in range(4)))
        assert not any(response.error_message for response in made)
        names = [response.infer_response.model_name for response in made]
        assert (names.count("표"), names.count("봄")) == (2, 2 * len(PIECES))
        assert alias.requests == {"표": 2, "봄": 2}


# Single calls


async def refused(call: Any) -> tuple[Any, str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata())
    assert trailing["x-request-id"]
    return caught.value.code(), caught.value.details() or "", trailing


INFER = {"model_name": "봄"}


CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    409: grpc.StatusCode.ABORTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


async def test_an_error_has_its_code_and_its_words() -> None:
    async with served(None) as (client, world):
        for status, code in CODES.items():
            body = json.dumps({"message": "가" * 2000}).encode()
            world.mms.answer = always(answered(status, body))
            found, said, _ = await refused(client("ModelInfer", INFER))
            assert found == code
            assert said.startswith("가가가")
            assert said.endswith("가가가")


async def test_who_comes_too_early_is_told_when_to_come_back() -> None:
    async with served(streaming()) as (client, world):
        world.gateway.draining = True
        code, said, trailing = await refused(client("ModelInfer", INFER))
        assert (code, said) == (grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        assert trailing["grpc-retry-pushback-ms"] == "5000"
        assert not (await client("ServerReady")).ready
        assert (await client("ServerLive")).live


async def test_a_script_gets_the_traceparent_and_is_at_fault_if_it_answers_something_else() -> None:
    sent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with served(None) as (client, world):
        call = client("ModelInfer", INFER, metadata=(("traceparent", sent),))
        code, said, _ = await refused(call)
        assert (code, "none of the Open Inference" in said) == (grpc.StatusCode.INTERNAL, True)
        assert [headers["traceparent"] for headers in world.mms.headers] == [sent]


async def test_a_token_is_asked_for_and_ids_are_kept() -> None:
    tokens = {"inference_token": "infer-me", "management_token": "manage-me"}
    async with served(streaming(), **tokens) as (client, _):
        code, said, _ = await refused(client("ModelReady", {"name": "봄"}))
        assert code == grpc.StatusCode.UNAUTHENTICATED
        assert "Authorization: Bearer" in said
        right = (("authorization", "Bearer infer-me"), ("x-request-id", "mine-1"))
        call = client("ModelReady", {"name": "봄"}, metadata=right)
        assert (await call).ready
        assert dict(await call.trailing_metadata()) == {"x-request-id": "mine-1"}
        (error,) = await responses(client, asked())
        assert "Authorization: Bearer" in error.error_message
        code, _, _ = await refused(client("RepositoryModelLoad", INFER, metadata=right))
        assert code == grpc.StatusCode.UNAUTHENTICATED


async def test_a_client_that_gives_up_calls_its_request_off() -> None:
    async with served(None) as (client, world):
        world.mms.answer = always(answered(499), after=world.engine.over)
        call = client("ModelInfer", INFER)
        with anyio.fail_after(WIDE_S):
            while not world.mms.told_s:
                await asyncio.sleep(0)
            call.cancel()
            await world.engine.over.wait()


# The port


async def test_health_is_told_and_told_again_when_it_changes() -> None:
    async with served(streaming()) as (client, world):
        for service in ("", SERVICE):
            status = (await client("Check", {"service": service}, HEALTH)).status
            assert status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client("Check", {"service": "다른"}, HEALTH)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        unknown = client("Watch", {"service": "다른"}, HEALTH)
        assert (await unknown.read()).status == SERVICE_UNKNOWN
        watch = client("Watch", {}, HEALTH)
        assert (await watch.read()).status == SERVING
        world.gateway.healthy = False
        assert (await watch.read()).status == NOT_SERVING
        assert (await client("Check", {}, HEALTH)).status == NOT_SERVING
        world.gateway.healthy = True
        assert (await watch.read()).status == SERVING


async def test_a_taken_port_ends_the_start_and_a_large_message_its_call() -> None:
    async with served(streaming(), max_request_bytes=1000) as (client, world):
        with pytest.raises(StartError, match="GRPC_PORT"):
            async with grpc_port(world.gateway, world.app, 1):
                pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client("ModelInfer", {**INFER, "raw_input_contents": [bytes(1 << 20)]})
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM"]
)
async def test_a_client_that_does_not_speak_the_protocol_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(HTTPProtocol, "head_s", 0.2)
    async with served(streaming()) as (client, world):
        port = world.gateway.settings.grpc_port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with anyio.fail_after(WIDE_S):
            while await reader.read(1000):
                pass
        writer.close()
        assert (await client("ServerLive")).live


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


async def test_connections_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HTTPProtocol, "max_connections", 3)

    def told(connection: socket.socket) -> bytes:
        """Return the first message on a connection: none on one above the limit."""
        try:
            connection.sendall(PREFACE)
            return connection.recv(1)
        except ConnectionError:
            return b""

    async with served(streaming()) as (client, world):
        address = "127.0.0.1", world.gateway.settings.grpc_port
        with contextlib.ExitStack() as open_ones:

            async def connect() -> tuple[socket.socket, bytes]:
                connection = open_ones.enter_context(socket.create_connection(address, WIDE_S))
                return connection, await asyncio.to_thread(told, connection)

            assert (await client("ServerLive", {})).live  # one of them
            first, answer = await connect()
            assert answer
            assert (await connect())[1]
            assert (await connect())[1] == b""
            assert (await client("ServerLive", {})).live
            first.close()
            with anyio.fail_after(WIDE_S):
                while not (await connect())[1]:
                    await asyncio.sleep(0.05)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def infer_frames(stream: int) -> bytes:
    """A call of ModelInfer in HTTP/2, which ends the stream."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE}/ModelInfer",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    literals = [text.encode() for pair in headers.items() for text in pair]
    pairs = (bytes([len(text)]) + text for text in literals)
    block = b"".join(b"\0" + key + next(pairs) for key in pairs)
    request = ModelInferRequest(**INFER).SerializeToString()
    return frame(1, 4, stream, block) + frame(
        0, 1, stream, struct.pack(">BI", 0, len(request)) + request
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_clients_do_not_read_are_limited(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """One connection leaves room for others. Beyond it small answers are sent, and large ones once
    the clients have gone."""
    monkeypatch.setattr(HTTPProtocol, "max_unread_bytes", 3 << 20)
    text = "시" * (1 << 18)
    output = {"name": "y", "datatype": "BYTES", "shape": [1], "data": [text]}
    body = json.dumps({"model_name": "봄", "model_version": "1", "outputs": [output]})
    answer, ten = always(answered(body=body.encode())), asyncio.Event()

    async def counted(number: int) -> Answer:
        if number >= 10:
            ten.set()
        return await answer(number)

    async with served(None) as (client, world):
        world.mms.answer = counted

        async def code() -> grpc.StatusCode:
            """The status of one more answer."""
            if stream:
                (found,) = await responses(client, asked())
                if found.error_message:
                    assert "unread" in found.error_message
                    return grpc.StatusCode.RESOURCE_EXHAUSTED
                return grpc.StatusCode.OK
            call = client("ModelInfer", INFER)
            found_code: grpc.StatusCode = await call.code()
            return found_code

        async def until(wanted: grpc.StatusCode) -> None:
            while await code() != wanted:
                await asyncio.sleep(0.02)

        async def never_read() -> Any:
            port = world.gateway.settings.grpc_port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(PREFACE + b"".join(map(infer_frames, range(1, 20, 2))))
            return reader, writer  # without its reader asyncio would close it

        with anyio.fail_after(WIDE_S):
            assert await code() == grpc.StatusCode.OK
            connections = [await never_read()]
            await ten.wait()
            assert [await code() for _ in range(10)] == [grpc.StatusCode.OK] * 10
            connections += [await never_read() for _ in range(2)]
            await until(grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert (await client("ServerLive")).live
            for _, writer in connections:
                writer.transport.abort()
            await until(grpc.StatusCode.OK)


async def test_metadata_may_be_utf_8() -> None:
    """gRPC's clients send ASCII only, but a client of HTTP/2 may send any bytes."""
    headers: dict[bytes, bytes] = {}

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        headers.update(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    await Routes(asgi, 8080).ask(Call("/v2"), [("x-session-id", "사용자"), ("else", "가")])
    assert headers == {b"x-session-id": "사용자".encode()}


async def until_ended(calls: list[Any], count: int) -> None:
    async def code(call: Any) -> grpc.StatusCode:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while await call.read() != grpc.aio.EOF:
                pass
        found: grpc.StatusCode = await call.code()
        return found

    with anyio.fail_after(WIDE_S):
        ended = asyncio.as_completed([asyncio.create_task(code(call)) for call in calls])
        for _, call in zip(range(count), ended, strict=False):
            assert await call == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", [f"{HEALTH}/Watch", f"{HEALTH}/Check", f"{SERVICE}/ModelInfer"])
async def test_calls_that_wait_for_their_clients_do_not_shut_the_port(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Neither a Watch, which never ends, nor calls whose request never comes."""
    monkeypatch.setattr(HTTPProtocol, "max_connections", 2)
    monkeypatch.setattr(health, "MAX_WATCHES", 2)
    monkeypatch.setattr(port, "MAX_WATCHES", 2)
    async with served(streaming()) as (client, world):
        endpoint = f"127.0.0.1:{world.gateway.settings.grpc_port}"
        async with grpc.aio.insecure_channel(endpoint) as channel:
            call = channel.stream_stream(f"/{method}")  # messages as bytes, of which b"" is one
            calls = [call(timeout=WIDE_S) for _ in range(20)]
            if method.endswith("Watch"):
                writes = (waiting.write(b"") for waiting in calls)
                await asyncio.gather(*writes, return_exceptions=True)
            await until_ended(calls, 18)
            for _ in range(5):
                assert (await client("ServerLive")).live


async def test_a_watch_that_is_ended_during_its_first_message_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ending(Idle):
        def add(self, wait: anyio.CancelScope) -> None:
            super().add(wait)
            asyncio.get_running_loop().call_soon(wait.cancel)

    monkeypatch.setattr(health, "Idle", Ending)
    async with served(streaming()) as (client, _):
        watch = client("Watch", {}, HEALTH)
        assert (await watch.read()).status == SERVING
        await until_ended([watch], 1)


async def test_streams_without_requests_do_not_shut_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HTTPProtocol, "max_connections", 2)
    async with served(streaming()) as (client, world):
        world.engine.go.clear()
        busy = client("ModelStreamInfer")
        await busy.write(asked())
        first = await busy.read()
        assert not final(first)
        idle = client("ModelStreamInfer")
        await idle.write(asked(max_new_tokens=-1, name="없음"))
        assert (await idle.read()).error_message
        others = [client("ModelStreamInfer") for _ in range(4)]
        await until_ended([idle, *others], 3)
        assert idle.done()
        assert (await client("ServerLive")).live
        world.engine.go.set()  # the call that is being answered was not the one to go
        while not final(await busy.read()):
            pass
