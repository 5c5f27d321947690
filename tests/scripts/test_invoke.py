"""kogpt2 invoke, as a person runs it: against a server, an endpoint, and streams."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from tests.e2e.server import Server
from tests.e2e.stores import SHORT, running, text
from tests.platform.limits import Limits
from tests.scripts.conftest import Poets, Run

PROMPT = ("--text", "나는 오늘", "--max-new-tokens", "16")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["m0", "m0.tar.gz", "시/봄"])
def test_the_text_of_a_fine_tune_is_printed(run: Run, served: Server, model: str) -> None:
    done = run("invoke", "--url", served.url(""), "--model", model, *PROMPT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == text(served.predict(model.removesuffix(".tar.gz"), SHORT)) + "\n"


def test_json_shows_all_and_the_prompt_may_come_from_standard_input(
    run: Run, served: Server
) -> None:
    options = ("--model", "m1", "--json", "--max-new-tokens", "16")
    done = run("invoke", "--url", served.url(""), *options, stdin="\ufeff나는 오늘\r\n", LC_ALL="C")
    found = json.loads(done.stdout)
    assert found["generated_text"] == text(served.predict("m1", SHORT))
    assert found["tokens"] <= 16
    assert "\\u" not in done.stdout


def test_no_proxy_stands_between_a_machine_and_itself(run: Run, served: Server) -> None:
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    listed = run("models", "--url", served.management(""), **proxies)
    assert (listed.returncode, listed.stderr) == (0, "")
    done = run("invoke", "--url", served.url(""), "--model", "m0", *PROMPT, **proxies)
    assert done.stdout == text(served.predict("m0", SHORT)) + "\n"


def test_every_parameter_reaches_the_server(run: Run, served: Server) -> None:
    wanted = {
        "max_new_tokens": 9,
        "temperature": 1.5,
        "top_k": 20,
        "top_p": 0.9,
        "seed": 7,
        "repetition_penalty": 1.2,
        "num_return_sequences": 2,
        "logprobs": 1,
        "stop": ["다", "요"],
        "do_sample": True,
        "return_full_text": True,
    }
    options: list[str] = []
    for name, value in wanted.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options.append(flag)
        else:
            for one in value if isinstance(value, list) else [value]:
                options += [flag, str(one)]
    url = served.url("")
    done = run("invoke", "--url", url, "--model", "m0", "--text", "나는", "--json", *options)
    expected = served.predict("m0", {"inputs": "나는", "parameters": wanted}).json()
    found = json.loads(done.stdout)
    assert len(found["sequences"]) == 2
    assert found.pop("seconds") > 0
    expected.pop("seconds")
    assert found == expected
    shown = run("invoke", "--url", url, "--model", "m0", "--text", "나는", "--dry-run", *options)
    assert json.loads(shown.stdout.splitlines()[-1])["parameters"] == wanted


def test_an_endpoint_answers_as_the_server_does(run: Run, served: Server, poets: Poets) -> None:
    for model in ("m0", "시/봄.tar.gz"):
        done = run("invoke", "--endpoint", "poets", "--model", model, *PROMPT, **poets.environment)
        assert done.returncode == 0, done.stderr
        name = model.removesuffix(".tar.gz")
        assert done.stdout == text(served.predict(name, SHORT)) + "\n"


def test_a_model_that_the_platform_is_still_loading_is_waited_for(run: Run, poets: Poets) -> None:
    target = poets.agent._models.pop("m1.tar.gz", None)
    if target is not None:
        poets.agent._call("DELETE", f"/models/{target.name}", timeout_s=10)
    poets.agent.limits = Limits(cold_start_s=0.01)
    try:
        call = ("invoke", "--endpoint", "poets", "--model", "m1", *PROMPT)
        impatient = run(*call, "--wait", "0.1", **poets.environment)
        assert impatient.returncode == 1
        assert "still being loaded" in impatient.stderr
        patient = run(*call, **poets.environment)
        assert patient.returncode == 0, patient.stderr
        assert patient.stdout.strip()
    finally:
        poets.agent.limits = Limits()


def test_a_stream_is_printed_as_it_comes(served: Server) -> None:
    where = ["--url", served.url(""), "--model", "slow", "--text", "나는 오늘"]
    options = ["--max-new-tokens", "400", "--return-full-text"]
    command = [sys.executable, "-m", "scripts.cli", "invoke", *where, *options, "--stream"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        shown = b""
        while len(shown) < 100:
            shown += os.read(process.stdout.fileno(), 20)
        assert process.poll() is None
        assert running(served) == 1
        shown += process.stdout.read()
        assert process.wait(60) == 0
    parameters = {"max_new_tokens": 400, "return_full_text": True}
    whole = text(served.predict("slow", {"inputs": "나는 오늘", "parameters": parameters}))
    assert whole.startswith("나는 오늘")
    assert shown.decode("utf-8") == whole + "\n"


def test_the_json_of_a_stream_is_that_of_the_whole_answer(run: Run, served: Server) -> None:
    parameters = {"max_new_tokens": 16, "seed": 3, "num_return_sequences": 2}
    drawn = ("--seed", "3", "--num-return-sequences", "2", "--json")
    done = run("invoke", "--url", served.url(""), "--model", "m1", *PROMPT, *drawn, "--stream")
    found = json.loads(done.stdout)
    whole = served.predict("m1", {"inputs": "나는 오늘", "parameters": parameters}).json()
    assert found["sequences"] == [one["generated_text"] for one in whole["sequences"]]
    assert found["tokens"] == sum(one["tokens"] for one in whole["sequences"])
    assert found["finish_reason"] == whole["finish_reason"]
    assert found["time_to_first_token_s"] > 0


def test_an_endpoint_of_one_model_streams(run: Run, served: Server, poets: Poets) -> None:
    done = run("invoke", "--endpoint", "one", "--stream", "--json", *PROMPT, **poets.environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    whole = served.predict("m0", SHORT).json()  # the same model
    assert found["time_to_first_token_s"] > 0
    for name in ("generated_text", "tokens", "finish_reason"):
        assert found[name] == whole[name]


TOKEN = b'{"text": "\xec\x82\xb0", "token": 5, "index": 0}\n'
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    ("end", "said"),
    [(b"", "broke off its answer"), (b"0\r\n\r\n", "the stream broke off before its end")],
)
def test_a_stream_that_breaks_off_is_an_error(run: Run, end: bytes, said: str) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            while b"inputs" not in connection.recv(65_536):
                pass
            connection.sendall(HEAD + b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN) + end)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = run("invoke", "--url", url, "--model", "m0", "--stream", *PROMPT)
        thread.join(60)
    assert (done.returncode, done.stdout) == (1, "산")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


NO_SERVER = ("--url", "http://127.0.0.1:9", "--model", "m0", "--text", "가")


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (NO_SERVER, 1, "http://127.0.0.1:9 is not there: Connection refused"),
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
def test_what_cannot_be_is_said_in_one_sentence(
    run: Run, options: tuple[str, ...], status: int, said: str
) -> None:
    done = run("invoke", *options)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_prompt_in_another_encoding_is_refused(run: Run) -> None:
    done = run("invoke", stdin="산에는 꽃 피네".encode("cp949"))
    assert done.returncode == 2
    assert "iconv" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "없음"), "없음"),
        (("--model", "m0", "--parameters", '{"온도": 1}'), "parameters.온도 is not known"),
        (("--model", "m0", "--temperature", "-1"), "parameters.temperature"),
    ],
)
def test_the_servers_own_words_are_shown(
    run: Run, served: Server, poets: Poets, options: tuple[str, ...], said: str
) -> None:
    for where in (("--url", served.url("")), ("--endpoint", "poets")):
        done = run("invoke", *where, *options, "--text", "가", **poets.environment)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


def test_aws_mistakes_are_said_in_one_sentence(run: Run, poets: Poets) -> None:
    def said(*options: str, **changes: str | None) -> str:
        environment = {**poets.environment, **changes}
        done = run("invoke", *options, "--model", "m0", "--text", "가", **environment)
        assert done.returncode in (1, 2)
        assert done.stderr.count("\n") == 1
        return done.stderr

    assert "not found" in said("--endpoint", "nothing")
    assert "nobody" in said("--endpoint", "poets", "--profile", "nobody")
    keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    assert "credentials" in said("--endpoint", "poets", **keys)
    assert "region" in said("--endpoint", "poets", AWS_REGION=None, AWS_DEFAULT_REGION=None)
