"""kogpt2 invoke against a server, an endpoint, and streams."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from scripts.client.errors import CallFailed
from scripts.client.targets import Call, Local
from tests.e2e.server import Server
from tests.e2e.stores import SHORT, text
from tests.platform.limits import COLD_START_S
from tests.scripts.command import output, refusal
from tests.scripts.conftest import Poets, Run

PROMPT = ("--text", "나는 오늘", "--max-new-tokens", "16")


@pytest.mark.parametrize("model", ["m0.tar.gz", "시/봄"])
def test_a_server_and_an_endpoint_print_the_same_text(
    run: Run, served: Server, poets: Poets, model: str
) -> None:
    """A call to this machine uses no proxy."""
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    expected = text(served.predict(model.removesuffix(".tar.gz"), SHORT)) + "\n"
    for *where, environment in (
        ("--url", served.url(""), proxies),
        ("--endpoint", "poets", poets.environment),
    ):
        done = run("invoke", *where, "--model", model, *PROMPT, **environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_json_shows_all_and_the_prompt_may_come_from_standard_input(
    run: Run, served: Server
) -> None:
    options = ("--model", "m1", "--json", "--max-new-tokens", "16")
    done = run("invoke", "--url", served.url(""), *options, stdin="\ufeff나는 오늘\r\n", LC_ALL="C")
    found = json.loads(done.stdout)
    assert found["generated_text"] == text(served.predict("m1", SHORT))
    assert found["tokens"] <= 16
    assert "\\u" not in done.stdout


def test_every_parameter_is_in_the_request(run: Run) -> None:
    wanted = {
        **{"max_new_tokens": 9, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 7},
        **{"repetition_penalty": 1.2, "num_return_sequences": 2, "logprobs": 1},
        **{"stop": ["다", "요"], "do_sample": True, "return_full_text": True},
    }
    options = ["invoke", "--model", "m0", "--text", "나는"]
    for name, value in wanted.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options.append(flag)
        else:
            for one in value if isinstance(value, list) else [value]:
                options += [flag, str(one)]
    shown = run(*options, "--dry-run")
    assert json.loads(shown.stdout.splitlines()[-1])["parameters"] == wanted


def test_a_model_that_the_platform_is_still_loading_is_waited_for(run: Run, poets: Poets) -> None:
    target = poets.agent._models.pop("m1.tar.gz", None)
    if target is not None:
        poets.agent._call("DELETE", f"/models/{target.name}", timeout_s=10)
    poets.agent.cold_start_s = 0.01
    try:
        call = ("invoke", "--endpoint", "poets", "--model", "m1", *PROMPT)
        impatient = run(*call, "--wait", "0.1", **poets.environment)
        assert (impatient.returncode, "still being loaded" in impatient.stderr) == (1, True)
        assert output(run(*call, **poets.environment)).strip()
    finally:
        poets.agent.cold_start_s = COLD_START_S


# Streams


def test_the_json_of_a_stream_is_that_of_the_whole_answer(run: Run, served: Server) -> None:
    parameters = {"max_new_tokens": 16, "seed": 3, "num_return_sequences": 2}
    body = {"inputs": "나는 오늘", "parameters": {**parameters, "return_full_text": True}}
    drawn = ("--seed", "3", "--num-return-sequences", "2", "--return-full-text", "--json")
    done = run("invoke", "--url", served.url(""), "--model", "m1", *PROMPT, *drawn, "--stream")
    found = json.loads(done.stdout)
    whole = served.predict("m1", body).json()
    assert found["sequences"] == [one["generated_text"] for one in whole["sequences"]]
    assert found["tokens"] == sum(one["tokens"] for one in whole["sequences"])
    assert found["finish_reason"] == whole["finish_reason"]
    assert found["time_to_first_token_s"] > 0


def test_an_endpoint_of_one_model_streams(run: Run, served: Server, poets: Poets) -> None:
    options = ("--endpoint", "one", "--stream", "--json", *PROMPT)
    found = json.loads(output(run("invoke", *options, **poets.environment)))
    whole = served.predict("m0", SHORT).json()  # the same model
    assert found["time_to_first_token_s"] > 0
    for name in ("generated_text", "tokens", "finish_reason"):
        assert found[name] == whole[name]


TOKEN = b'{"text": "\xec\x82\xb0", "token": 5, "index": 0}\n'
LAST = b'{"generated_text": "\xec\x82\xb0", "tokens": 1, "finish_reason": "stop", "index": 0}\n'
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Streaming:
    """A server that sends the first token of a stream, and `rest` once `go_on` is set."""

    def __init__(self, listener: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.rest, self.go_on = b"", threading.Event()
        self._listener = listener
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while b"inputs" not in connection.recv(65_536):
                pass
            connection.sendall(HEAD + chunk(TOKEN))
            assert self.go_on.wait(60)
            connection.sendall(self.rest)


@pytest.fixture
def streaming() -> Iterator[Streaming]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        server = Streaming(listener)
        yield server
        server.thread.join(60)


def test_a_token_is_printed_before_the_next_one_comes(streaming: Streaming) -> None:
    streaming.rest = chunk(LAST) + b"0\r\n\r\n"
    call = ["--url", streaming.url, "--model", "m0", "--text", "가", "--return-full-text"]
    command = [sys.executable, "-m", "scripts.start", "invoke", *call, "--stream"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        shown = b""
        while shown != "가산".encode():
            shown += (piece := os.read(process.stdout.fileno(), 100))
            assert piece, shown
        streaming.go_on.set()
        assert process.stdout.read() == b"\n"
    assert process.returncode == 0


def test_a_stream_that_breaks_off_is_an_error(run: Run, streaming: Streaming) -> None:
    streaming.go_on.set()
    done = run("invoke", "--url", streaming.url, "--model", "m0", "--stream", *PROMPT)
    assert (done.returncode, done.stdout) == (1, "산")
    assert "broke off its answer" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_stream_that_stalls_is_a_timeout(streaming: Streaming) -> None:
    """It was an unreachable server: requests raises ConnectionError there, not Timeout."""
    target = Local(streaming.url, timeout_s=0.1)
    with (
        pytest.raises(CallFailed, match=r"stopped in its answer for 0\.1 s") as failed,
        target.call(Call("시/봄", b"inputs", stream=True)) as answer,
    ):
        list(answer.chunks)
    streaming.go_on.set()
    assert failed.value.kind == "timeout"


# Errors

NO_SERVER = ("--url", "http://127.0.0.1:9", "--model", "m0", "--text", "가")


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (NO_SERVER, 1, "http://127.0.0.1:9 cannot be reached: Connection refused"),
        (("--url", "localhost:8080", "--text", "가"), 2, "must begin with http://"),
        (("--url", "http://h", "--endpoint", "e"), 2, "--url or --endpoint, not both"),
        (("--profile", "p", "--text", "가"), 2, "--profile is for --endpoint"),
        (("--endpoint", "e", "--model", "m", "--stream"), 2, "leave out --stream"),
        (("--parameters", "[1]", "--text", "가"), 2, "--parameters must be a JSON object"),
        (("--parameters", "{", "--text", "가"), 2, "--parameters is not JSON"),
        (("--text", " "), 2, "the prompt is empty"),
        ((), 2, "the prompt (standard input) is empty"),
    ],
)
def test_a_wrong_call_is_refused_in_one_sentence(
    run: Run, options: tuple[str, ...], status: int, message: str
) -> None:
    assert message in refusal(run("invoke", *options), status)


def test_a_prompt_in_another_encoding_is_refused(run: Run) -> None:
    assert "iconv" in refusal(run("invoke", stdin="산에는 꽃 피네".encode("cp949")), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "없음"), "없음"),
        (("--model", "m0", "--parameters", '{"온도": 1}'), "parameters.온도 is not known"),
    ],
)
def test_the_servers_own_message_is_shown(
    run: Run, served: Server, poets: Poets, options: tuple[str, ...], message: str
) -> None:
    for where in (("--url", served.url("")), ("--endpoint", "poets")):
        done = run("invoke", *where, *options, "--text", "가", **poets.environment)
        assert message in refusal(done, 1)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (("nothing",), {}, "not found"),
        (("poets", "--profile", "nobody"), {}, "nobody"),
        (("poets",), {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "credentials"),
        (("poets",), {"AWS_REGION": None, "AWS_DEFAULT_REGION": None}, "region"),
    ],
)
def test_a_mistake_with_aws_is_explained_in_one_sentence(
    run: Run, poets: Poets, options: tuple[str, ...], changes: dict[str, str | None], message: str
) -> None:
    environment = {**poets.environment, **changes}
    done = run("invoke", "--endpoint", *options, "--model", "m0", "--text", "가", **environment)
    assert message in refusal(done, 1, 2)
