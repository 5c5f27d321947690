"""How tokens are compared, and what TOKENS_FILE changes on the routes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from serving.api.access import Right, check_token
from serving.errors import Unauthorized
from serving.mms.client import Answer
from tests.serving.api.gateways import BEARER, SECRET, World, answered, settle, with_token

PATH = "/predictions/봄"


@pytest.mark.parametrize("sent", ["비밀", "비밀-", "가", "비", "", "a" * 100_000])
def test_a_token_is_compared_whole_whatever_was_sent(
    sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `secrets.compare_digest` alone: a difference of nanoseconds cannot be measured here."""
    compare, compared = secrets.compare_digest, []

    def noted(ours: Any, theirs: Any) -> bool:
        compared.append((bytes(ours), bytes(theirs)))
        return compare(ours, theirs)

    monkeypatch.setattr(secrets, "compare_digest", noted)
    header = (b"authorization", b"Bearer " + sent.encode())
    request = Request({"type": "http", "headers": [header]})
    known = ("비밀", "other")
    gateway = World(management_token=known[0], inference_token=known[1]).gateway
    if sent == known[0]:
        check_token(gateway, request, Right.LIST)
    else:
        with pytest.raises(Unauthorized):
            check_token(gateway, request, Right.LIST)
    tried = known[:1] if sent == known[0] else known
    assert compared == [(sent.encode(), token.encode()) for token in tried]


async def test_a_file_alone_closes_calls_lists_and_loading(tmp_path: Path) -> None:
    world = await with_token(World(), tmp_path)
    for method, path in (("POST", PATH), ("GET", "/models"), ("POST", "/models")):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": SECRET}):
            status, _, _ = await world.call(method, path, **headers)
            assert status == 401, (path, headers)
    status, _, _ = await world.call("POST", PATH, authorization=BEARER)
    assert status == 200
    status, _, said = await world.call("POST", "/models", b"{}", authorization=BEARER)
    assert (status, json.loads(said)["type"]) == (403, "ForbiddenException")


@pytest.mark.parametrize(
    ("path", "tokens", "named"),
    [
        (PATH, {"inference_token": "a"}, "INFERENCE_TOKEN"),
        ("/models", {"inference_token": "a"}, "INFERENCE_TOKEN"),
        ("/models", {"inference_token": "a", "management_token": "b"}, "MANAGEMENT_TOKEN"),
        ("/models", {"management_token": "b"}, "MANAGEMENT_TOKEN"),
    ],
)
@pytest.mark.parametrize("has_file", [False, True])
async def test_a_refusal_names_the_settings_of_the_tokens(
    tmp_path: Path, path: str, tokens: dict[str, Any], named: str, has_file: bool
) -> None:
    world = World(**tokens)
    if has_file:
        await with_token(world, tmp_path)
        named += " or TOKENS_FILE"
    status, _, body = await world.call("POST", path, b"{}")
    message = f"send a token of {named} as Authorization: Bearer <token>"
    assert (status, json.loads(body)["message"]) == (401, message)


async def test_the_one_token_stays_the_simple_way_beside_a_file(tmp_path: Path) -> None:
    simple: dict[str, Any] = {"inference_token": "infer-me", "management_token": "manage-me"}
    world = await with_token(World(**simple), tmp_path, models=[])
    status, _, _ = await world.call("POST", PATH, authorization="Bearer infer-me")
    assert status == 200
    status, _, _ = await world.call("GET", "/models/봄", authorization="Bearer manage-me")
    assert status == 200
    status, _, _ = await world.call("POST", PATH, authorization=BEARER)
    assert status == 403


async def test_a_refusal_says_when_to_come_back_and_is_counted_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world = await with_token(World(), tmp_path, requests_per_minute=2)
    now_s = 5.0
    world.gateway.tokens.now = lambda: now_s
    statuses = []
    for _ in range(3):
        status, headers, _ = await world.call("POST", PATH, authorization=BEARER)
        statuses.append(status)
    assert statuses == [200, 200, 429]
    assert headers["retry-after"] == "30"
    now_s += 30
    status, _, _ = await world.call("POST", "/predictions/여름", authorization=BEARER)
    assert status == 403
    shown = world.gateway.metrics.text(None, {}, {}, world.gateway.tokens.all()).decode()
    for line in (
        'kogpt2_token_requests_total{token="가팀"} 4.0',
        'kogpt2_token_refusals_total{reason="rate",token="가팀"} 1.0',
        'kogpt2_token_refusals_total{reason="model",token="가팀"} 1.0',
    ):
        assert line in shown
    told = [r.fields for r in caplog.records if r.getMessage() == "request"]  # type: ignore[attr-defined]
    assert [fields["token"] for fields in told] == ["가팀"] * 4
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    for text in (shown, caplog.text, str(told)):
        assert SECRET not in text
        assert digest not in text


@pytest.mark.parametrize("end", ["answer", "error", "gone", "cancelled", "refused"])
async def test_a_place_is_given_back_however_a_request_ends(tmp_path: Path, end: str) -> None:
    world = await with_token(World(), tmp_path, concurrency=1)
    begun, go, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(number: int) -> Answer:
        begun.set()
        await go.wait()
        if end == "error":
            raise RuntimeError("broken")
        return answered()

    world.mms.answer = answer
    (usage,) = (token.usage for token in world.gateway.tokens.all())
    if end == "refused":
        status, _, _ = await world.call("POST", "/predictions/여름", authorization=BEARER)
        assert (status, usage.in_flight) == (403, 0)
        return
    call = world.call("POST", PATH, gone=gone, authorization=BEARER)
    first = asyncio.create_task(call)
    await begun.wait()
    assert usage.in_flight == 1
    status, headers, _ = await world.call("POST", PATH, authorization=BEARER)
    assert (status, headers["retry-after"]) == (429, "1")
    if end == "gone":
        gone.set()
    elif end == "cancelled":
        first.cancel()
    else:
        go.set()
    with contextlib.suppress(asyncio.CancelledError, RuntimeError):
        await first
    assert usage.in_flight == 0
    go.set()
    await settle()
