"""The file of aliases: what it may hold, which model is chosen, and when it is read again."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from common.errors import SettingError
from serving import aliases
from serving.aliases import Alias, Aliases, parse
from serving.errors import StoreAccessDenied, StoreUnavailable
from serving.store import Lookups, Sources
from serving.store.folder import FolderStore
from tests.serving.store.archives import touch

SPLIT = {"support-v7": 90.0, "support-v8": 10.0}


def parsed(value: object) -> dict[str, dict[str, float]]:
    return {name: dict(a.weights) for name, a in parse(json.dumps(value).encode()).items()}


def test_an_alias_is_a_model_or_several_by_weights_under_normal_names() -> None:
    nfd = unicodedata.normalize("NFD", "시")
    found = parsed({f"{nfd}.tar.gz": "소월-3.mar", "support": SPLIT, "팀/봄": {"팀/봄": 1, "b": 1}})
    assert found == {"시": {"소월-3": 1}, "support": SPLIT, "팀/봄": {"팀/봄": 1, "b": 1}}
    assert parsed({}) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ('{\n"a": "b",}', "not JSON: .*line 2"),
        ("[" * 100_000, "not JSON"),
        ("\ud800", "not UTF-8"),
        ("[]", "must be {"),
        ('[["a", "b"]]', "must be {"),
        ('{"a": "x", "a.tar.gz": "y"}', "'a' is there twice"),
        ('{"a": "x", "b": "a"}', "'b': 'a' is an alias itself"),
        ('{"a": {"a": 1, "b": 1}, "b": "x"}', "'a': 'b' is an alias itself"),
        ('{"../a": "x"}', "is no model name"),
        ('{"a": ""}', "is no model name"),
        ('{"a": null}', "'a' must be a model's name"),
        ('{"a": ["x", "y"]}', "'a' must be a model's name"),
        ('{"a": {}}', "'a' must be a model's name"),
        ('{"a": {"x": 1, "x.mar": 1}}', "'a' has 'x' twice"),
        *(
            (f'{{"시": {{"봄": {weight}}}}}', "'시': the weight of '봄' must be a number above 0")
            for weight in ("0", "-1", "NaN", "Infinity", "1e7", "true", '"9"', "null")
        ),
        (json.dumps({"a": {f"m{i}": 1 for i in range(65)}}), "1 to 64"),
        ('{"a": "x"}' + " " * aliases.MAX_BYTES, "bytes"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(SettingError, match=said) as caught:
        parse(text.encode("utf-8", "surrogatepass"))
    assert caught.value.message.startswith("aliases.json: ")
    assert len(caught.value.message) < 500


def test_models_take_turns_by_their_weights_exactly() -> None:
    alias = Alias("support", SPLIT)
    for _ in range(3):
        turn = [alias.choose() for _ in range(10)]
        assert Counter(turn) == {"support-v7": 9, "support-v8": 1}
    three = Alias("봄", {"a": 0.5, "b": 0.25, "c": 0.25})
    assert Counter(three.choose() for _ in range(400)) == {"a": 200, "b": 100, "c": 100}


def test_a_key_has_the_same_model_in_each_server_and_few_move_with_the_weights() -> None:
    keys = [f"손님-{i}" for i in range(2000)]

    def chosen(weights: dict[str, float]) -> list[str]:
        alias = Alias("support", weights)
        return [alias.choose(key) for key in keys]

    before = chosen(SPLIT)
    assert before == chosen(dict(reversed(SPLIT.items())))
    assert 160 < before.count("support-v8") < 240
    after = chosen({"support-v7": 80.0, "support-v8": 20.0})
    moved = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {("support-v7", "support-v8")}
    assert 160 < len(moved) < 240
    third = chosen({**SPLIT, "support-v9": 100.0})
    assert {b for a, b in zip(before, third, strict=True) if a != b} == {"support-v9"}


class Setup:
    def __init__(self, folder: Path) -> None:
        (folder / "store").mkdir(exist_ok=True)
        self.file = folder / "store" / "aliases.json"
        self.store = mock.Mock(FolderStore, wraps=FolderStore(self.file.parent))
        self.lookups = Lookups(Sources(self.store))
        self.copy = folder / "copy.json"
        self.aliases = Aliases(self.lookups, self.copy)

    def weights(self) -> dict[str, dict[str, float]]:
        return {alias.name: dict(alias.weights) for alias in self.aliases.all()}

    async def read(self, text: str) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.file)
        await self.aliases.refresh()


@pytest.fixture
def at(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


async def test_the_file_is_read_when_it_changes_and_not_before(at: Setup) -> None:
    await at.aliases.refresh()
    assert (at.weights(), at.aliases.wrong) == ({}, False)
    await at.read('{"시": "소월"}')
    assert at.weights() == {"시": {"소월": 1}}
    await at.aliases.refresh()
    assert at.store.read.call_count == 1
    await at.read('{"시": "동주-2"}')
    assert at.weights() == {"시": {"동주-2": 1}}
    at.file.unlink()
    await at.aliases.refresh()
    assert (at.weights(), at.copy.exists()) == ({}, False)


async def test_a_wrong_file_changes_nothing_and_is_told_once(
    at: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    await at.read('{"시": "소월"}')
    await at.read('{"시": {"소월": 0}}')
    await at.aliases.refresh()
    assert (at.weights(), at.aliases.wrong) == ({"시": {"소월": 1}}, True)
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].endswith("; the 1 aliases before stay")
    await at.read('{"시": {"소월": 2}}')
    assert (at.weights(), at.aliases.wrong) == ({"시": {"소월": 2}}, False)


@pytest.mark.parametrize("error", [StoreAccessDenied("denied"), StoreUnavailable("gone")])
async def test_aliases_stay_without_the_store_and_without_any_it_is_no_alarm(
    error: Exception, at: Setup
) -> None:
    at.store.file.side_effect = error
    await at.aliases.refresh()
    assert not at.aliases.wrong
    at.store.file.side_effect = None
    await at.read('{"시": "소월"}')
    at.store.file.side_effect = error
    await at.aliases.refresh()
    assert (at.weights(), at.aliases.wrong) == ({"시": {"소월": 1}}, True)
    at.store.file.side_effect = None
    await at.aliases.refresh()  # the file has not changed
    assert (at.weights(), at.aliases.wrong) == ({"시": {"소월": 1}}, False)


async def test_a_gateway_that_starts_without_the_store_has_the_aliases_before(
    at: Setup, tmp_path: Path
) -> None:
    await Setup(tmp_path).read('{"시": "소월"}')
    at.store.file.side_effect = StoreUnavailable("gone")
    watching = asyncio.create_task(at.aliases.watch())
    await at.aliases.ready.wait()
    watching.cancel()
    assert at.weights() == {"시": {"소월": 1}}


async def test_turns_and_counts_outlive_a_change_elsewhere_in_the_file(at: Setup) -> None:
    await at.read(json.dumps({"support": SPLIT}))
    kept = at.aliases.find("support")
    assert kept is not None
    kept.requests["support-v7"] = 5
    await at.read(json.dumps({"support": SPLIT, "시": "소월"}))
    assert at.aliases.find("support") is kept
    await at.read(json.dumps({"support": {"support-v7": 1, "new": 1}}))
    changed = at.aliases.find("support")
    assert changed is not None
    assert changed is not kept
    assert changed.requests == {"support-v7": 5}


async def test_a_model_that_the_store_does_not_have_is_told(
    at: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    touch(at.file.parent, "소월/a.params")
    at.file.write_text('{"시": {"소월": 1, "없음": 1}}', encoding="utf-8")
    watching = asyncio.create_task(at.aliases.watch())
    while not any(r.levelname == "WARNING" for r in caplog.records):
        await asyncio.sleep(0)
    watching.cancel()
    (said,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert said == "aliases.json names 1 models that the store does not have: 없음 (시)"


async def test_a_store_that_may_not_be_listed_is_listed_once_for_each_file(
    at: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    at.store.models.side_effect = StoreAccessDenied("s3:ListBucket is denied")
    await at.read("{}")
    await at.aliases._warn_of_unknown()
    assert at.store.models.call_count == 0  # there is no model to look for
    for listings in (1, 2):
        await at.read(json.dumps({"시": f"소월-{listings}"}))
        for _ in range(3):
            await at.aliases._warn_of_unknown()
        assert at.store.models.call_count == listings
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warnings == ["the models of aliases.json are not checked: s3:ListBucket is denied"] * 2
