from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import UrlNotAllowed
from serving.names import archive_spellings, is_clean, model_name, normal_name, spellings

NFD = unicodedata.normalize("NFD", "소월")
NAMES = st.text(st.sampled_from("가힣ᄀ한a.-_/ \\\0\n\ud800") | st.characters(), max_size=20)


@pytest.mark.parametrize("suffix", ["", ".tar.gz", ".mar", ".tar.gz.tar.gz", ".mar.tar.gz"])
@pytest.mark.parametrize("name", ["소월", NFD])
def test_all_spellings_of_a_name_are_one(name: str, suffix: str) -> None:
    assert model_name(name + suffix) == "소월"
    assert model_name(f"팀/{name}{suffix}") == "팀/소월"


@pytest.mark.parametrize(
    "name",
    ["", ".tar.gz", "../a", "a/../../a", "/etc", "a//b", "a/", ".a", "a/.b", "a\\b", "a\0", "a\n",
     "a\x7f", "\ud800", "가" * 334, ".", ".."],
)  # fmt: skip
def test_what_is_no_name_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(UrlNotAllowed, match="a name like sowol or team/sowol is") as raised:
        model_name(name)
    assert raised.value.status == 400


@pytest.mark.parametrize("name", ["봄 날", "v1.2", "a:b", "100%", "물음표?", "#", "가" * 333])
def test_what_people_call_models_is_a_name(name: str) -> None:
    assert model_name(name) == name


@given(NAMES)
def test_a_normal_name_is_its_own_normal_form(name: str) -> None:
    normal = normal_name(name)
    assert normal_name(normal) == normal
    if is_clean(normal):
        assert model_name(name) == normal
        for spelled in (*spellings(normal), *archive_spellings(normal)):
            assert normal_name(spelled) == normal
