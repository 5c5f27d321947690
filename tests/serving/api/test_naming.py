"""What routes make of an alias: which model answers, what is told of it, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from serving.aliases import Aliases, parse
from serving.models.model_settings import ModelSettings
from tests.serving.api.gateways import BEARER, World, model, settle, with_token
from tests.serving.fakes import stored

SPLIT = {"고객": {"봄": 9, "여름": 1}, "시": {"봄": 1}}


def aliases_of(value: dict[str, Any]) -> Aliases:
    found = Aliases()
    found._take(parse(json.dumps(value).encode()))
    return found


def world_of(value: dict[str, Any] | None = None, **settings: Any) -> World:
    """Models 봄 and 여름, and aliases."""
    world = World(**settings)
    world.add(model("여름"), in_engine=False)
    world.gateway.aliases = aliases_of(SPLIT if value is None else value)
    return world


async def served(world: World, name: str = "고객", **headers: str) -> str:
    """The model that the answer names."""
    status, answered, body = await world.call("POST", f"/predictions/{name}", **headers)
    assert status == 200, body
    return unquote(answered["x-served-model"])


async def test_an_alias_is_answered_by_its_models_in_turn_and_all_tell_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    world = world_of()
    answers = [await served(world) for _ in range(10)]
    assert Counter(answers) == {"봄": 9, "여름": 1}
    status, headers, _ = await world.call("POST", "/predictions/봄")
    assert status == 200
    assert "x-served-model" not in headers
    told = [r.fields for r in caplog.records if r.getMessage() == "request"]  # type: ignore[attr-defined]
    assert [fields["model"] for fields in told] == [*answers, "봄"]
    assert [fields.get("alias") for fields in told] == ["고객"] * 10 + [None]
    shown = world.gateway.metrics.text(None, {}, {}, (), world.gateway.aliases).decode()
    for line in (
        "kogpt2_aliases 2.0",
        "kogpt2_aliases_wrong 0.0",
        'kogpt2_alias_requests_total{alias="고객",model="봄"} 9.0',
        'kogpt2_alias_requests_total{alias="고객",model="여름"} 1.0',
        'kogpt2_requests_total{model="봄",status="200"} 10.0',
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/models/시.tar.gz/invoke", {}, "text"),
        ("/invocations?model_name=%EC%8B%9C", {}, "text"),
        ("/invocations", {"x-amzn-sagemaker-target-model": "시.tar.gz"}, "text"),
        ("/invocations", {"x-amzn-sagemaker-adapter-identifier": "시"}, "text"),
        ("/invocations", {"x-amzn-sagemaker-custom-attributes": "a=7;model=%EC%8B%9C"}, "text"),
        ("/endpoints/e/invocations", {"x-amzn-sagemaker-target-model": "시"}, "text"),
        ("/v2/models/시/infer", {}, "text"),
        ("/invocations", {}, {"prompt": "가", "model": "시.tar.gz"}),
        # What AWS's own header says comes first.
        (
            "/invocations",
            {"x-amzn-sagemaker-target-model": "시"},
            {"prompt": "가", "model": "겨울"},
        ),
    ],
)
async def test_every_way_to_name_a_model_takes_an_alias(
    path: str, headers: dict[str, str], body: Any
) -> None:
    status, answered, said = await world_of().call("POST", path, body, **headers)
    assert (status, unquote(answered["x-served-model"])) == (200, "봄"), said


async def test_a_session_or_user_stays_with_one_model() -> None:
    world = world_of({"고객": {"봄": 1, "여름": 1}})
    sides = {}
    for i in range(16):
        answers = {await served(world, x_session_id=f"손님-{i}") for _ in range(3)}
        (sides[i],) = answers
    assert set(sides.values()) == {"봄", "여름"}
    other = world_of({"고객": {"봄": 1, "여름": 1}})  # another server of the fleet
    for i, side in sides.items():
        assert await served(other, x_session_id=f"손님-{i}") == side


async def test_lists_and_descriptions_say_what_an_alias_stands_for() -> None:
    world = world_of(sagemaker_multi_model=True)  # lists ask no store then

    async def told(method: str, path: str, body: bytes = b"") -> Any:
        status, _, answer = await world.call(method, path, body)
        assert status == 200, answer
        return json.loads(answer)

    listed = await told("GET", "/models")
    assert [m["modelName"] for m in listed["models"]] == ["봄", "여름"]
    assert listed["aliases"] == SPLIT
    assert "aliases" not in await told("GET", "/models?next_page_token=1")
    data = {m["id"]: m for m in (await told("GET", "/v1/models"))["data"]}
    assert {name: m.get("alias_of") for name, m in data.items()} == {
        **SPLIT, "봄": None, "여름": None,
    }  # fmt: skip
    assert await told("GET", "/v1/models/고객") == data["고객"]
    assert await told("GET", "/models/고객") == {"modelName": "고객", "aliasOf": SPLIT["고객"]}
    assert (await told("GET", "/v2/models/고객"))["name"] == "봄"
    assert (await told("GET", "/v2/models/고객/config"))["name"] == "봄"
    assert (await told("GET", "/v2/models/고객/ready"))["ready"]
    world.registry._models.pop("여름")
    status, _, _ = await world.call("GET", "/v2/models/고객/ready")
    assert status == 404


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/models", {"url": "/봄", "model_name": "고객"}),
        ("POST", "/models", {"url": "고객"}),
        ("POST", "/adapters", {"name": "고객", "src": "봄"}),
        ("DELETE", "/adapters/고객", {}),
        ("PUT", "/models/고객?pinned=true", {}),
        ("DELETE", "/models/고객", {}),
        ("POST", "/v2/repository/models/고객/load", {}),
        ("POST", "/v2/repository/models/고객/unload", {}),
    ],
)
async def test_nothing_is_loaded_pinned_or_unloaded_by_an_aliass_name(
    method: str, path: str, body: dict[str, Any]
) -> None:
    async def locate(url: str, handler: str | None = None) -> Any:
        return world.model.stored

    world = world_of()
    world.gateway.lookups.locate = locate  # type: ignore[method-assign]
    status, _, said = await world.call(method, path, body)
    kind = json.loads(said).get("type", "ConflictStatusException")  # Triton's have none
    assert (status, kind) == (409, "ConflictStatusException"), said
    assert "고객 is an alias in aliases.json: name the model, 봄 or 여름" in said.decode()


async def test_an_alias_may_have_the_name_of_one_of_its_models() -> None:
    world = world_of({"봄": {"봄": 9, "여름": 1}})
    assert Counter([await served(world, "봄") for _ in range(10)]) == {"봄": 9, "여름": 1}
    status, _, said = await world.call("PUT", "/models/봄?pinned=nonsense")
    assert (status, json.loads(said)["type"]) == (400, "BadRequestException")  # it is the model
    _, _, told = await world.call("GET", "/models/봄")
    assert json.loads(told)["aliasOf"] == {"봄": 9, "여름": 1}


@pytest.mark.parametrize(
    ("patterns", "allowed"),
    [(["고객", "봄", "여름"], True), (["*"], True), (["고객"], False), (["고객", "봄"], False),
     (["봄", "여름"], False)],
)  # fmt: skip
async def test_a_team_needs_an_aliass_name_and_all_of_its_models(
    patterns: list[str], allowed: bool, tmp_path: Path
) -> None:
    world = await with_token(world_of(sagemaker_multi_model=True), tmp_path, models=patterns)
    given = {"authorization": BEARER}
    for _ in range(3):  # by whatever model it would be answered
        status, _, said = await world.call("POST", "/predictions/고객", **given)
        assert (status == 200) == allowed, said
    _, _, listed = await world.call("GET", "/v1/models", **given)
    assert ("고객" in [m["id"] for m in json.loads(listed)["data"]]) == allowed
    _, _, told = await world.call("GET", "/models", **given)
    assert ("고객" in json.loads(told).get("aliases", {})) == allowed


@pytest.mark.parametrize(
    ("patterns", "allowed"),
    [(["가/*", "시", "나/비밀"], True), (["*"], True), (["가/*", "시"], False)],
)
@pytest.mark.parametrize("kind", ["adapter", "delta of the base in its settings"])
async def test_a_team_needs_a_models_name_and_the_base_that_it_needs(
    kind: str, patterns: list[str], allowed: bool, tmp_path: Path
) -> None:
    """The model is loaded: by another token, or before the team lost a right."""
    world = World(model("가/말투"), sagemaker_multi_model=True)
    world.model.stored_base = stored("나/비밀")
    world.model.is_adapter = kind == "adapter"
    if not world.model.is_adapter:
        world.model.settings = ModelSettings(base="나/비밀")
    world.gateway.aliases = aliases_of({"시": "가/말투"})
    await with_token(world, tmp_path, models=patterns, load=True)
    given = {"authorization": BEARER}
    for method, path in (
        ("POST", "/predictions/가%2F말투"),
        ("POST", "/predictions/시"),
        ("GET", "/models/가%2F말투"),
        ("GET", "/v2/models/가%2F말투/ready"),
        ("PUT", "/models/가%2F말투?pinned=true"),
    ):
        status, _, said = await world.call(method, unquote(path), **given)
        assert status == (200 if allowed else 403), (path, said)
        assert allowed or "나/비밀" not in said.decode()
    for path in ("/v1/models", "/models", "/v2/models/stats"):
        _, _, listed = await world.call("GET", path, **given)
        assert ("가/말투" in listed.decode()) == allowed
        assert allowed or "시" not in listed.decode()
        assert allowed or "나/비밀" not in listed.decode()


async def test_a_team_needs_no_right_to_a_base_that_was_looked_up(tmp_path: Path) -> None:
    world = World(model("가/말투"), sagemaker_multi_model=True)
    world.model.stored_base = stored("나/비밀")
    await with_token(world, tmp_path, models=["가/*"], load=True)
    given = {"authorization": BEARER}
    assert (await world.call("POST", "/predictions/가/말투", **given))[0] == 200
    for path in ("/models/가/말투", "/models", "/v1/models"):
        status, _, shown = await world.call("GET", path, **given)
        assert status == 200
        assert "가/말투" in shown.decode()
        assert "나/비밀" not in shown.decode()
    world.model.whole_because = "it is not as 나/비밀"
    assert "나/비밀" not in (await world.call("GET", "/models/가/말투", **given))[2].decode()
    await with_token(world, tmp_path, models=["가/*", "나/비밀"], load=True)
    shown = json.loads((await world.call("GET", "/models/가/말투", **given))[2])
    assert (shown.get("baseModel"), shown["wholeBecause"]) == (None, "it is not as 나/비밀")
    world.model.whole_because = ""
    for path in ("/models/가/말투", "/models"):
        assert '"baseModel":"나/비밀"' in (await world.call("GET", path, **given))[2].decode()


@pytest.mark.parametrize("is_adapter", [True, False])
@pytest.mark.parametrize("reason", ["", "it is not as 나/비밀"])
async def test_the_console_shows_no_base_that_its_token_may_not_use(
    is_adapter: bool, reason: str, tmp_path: Path
) -> None:
    world = World(model("가/말투"), sagemaker_multi_model=True)
    world.model.stored_base, world.model.is_adapter = stored("나/비밀"), is_adapter
    world.model.whole_because = reason
    await with_token(world, tmp_path, models=["가/*"])
    gone = asyncio.Event()
    watching = asyncio.create_task(
        world.call("GET", "/console/events", gone=gone, authorization=BEARER)
    )
    await settle()
    gone.set()
    status, _, shown = await watching
    assert status == 200
    assert '"whole":true' in shown.decode().replace(" ", "")
    assert ("말투" in shown.decode()) is not is_adapter
    assert "나/비밀" not in shown.decode()
