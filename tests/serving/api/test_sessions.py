"""SageMaker's stateful sessions on `/invocations`, by a clock that the test sets."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from serving.api import sessions
from serving.api.sessions import Sessions
from tests.serving.api.gateways import World

NOON = 1_800_000_000  # 2027-01-15T08:00:00Z
LIFE_S = 1200
OPEN, CLOSE = b'{"requestType": "NEW_SESSION"}', b'{"requestType": "CLOSE"}'
NEVER_OPENED = "00000000-0000-4000-8000-000000000000"

Answer = tuple[int, dict[str, str], bytes]


class Endpoint:
    """A container of one model whose sessions are enabled; `restart` is its gateway's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder / "sessions", NOON
        self.restart()

    def restart(self) -> None:
        self.world = World()
        self.world.gateway.single_model = "봄"
        self.world.gateway.sessions = Sessions(self.folder, LIFE_S, lambda: self.now)

    async def invoke(
        self, body: Any = "text", id: str = "", path: str = "/invocations", **headers: str
    ) -> Answer:
        named = {"x-amzn-sagemaker-session-id": id} if id else {}
        return await self.world.call("POST", path, body, **named, **headers)

    async def open(self) -> str:
        status, headers, body = await self.invoke(OPEN)
        assert status == 200, body
        return headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint(tmp_path)


def refusal(answer: Answer) -> str:
    """The message of a 400."""
    status, _, body = answer
    error = json.loads(body)
    assert (status, error["type"]) == (400, "BadRequestException"), error
    message: str = error["message"]
    return message


async def test_a_session_is_opened_used_and_closed(endpoint: Endpoint) -> None:
    status, headers, body = await endpoint.invoke(OPEN)
    id, _, expires = headers["x-amzn-sagemaker-new-session-id"].partition("; ")
    assert sessions.UUID.fullmatch(id)
    assert expires == "Expires=2027-01-15T08:20:00Z"
    assert (status, body) == (200, f"Session {id} created".encode())
    assert (await endpoint.invoke(id=id))[0] == 200
    status, headers, body = await endpoint.invoke(CLOSE, id)
    assert (status, body) == (200, f"Session {id} closed".encode())
    assert headers["x-amzn-sagemaker-closed-session-id"] == id
    assert refusal(await endpoint.invoke(id=id)).startswith(f"session not found: {id}")
    assert "session not found" in refusal(await endpoint.invoke(CLOSE, id))
    assert endpoint.files() == []


async def test_a_session_ends_by_itself(endpoint: Endpoint) -> None:
    id = await endpoint.open()
    endpoint.now += LIFE_S - 1
    assert (await endpoint.invoke(id=id))[0] == 200
    endpoint.now += 1
    for body in (b'"text"', CLOSE):
        assert "session not found" in refusal(await endpoint.invoke(body, id))
    later = await endpoint.open()
    assert endpoint.files() == [later]


async def test_sessions_outlive_the_gateway(endpoint: Endpoint) -> None:
    closed, early = await endpoint.open(), await endpoint.open()
    await endpoint.invoke(CLOSE, closed)
    endpoint.now += 600
    late = await endpoint.open()
    endpoint.restart()
    for id in (early, late):
        assert (await endpoint.invoke(id=id))[0] == 200
    refusal(await endpoint.invoke(id=closed))
    endpoint.now += 600
    endpoint.restart()
    refusal(await endpoint.invoke(id=early))
    assert (await endpoint.invoke(CLOSE, late))[0] == 200
    last = await endpoint.open()
    assert endpoint.files() == [last]
    assert stat.S_IMODE(endpoint.folder.stat().st_mode) == 0o700


async def test_files_that_are_no_sessions_are_left_alone(endpoint: Endpoint) -> None:
    other = endpoint.folder / "메모"
    other.touch()
    os.utime(other, (NOON + LIFE_S, NOON + LIFE_S))
    half = endpoint.folder / NEVER_OPENED  # made, and the gateway ended before it had its end
    half.touch()
    os.utime(half, (NOON, NOON))
    endpoint.restart()
    refusal(await endpoint.invoke(id=half.name))
    id = await endpoint.open()
    assert endpoint.files() == sorted([id, other.name])


async def test_more_sessions_than_may_be_open_are_told_when_one_ends(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    first = await endpoint.open()
    endpoint.now += 200
    second = await endpoint.open()
    status, headers, body = await endpoint.invoke(OPEN)
    assert (status, headers["retry-after"]) == (429, str(LIFE_S - 200)), body
    await endpoint.invoke(CLOSE, second)
    third = await endpoint.open()
    endpoint.now += LIFE_S - 200
    assert sorted([third, await endpoint.open()]) == endpoint.files()
    refusal(await endpoint.invoke(id=first))


async def test_ended_sessions_do_not_count_behind_one_of_a_longer_life(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    long = await endpoint.open()
    shorter = Sessions(endpoint.folder, 60, lambda: endpoint.now)
    endpoint.world.gateway.sessions = shorter
    await endpoint.open()
    endpoint.now += 60
    later = await endpoint.open()
    assert endpoint.files() == sorted([long, later])
    status, headers, _ = await endpoint.invoke(OPEN)
    assert (status, headers["retry-after"]) == (429, "60")


async def test_a_file_whose_writing_was_cut_off_is_removed(endpoint: Endpoint) -> None:
    id = await endpoint.open()
    (endpoint.folder / f"{id}.new").write_text('{"계절": "봄', encoding="utf-8")
    endpoint.restart()
    assert endpoint.files() == [id]
    assert (await endpoint.invoke(id=id))[0] == 200


async def test_a_session_that_cannot_be_kept_is_not_opened(endpoint: Endpoint) -> None:
    endpoint.folder.rmdir()
    status, headers, body = await endpoint.invoke(OPEN)
    assert (status, headers["retry-after"]) == (503, "1"), body
    endpoint.folder.mkdir()
    id = await endpoint.open()
    assert (await endpoint.invoke(id=id))[0] == 200


@pytest.mark.parametrize(
    "id",
    [
        NEVER_OPENED,
        "x",
        "../lock",
        "/etc/passwd",
        ".",
        "a" * 5000,
        "세션".encode().decode("latin-1"),
    ],
)
@pytest.mark.parametrize("body", [b'"text"', CLOSE])
async def test_an_unknown_id_is_refused(endpoint: Endpoint, body: bytes, id: str) -> None:
    (endpoint.folder.parent / "lock").touch()
    assert "session not found" in refusal(await endpoint.invoke(body, id))
    assert (endpoint.folder.parent / "lock").exists()
    assert endpoint.world.mms.told_s == []


@pytest.mark.parametrize(
    "body",
    [
        {"requestType": "NEW_SESSION", "extra-field": "값"},
        {"requestType": "CLOSE", "inputs": "나는"},
        {"requestType": "OPEN"},
        {"requestType": "close"},
        {"requestType": None},
        {"requestType": ["CLOSE"]},
        {"requestType": {}},
    ],
)
async def test_a_request_that_is_malformed_changes_nothing(
    endpoint: Endpoint, body: object
) -> None:
    id = await endpoint.open()
    message = refusal(await endpoint.invoke(body, id))
    assert message == "requestType must be NEW_SESSION or CLOSE, and the only field"
    assert endpoint.files() == [id]
    assert (await endpoint.invoke(id=id))[0] == 200


async def test_close_names_its_session_and_neither_asks_a_model(endpoint: Endpoint) -> None:
    endpoint.world.gateway.single_model = None
    await endpoint.invoke(CLOSE, await endpoint.open())
    assert (endpoint.world.mms.told_s, endpoint.world.gateway.requests) == ([], 0)
    id = await endpoint.open()
    needed = "CLOSE needs the header X-Amzn-SageMaker-Session-Id"
    assert refusal(await endpoint.invoke(CLOSE)) == needed
    assert endpoint.files() == [id]


async def test_the_id_of_boto3_for_a_new_session_is_no_session(endpoint: Endpoint) -> None:
    for kind in ("application/json", ""):  # a body without one is JSON
        status, headers, _ = await endpoint.invoke(OPEN, "NEW_SESSION", **{"content-type": kind})
        assert (status, "x-amzn-sagemaker-new-session-id" in headers) == (200, True)
    assert (await endpoint.invoke(id="NEW_SESSION"))[0] == 200
    assert "session not found" in refusal(await endpoint.invoke(CLOSE, "NEW_SESSION"))


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (b'"requestType"', {}),
        (b'["requestType"]', {}),
        (b'{"inputs": "\\"requestType\\""}', {}),
        (b'{"inputs": {"requestType": "CLOSE"}}', {}),
        (b'{"requestType": "CLOSE"', {}),
        (OPEN, {"content-type": "text/plain"}),
        (OPEN, {"path": "/predictions/봄"}),
    ],
)
async def test_any_other_body_and_other_routes_are_the_models(
    endpoint: Endpoint, body: bytes, more: dict[str, str]
) -> None:
    status, headers, _ = await endpoint.invoke(body, **more)
    assert status == 200
    assert "x-amzn-sagemaker-new-session-id" not in headers
    assert len(endpoint.world.mms.told_s) == 1


async def test_where_they_are_not_enabled_sessions_are_refused_and_nothing_else(
    endpoint: Endpoint,
) -> None:
    endpoint.world.gateway.sessions = None
    for body, id in ((OPEN, ""), (OPEN, "NEW_SESSION"), (CLOSE, NEVER_OPENED), (b'"a"', "x")):
        assert "sessions are not enabled" in refusal(await endpoint.invoke(body, id))
    assert endpoint.world.mms.told_s == []
    for body in (b'"text"', b'{"requestType": "of a script"}'):
        assert (await endpoint.invoke(body))[0] == 200
