from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from handlers.user_code import messages
from handlers.user_code.messages import receive, receive_from_script, send

MANY = messages.MAX_VALUES


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    one, other = Pipe()
    with one, other:
        yield one, other


def sent(connection: Connection, *contents: bytes) -> None:
    """Sends on a thread, as a pipe holds less than a message."""

    def send_all() -> None:
        for content in contents:
            connection.send_bytes(content)

    threading.Thread(target=send_all, daemon=True).start()


@pytest.mark.parametrize("value", [b"[]", b'{"":0}', b'""', b"0"])
def test_a_scripts_json_has_few_values_as_each_takes_many_times_its_bytes(
    ends: tuple[Connection, Connection], value: bytes
) -> None:
    worker, script = ends
    sent(script, b'{"bodies":0,"answers":[%s]}' % b",".join([value] * MANY))
    with pytest.raises(ValueError, match="more than 1000000 values"):
        receive_from_script(worker)


def test_deep_json_is_malformed_as_any_other(ends: tuple[Connection, Connection]) -> None:
    worker, script = ends
    sent(script, b'{"bodies":' + b"[" * 100_000)
    with pytest.raises(ValueError, match="cannot be read"):
        receive_from_script(worker)


def test_all_bodies_of_a_message_share_a_limit(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, script = ends
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 100)
    sent(script, b'{"bodies":3}', *["봄".encode() * 10] * 3)
    assert receive_from_script(worker) == ({}, ["봄".encode() * 10] * 3)
    sent(script, b'{"bodies":4}', *["봄".encode() * 10] * 4)
    with pytest.raises(OSError, match="bad message length"):
        receive_from_script(worker)


def test_what_a_worker_sends_has_any_number_of_values(ends: tuple[Connection, Connection]) -> None:
    worker, script = ends
    answer = {"answer": [[0.5, "꽃"]] * (MANY // 2 + 1)}
    threading.Thread(target=send, args=(worker, answer), daemon=True).start()
    assert receive(script) == (answer, [])


@pytest.mark.parametrize(
    "content",
    [b'"bodies"', b"[0]", b"{}", b'{"bodies":1.5}', b'{"bodies":-1}'],
)
def test_what_is_no_message_is_malformed(
    ends: tuple[Connection, Connection], content: bytes
) -> None:
    worker, script = ends
    sent(script, content)
    with pytest.raises(ValueError, match=r"a message has|a script's message cannot be read"):
        receive_from_script(worker)


@pytest.mark.parametrize(
    "row",
    [
        [1],
        {},
        "틀림",
        {"type": 1, "message": "", "status": float("inf")},
        {"type": "", "message": 3, "status": 500},
    ],
    ids=str,
)
def test_a_malformed_error_is_a_value_error(row: object) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        messages.error_from(row)  # type: ignore[arg-type]


def test_headers_of_a_connection_are_dropped_however_they_are_spelled() -> None:
    message = {"answers": [{"answer": ["text/plain", 200, {"Content-Length": "3", "X-A": "b"}]}]}
    [answer] = messages.answers_from(message, ["봄".encode()])
    assert isinstance(answer, messages.Answer)
    assert answer.headers == {"x-a": "b"}
