"""Bodies of JSON lines: both directions at once, huge ones, clients that leave."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from botocore.exceptions import ClientError

from testbed import s3
from tests.e2e.server import Server, eventually
from tests.e2e.stores import ENDLESS, endless, running, small, text

LINES = "application/jsonlines"
PATH = "/predictions/" + quote("봄")
ECHO = """
def model_fn(folder):
    return None

def transform_fn(model, body, content_type, accept):
    assert content_type == accept == "application/json"
    return body, accept
"""


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    small(clean.store / "봄")
    endless(clean.store / "slow")
    echo(clean.store / "메아리")
    return clean


def echo(folder: Path) -> None:
    code = folder / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text(ECHO, encoding="utf-8")


def line(number: int) -> bytes:
    body = {"inputs": f"나는 오늘 {number}", "parameters": {"max_new_tokens": 4}}
    return json.dumps(body, ensure_ascii=False).encode() + b"\n"


class Duplex:
    """A request whose body is sent chunk by chunk, also after its answer has begun."""

    def __init__(self, server: Server, path: str = PATH, **headers: str) -> None:
        self.connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        self.begin(path, **headers)

    def begin(self, path: str = PATH, **headers: str) -> None:
        self.connection.putrequest("POST", path)
        sent = {"Content-Type": LINES, "Transfer-Encoding": "chunked", **headers}
        for name, value in sent.items():
            self.connection.putheader(name, value)
        self.connection.endheaders()

    def send(self, data: bytes) -> None:
        self.connection.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.connection.send(b"0\r\n\r\n")


@pytest.fixture
def duplex(server: Server) -> Iterator[Callable[..., Duplex]]:
    with contextlib.ExitStack() as opened:

        def begin(path: str = PATH, **headers: str) -> Duplex:
            request = Duplex(server, path, **headers)
            opened.enter_context(contextlib.closing(request.connection))
            return request

        yield begin


def test_lines_have_the_answers_of_single_requests(server: Server) -> None:
    expected = [
        text(server.predict("봄", line(i), **{"Content-Type": "application/json"}))
        for i in range(20)
    ]
    body = b"".join(map(line, range(20)))
    answer = server.post("/predictions/봄", data=body, headers={"Content-Type": LINES})
    assert answer.headers["Content-Type"] == LINES
    assert [json.loads(one)["generated_text"] for one in answer.content.splitlines()] == expected


def test_answers_and_lines_come_in_turn_and_the_connection_stays(
    server: Server, duplex: Callable[..., Duplex]
) -> None:
    request = duplex()
    for _ in range(2):
        request.send(line(0) + line(1)[:20])  # within a character
        answer = request.connection.getresponse()
        assert answer.status == 200
        first = json.loads(answer.readline())
        request.send(line(1)[20:] + b"no JSON")
        second = json.loads(answer.readline())
        assert first["tokens"] == second["tokens"] == 4
        request.end()
        assert json.loads(answer.readline())["error"]["code"] == 400
        assert answer.read() == b""
        opened = request.connection.sock
        request.begin()
        assert request.connection.sock is opened


@pytest.mark.parametrize(("path", "first"), [(PATH, b"100"), ("/predictions/nothing", b"404")])
def test_a_body_that_waits_for_100_is_sent_for_only_where_the_model_is(
    duplex: Callable[..., Duplex], path: str, first: bytes
) -> None:
    request = duplex(path, Expect="100-continue")
    assert request.connection.sock.recv(12) == b"HTTP/1.1 " + first


def test_curl_sends_and_reads_both_as_streams(server: Server, tmp_path: Path) -> None:
    source = tmp_path / "lines.jsonl"
    source.write_bytes(
        b"\xef\xbb\xbf" + b"\r\n".join(f'"{i} 산에는 꽃 피네"'.encode() for i in range(300))
    )
    command = ["curl", "-sSf", "-X", "POST", "-T", source, "-H", f"Content-Type: {LINES}"]
    url = server.url("/predictions/" + quote("메아리"))
    made = subprocess.run([*command, url], stdout=subprocess.PIPE, timeout=60, check=True).stdout
    assert [json.loads(one) for one in made.splitlines()] == [
        f"{i} 산에는 꽃 피네" for i in range(300)
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_boto3_sends_lines_and_gets_them(server: Server, stream: bool) -> None:
    call: dict[str, Any] = {"EndpointName": "poets", "ContentType": LINES, "Accept": LINES}
    call |= {"CustomAttributes": "model=" + quote("봄"), "Body": line(0) + b'{"inputs": ""}'}
    with contextlib.closing(s3.client(server.url(""), "sagemaker-runtime")) as client:
        if stream:
            answer = client.invoke_endpoint_with_response_stream(**call)
            body = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])
        else:
            answer = client.invoke_endpoint(**call)
            body = answer["Body"].read()
        good, wrong = map(json.loads, body.splitlines())
        assert answer["ContentType"] == LINES
        assert (good["tokens"], wrong["error"]["code"]) == (4, 400)
        with pytest.raises(ClientError, match="the body has no lines"):
            client.invoke_endpoint(**{**call, "Body": b""})


@pytest.mark.slow
def test_two_hundred_megabytes_take_no_memory(
    server: Server, duplex: Callable[..., Duplex]
) -> None:
    (found,) = server.descendants("serving.gateway")
    gateway = psutil.Process(found.pid)
    count, content = 2000, '"' + "가" * 34_000
    request = duplex("/predictions/" + quote("메아리"))

    def send() -> None:
        for i in range(count):
            request.send(f'{content}{i}"\n'.encode())
        request.end()

    sending = threading.Thread(target=send)
    sending.start()
    answer = request.connection.getresponse()
    sizes = []
    for i in range(count):
        assert answer.readline() == f'{content}{i}"\n'.encode()
        sizes.append(gateway.memory_info().rss)
    sending.join()
    assert answer.read() == b""
    grown = max(sizes[count // 10 :]) - sizes[count // 10]  # what is free in its heap varies
    assert grown < 64 << 20, sizes[:: count // 10]


def test_a_client_that_disconnects_ends_its_lines(
    server: Server, duplex: Callable[..., Duplex]
) -> None:
    request = duplex("/predictions/slow")
    request.send(json.dumps(ENDLESS).encode() + b"\n")
    request.send(json.dumps(ENDLESS).encode() + b"\n")
    assert request.connection.getresponse().status == 200
    eventually(lambda: running(server) == 4)
    request.connection.close()
    assert request.connection.sock is None
    eventually(lambda: running(server) == 0)
    assert server.unload("slow").status_code == 200


def test_a_single_request_does_not_wait_for_a_batch(
    server: Server, duplex: Callable[..., Duplex]
) -> None:
    body = {**ENDLESS, "parameters": {**ENDLESS["parameters"], "num_return_sequences": 1}}
    request = duplex("/predictions/slow")
    request.send((json.dumps(body).encode() + b"\n") * 100)
    eventually(lambda: running(server) == 15)
    single = {"inputs": "나는 오늘", "parameters": {"max_new_tokens": 1}}
    assert server.predict("slow", single).json()["tokens"] == 1
    assert running(server) == 15
    request.connection.close()
    eventually(lambda: running(server) == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "most"),
    # A script's death is the error of the line that it works on, if it works on one.
    [("봄", "-m engine ", 0), ("봄", "ModelServer", 0), ("메아리", "user_code", 1)],
)
def test_a_process_that_is_killed_costs_no_other_line(
    breakable: Server, name: str, words: str, most: int
) -> None:
    small(breakable.store / "봄")
    echo(breakable.store / "메아리")
    request = Duplex(breakable, f"/predictions/{quote(name)}")
    with contextlib.closing(request.connection):
        request.send(b"".join(map(line, range(100))))
        answer = request.connection.getresponse()
        assert answer.readline()
        for process in breakable.descendants(words):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        request.send(b"".join(map(line, range(100, 400))))
        request.end()
        rest = [json.loads(one) for one in answer.read().splitlines()]
    assert len(rest) == 399
    errors = [one["error"]["type"] for one in rest if "error" in one]
    assert errors in (["ScriptOutOfMemory"] * count for count in range(most + 1))


@pytest.mark.slow
def test_a_stop_cuts_off_a_batch_that_waits_for_its_client(breakable: Server) -> None:
    small(breakable.store / "봄")
    with contextlib.closing((request := Duplex(breakable)).connection):
        request.send(line(0) + line(1))
        answer = request.connection.getresponse()
        assert answer.readline()
        assert answer.readline()
        assert breakable.stop() == 0
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
