"""Which model of the store is an adapter's base."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from serving.errors import BadRequest, Forbidden, StartError
from serving.models.bases import Bases
from serving.models.model_settings import ModelSettings
from serving.store import Lookups, Sources, open_store
from serving.tokens import Token, Usage, current
from tests.serving.store.archives import touch

STORE = ("kogpt2-base-v2", "팀/바탕", "other")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    touch(tmp_path / "store", *(f"{name}/model.safetensors" for name in STORE))
    return tmp_path / "store"


def adapter(store: Path, base: Any) -> Path:
    folder = store / "감성"
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "adapter_model.safetensors").touch()
    return folder


def find(
    store: Path,
    folder: Path,
    known: str = "",
    named: dict[str, str] | None = None,
    **settings: Any,
) -> str | None:
    async def found() -> str | None:
        lookups = Lookups(Sources(open_store(str(store))))
        try:
            base = await Bases(lookups, known, named).find(folder, ModelSettings(**settings))
            return base and base.name
        finally:
            lookups.close()

    return asyncio.run(found())


@pytest.mark.parametrize(
    ("named", "known", "expected"),
    [
        ("kogpt2-base-v2", "", "kogpt2-base-v2"),
        ("skt/kogpt2-base-v2", "", "kogpt2-base-v2"),
        ("/home/me/models/kogpt2-base-v2/", "", "kogpt2-base-v2"),
        ("../kogpt2-base-v2", "", "kogpt2-base-v2"),
        ("C:\\models\\kogpt2-base-v2", "", "kogpt2-base-v2"),
        ("팀/바탕", "", "팀/바탕"),
        ("skt/kogpt2-base-v2", "skt/kogpt2-base-v2=팀/바탕", "팀/바탕"),
        ("/opt/ml/input/model", "a=b, /opt/*=other,*=kogpt2-base-v2", "other"),
        ("", "*=other", "other"),
        (None, "*=other", "other"),
        ("https://elsewhere/x", "https://*=other", "other"),
    ],
)
def test_a_base_is_found_by_the_adapters_name_for_it(
    store: Path, named: Any, known: str, expected: str
) -> None:
    assert find(store, adapter(store, named), known) == expected


def test_the_models_own_setting_comes_first(store: Path) -> None:
    folder = adapter(store, "kogpt2-base-v2")
    assert find(store, folder, "*=팀/바탕", base="other") == "other"
    assert find(store, folder, base=str(store / "other")) == str(store / "other")
    assert find(store, folder, base=f"file://{store}/./other") == f"{store}/./other"
    named = {str(store / "other"): "하나"}
    assert find(store, folder, named=named, base=str(store / "other")) == "하나"


def team(*models: str) -> Token:
    exact = frozenset(m for m in models if not m.endswith("*"))
    prefixes = tuple(m[:-1] for m in models if m.endswith("*"))
    return Token("가팀", exact, prefixes, True, None, None, Usage())


@pytest.mark.parametrize(
    ("models", "named", "settings", "allowed"),
    [
        (["감성"], "팀/바탕", {}, False),
        (["감성", "other"], "팀/바탕", {}, False),
        (["감성", "팀/*"], "팀/바탕", {}, True),
        (["감성", "팀/바탕"], "none", {"base": "팀/바탕"}, True),
        (["감성"], "none", {"base": "팀/바탕"}, False),
        # A path's last part is no name in the store: another team's model may have it.
        (["감성", "바탕", "other"], "none", {"base": "{store}/팀/바탕"}, False),
        (["감성", "바탕", "other"], "none", {"base": "file://{store}/other"}, False),
        (["*"], "none", {"base": "{store}/팀/바탕"}, True),
    ],
)
def test_a_team_needs_the_right_to_the_base(
    store: Path, models: list[str], named: str, settings: dict[str, str], allowed: bool
) -> None:
    folder = adapter(store, named)
    settings = {name: value.format(store=store) for name, value in settings.items()}
    before = current.set(token := team(*models))
    try:
        if allowed:
            assert find(store, folder, **settings)
            return
        with pytest.raises(Forbidden) as caught:
            find(store, folder, **settings)
    finally:
        current.reset(before)
    assert caught.value.message == "가팀 may not use the base of this adapter"
    assert token.usage.refused["model"] == 1


def test_a_whole_model_has_none(store: Path) -> None:
    assert find(store, store / "other") is None
    whole = adapter(store, "kogpt2-base-v2")
    (whole / "model.safetensors").touch()  # merged, and its adapter's file left
    assert find(store, whole) is None
    with pytest.raises(BadRequest, match="the model is no adapter"):
        find(store, store / "other", base="kogpt2-base-v2")


@pytest.mark.parametrize(
    ("named", "known", "message"),
    [
        ("skt/ko-gpt", "", "looked for: skt/ko-gpt, ko-gpt"),
        ("/home/me/ko-gpt", "", "looked for: ko-gpt"),
        ("", "", "gives no name"),
        ("https://elsewhere/x", "", "gives no name"),
        ("skt/ko-gpt", "skt/*=nichts", "looked for: nichts"),
        ("/", "", "gives no name"),
    ],
)
def test_what_was_looked_for_is_told(store: Path, named: str, known: str, message: str) -> None:
    with pytest.raises(BadRequest) as raised:
        find(store, adapter(store, named), known)
    assert message in raised.value.message
    assert "ADAPTER_BASES" in raised.value.message


def test_a_config_that_cannot_be_read_is_refused(store: Path) -> None:
    folder = adapter(store, "other")
    for text in ("{", "[]", "[" * 100_000):
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
        with pytest.raises(BadRequest, match=r"adapter_config\.json"):
            find(store, folder)


def test_adapter_bases_says_what_is_wrong_with_it(store: Path) -> None:
    for wrong in ("kogpt2", "=b", "a="):
        with pytest.raises(StartError, match="ADAPTER_BASES"):
            find(store, store / "other", wrong)
