"""Which model of the store is the base of an adapter or of a whole fine-tune."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.errors import SettingError
from serving.errors import BadRequest, Forbidden, StartError
from serving.models.bases import Base, Bases
from serving.models.model import Model
from serving.models.model_settings import ModelSettings
from serving.settings import Settings
from serving.store import Fetched, Lookups, Sources, open_store
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


def whole(store: Path, name: str, **config: Any) -> Path:
    folder = store / name
    touch(store, f"{name}/model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def delta(store: Path, name: str, **config: Any) -> Path:
    folder = store / name
    touch(store, f"{name}/delta.safetensors", f"{name}/kogpt2.spiece")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def found(
    store: Path,
    folder: Path,
    known: str = "",
    named: dict[str, str] | None = None,
    server: Mapping[str, str] | None = None,
    name: str = "",
    **settings: Any,
) -> Base:
    async def found() -> Base:
        lookups = Lookups(Sources(open_store(str(store))))
        try:
            stored = await lookups.locate(str(folder.relative_to(store)))
            model = Model(name or stored.name, str(folder), "1", stored, {})
            model.settings, model.fetched = ModelSettings(**settings), Fetched(folder, hit=True)
            bases = Bases(lookups, Settings(model_bases=known, **(server or {})), named)
            return await bases.find(model)
        finally:
            lookups.close()

    return asyncio.run(found())


def find(*arguments: Any, **options: Any) -> str | None:
    base = found(*arguments, **options).stored
    return base and base.name


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
        (["감성"], None, {"base": "팀/바탕"}, False),
        (["감성", "팀/바탕"], None, {"base": "팀/바탕"}, True),
    ],
)
def test_a_team_needs_the_right_to_a_base_that_a_model_needs(
    store: Path, models: list[str], named: str | None, settings: dict[str, str], allowed: bool
) -> None:
    folder = whole(store, "감성") if named is None else adapter(store, named)
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
    assert caught.value.message == "가팀 may not use the base of this model"
    assert token.usage.refused["model"] == 1


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("skt/kogpt2-base-v2", "", "kogpt2-base-v2"),
        ("/home/me/kogpt2-base-v2/", "", "kogpt2-base-v2"),
        ("팀/바탕", "", "팀/바탕"),
        ("skt/kogpt2-base-v2", "skt/*=other", "other"),
        # Also the model's own name, the first match first; v1's fine-tunes have no other.
        (None, "시/*=other", "other"),
        (None, "시/봄=팀/바탕,시/*=other", "팀/바탕"),
        ("skt/kogpt2-base-v2", "시/*=other,skt/*=팀/바탕", "other"),
        (None, "봄=other", None),
        (None, "skt/*=other", None),
    ],
)
def test_a_whole_model_has_the_base_that_it_was_trained_on_or_that_is_mapped_to_its_name(
    store: Path, name: str | None, known: str, expected: str | None
) -> None:
    folder = whole(store, "시/봄", **({} if name is None else {"_name_or_path": name}))
    assert find(store, folder, known) == expected
    # Under another name, as SageMaker gives it.
    assert find(store, folder, known, name="5f4dcc3b5aa765d61d8327deb882cf99") == expected
    assert find(store, folder, known, share=False) is None
    assert find(store, folder, known, base="팀/바탕") == "팀/바탕"


def test_models_of_one_store_are_no_bases_of_each_other_by_accident(store: Path) -> None:
    others = [whole(store, "소월"), whole(store, "동주"), whole(store, "팀/윤동주")]
    for folder in (*others, store / "other", store / "kogpt2-base-v2"):
        assert found(store, folder) == Base()
    merged = adapter(store, "kogpt2-base-v2")
    (merged / "model.safetensors").touch()  # its adapter's file was left
    assert found(store, merged) == Base()


LONG = json.dumps({"_name_or_path": "바" * 1025})


@pytest.mark.parametrize("wrong", ["{", "[]", '{"_name_or_path": 1}', "[" * 100_000, LONG])
def test_a_config_without_a_name_names_no_base(store: Path, wrong: str) -> None:
    folder = whole(store, "봄")
    (folder / "config.json").write_text(wrong, encoding="utf-8")
    assert found(store, folder) == Base()


@pytest.mark.parametrize("name", ["바\0탕", "..", "../../바탕", "바\n탕", "%2e%2e/x", " ", "s3:/x"])
def test_a_name_that_no_store_has_is_that_of_a_missing_base(store: Path, name: str) -> None:
    missing = Base(whole_because="its base is not in the store")
    assert found(store, whole(store, "봄", _name_or_path=name)) == missing


def test_a_model_is_not_its_own_base(store: Path) -> None:
    base = whole(store, "kogpt2-base-v2", _name_or_path="skt/kogpt2-base-v2")
    assert found(store, base) == Base()
    assert found(store, base, "*=kogpt2-base-v2") == Base()
    assert found(store, base, name="다른-이름") == Base()
    for itself in ("kogpt2-base-v2", str(base)):
        with pytest.raises(BadRequest, match="which is the model itself"):
            find(store, base, base=itself)
    # The base of a base is not looked up.
    assert find(store, whole(store, "봄", _name_or_path="./kogpt2-base-v2")) == "kogpt2-base-v2"


def test_a_whole_model_whose_base_is_missing_is_whole_unless_its_settings_name_it(
    store: Path,
) -> None:
    folder = whole(store, "봄", _name_or_path="skt/ko-gpt")
    (store / "글").mkdir()
    (store / "글" / "시.txt").touch()
    missing = Base(whole_because="its base is not in the store")
    for known in ("", "skt/*=없음", "skt/*=../없음", "skt/*=글", "skt/*=https://elsewhere/x"):
        assert found(store, folder, known) == missing
    for base, message in (
        ("없음", "base is '없음': there is no model 없음 in the store"),
        ("../없음", "base is '../없음'"),
        ("글", "the base is no model"),
    ):
        with pytest.raises(BadRequest) as raised:
            find(store, folder, base=base)
        assert message in raised.value.message


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["봄"], None),
        (["봄", "바탕"], None),
        (["봄", "팀/*"], "팀/바탕"),
    ],
)
def test_a_team_that_may_not_use_a_base_that_is_looked_up_gets_the_model_whole(
    store: Path, models: list[str], expected: str | None
) -> None:
    by_name, by_pattern = whole(store, "봄", _name_or_path="팀/바탕"), whole(store, "여름")
    by_path = f"여름={store}/팀/바탕"
    before = current.set(token := team(*models))
    try:
        assert find(store, by_name) == find(store, by_pattern, "여름=팀/바탕") == expected
        assert find(store, by_pattern, by_path) is None
        if expected is None:  # the same as for one that is not there
            assert found(store, by_name).whole_because == "its base is not in the store"
    finally:
        current.reset(before)
    assert token.usage.refused["model"] == 0


@pytest.mark.parametrize(
    ("server", "settings", "shares"),
    [
        ({}, {}, True),
        ({"precision": "int8"}, {}, True),
        ({"precision": "fp32"}, {}, False),
        ({"precision": "fp32"}, {"precision": "int8"}, True),
        ({}, {"precision": "fp32"}, False),
        # The setting of another backend does not count.
        ({"precision": "fp32", "backend": "mxnet"}, {"backend": "native"}, True),
        ({"precision": "fp32", "backend": "native"}, {"backend": "native"}, False),
        ({"device": "gpu"}, {}, False),
        ({"device": "gpu", "backend": "onnxruntime", "precision": "fp16"}, {}, False),
    ],
)
def test_only_what_is_computed_in_int8_on_a_cpu_has_a_base(
    store: Path, server: dict[str, str], settings: dict[str, str], shares: bool
) -> None:
    folder = whole(store, "봄", _name_or_path="other")
    assert find(store, folder, server=server, **settings) == ("other" if shares else None)
    if not shares:
        assert found(store, folder, server=server, **settings) == Base()
        named = found(store, folder, server=server, base="없음", **settings)
        assert named == Base(whole_because="it is not computed in int8 on a CPU")
    assert find(store, adapter(store, "other"), server=server, **settings) == "other"


def test_the_one_model_of_a_server_is_whole(store: Path) -> None:
    folder = whole(store, "봄", _name_or_path="other")
    assert found(store, folder, named={str(folder): "model"}) == Base()
    assert found(store, folder, named={str(folder): "model"}, base="없음") == Base()


def test_what_the_engine_does_not_compute_has_no_base(store: Path) -> None:
    folder = whole(store, "봄", _name_or_path="other")
    touch(store, "봄/code/inference.py")
    (folder / "code" / "inference.py").write_text("def transform_fn(*given): ...")
    assert found(store, folder, "*=other") == Base()
    with pytest.raises(BadRequest, match="base cannot be set for model 봄: the engine does not"):
        find(store, folder, base="other")


def test_an_adapter_is_not_served_without_its_base(store: Path) -> None:
    with pytest.raises(BadRequest, match="an adapter cannot be served without its base"):
        find(store, adapter(store, "other"), share=False)


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
    assert "MODEL_BASES" in raised.value.message


def test_a_config_that_cannot_be_read_is_refused(store: Path) -> None:
    folder = adapter(store, "other")
    for text in ("{", "[]", "[" * 100_000):
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
        with pytest.raises(BadRequest, match=r"adapter_config\.json"):
            find(store, folder)


def test_model_bases_says_what_is_wrong_with_it(store: Path) -> None:
    with pytest.raises(SettingError, match="ADAPTER_BASES is now MODEL_BASES"):
        Settings.read((), {"ADAPTER_BASES": "a=b"})
    for wrong in ("kogpt2", "=b", "a="):
        with pytest.raises(StartError, match="MODEL_BASES"):
            find(store, store / "other", wrong)


@pytest.mark.parametrize(
    ("named", "known", "settings", "expected"),
    [
        ("바탕", "바탕=팀/바탕", {}, "팀/바탕"),
        ("팀/바탕", "", {}, "팀/바탕"),
        ("other", "시/*=kogpt2-base-v2", {}, "kogpt2-base-v2"),
        (None, "시/봄=other", {}, "other"),
        (None, "", {"base": "팀/바탕"}, "팀/바탕"),
    ],
)
def test_a_delta_has_a_base_as_adapters_and_fine_tunes_have(
    store: Path, named: str | None, known: str, settings: dict[str, str], expected: str
) -> None:
    folder = delta(store, "시/봄", **({} if named is None else {"_name_or_path": named}))
    base = found(store, folder, known, **settings)
    assert base.stored is not None
    assert (base.stored.name, base.is_delta, base.is_adapter) == (expected, True, False)
    # It cannot be served alone: not as a server's one model, and not with other settings.
    alone = found(store, folder, known, {str(folder): "하나"}, precision="fp32", **settings)
    assert alone == base


def test_a_delta_whose_base_is_missing_is_refused(store: Path) -> None:
    folder = delta(store, "봄", _name_or_path="skt/바탕")
    with pytest.raises(BadRequest) as caught:
        find(store, folder)
    assert caught.value.message.startswith(
        "the model is a delta (delta.safetensors) of 'skt/바탕', which is not in the store (looked"
        " for: skt/바탕, 바탕); put its base there under that name, or name the one that is: by"
    )
    with pytest.raises(BadRequest, match="share is false, but a delta"):
        find(store, folder, share=False)
    with pytest.raises(BadRequest, match="base is '없음'"):
        find(store, folder, base="없음")
    before = current.set(team("봄"))
    try:
        with pytest.raises(Forbidden):
            find(store, folder, base="other")
    finally:
        current.reset(before)
