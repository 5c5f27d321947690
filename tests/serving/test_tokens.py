"""The file of tokens, and what each of them may."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import subprocess
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from common.errors import SettingError
from serving.errors import Forbidden, TooManyRequests
from serving.tokens import Token, Tokens, read
from tests.processes import REPOSITORY

SECRET = "비밀-하나"  # noqa: S105
HASH = hashlib.sha256(SECRET.encode()).hexdigest()


def entry(**fields: Any) -> dict[str, Any]:
    return {"name": "가팀", "sha256": HASH, "models": ["가팀/*", "sowol"], **fields}


def written(path: Path, *entries: Any) -> Path:
    """Replaced as a whole, as an editor or Kubernetes does it."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"tokens": entries}, ensure_ascii=False), encoding="utf-8")
    new.replace(path)
    return path


def token(tmp_path: Path, **fields: Any) -> Token:
    (found,) = read(written(tmp_path / "tokens.json", entry(**fields))).values()
    return found


# The file


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["가"], r"tokens\[0\] must be an object"),
        ([entry(note="x")], r"tokens\[0\]: 'note' is not known; known are concurrency"),
        ([{"name": "가", "models": []}], r"sha256 is missing"),
        ([entry(name="")], "name must be"),
        ([entry(name="가\n나")], "name must be"),
        ([entry(name="가" * 101)], "name must be"),
        ([entry(sha256=SECRET)], "64 hex digits"),
        ([entry(sha256=None)], "64 hex digits"),
        ([entry(sha256=HASH + "\n")], "64 hex digits"),
        ([entry(models="sowol")], "models must be a list"),
        ([entry(models=[""])], "models must be a list"),
        ([entry(models=["*/봄"])], r"'\*/봄' has a \* that is not at its end"),
        ([entry(load="yes")], "load must be true or false"),
        ([entry(requests_per_minute=0)], "requests_per_minute must be"),
        ([entry(requests_per_minute=1.5)], "requests_per_minute must be"),
        ([entry(concurrency=True)], "concurrency must be"),
        ([entry(concurrency=10**400)], "concurrency must be"),
        ([entry(), entry(sha256="0" * 64)], r"tokens\[1\]: another one has the name '가팀'"),
        ([entry(), entry(name="나")], r"tokens\[1\]: '가팀' has the same sha256"),
        ([entry(), entry(name="나", sha256=HASH.upper())], "has the same sha256"),
    ],
)
def test_a_wrong_entry_is_named_and_no_secret_is_repeated(
    tmp_path: Path, entries: list[Any], said: str
) -> None:
    with pytest.raises(SettingError, match=said) as caught:
        read(written(tmp_path / "tokens.json", *entries))
    assert "TOKENS_FILE" in caught.value.message
    assert SECRET not in caught.value.message
    assert HASH not in caught.value.message.lower()


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"tokens": {}}', b'{"tokens": [], "more": 1}', b"\xff", b"{" * 10, b"[" * 10**5],
)
def test_a_file_that_is_no_list_of_tokens_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokens.json"
    path.write_bytes(content)
    for wrong in (path, tmp_path / "없다.json", tmp_path):
        with pytest.raises(SettingError, match="TOKENS_FILE"):
            read(wrong)


async def test_a_token_is_found_by_its_bytes_alone(tmp_path: Path) -> None:
    tokens = Tokens(str(written(tmp_path / "tokens.json", entry(sha256=HASH.upper()))))
    await tokens.refresh()
    found = tokens.find(SECRET.encode())
    assert found is not None
    assert (found.name, found.load) == ("가팀", False)
    for other in (b"", SECRET.encode() + b" ", HASH.encode(), bytes.fromhex(HASH)):
        assert tokens.find(other) is None


def test_patterns_are_matched_in_normal_form_with_case(tmp_path: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "가팀/*")
    found = token(tmp_path, models=[decomposed, "sowol.tar.gz", "v?", "[ab]c", "봄-*"])
    for name in ("가팀/봄", "가팀/봄/둘", "sowol", "v?", "[ab]c", "봄-1", "봄-"):
        assert found.may_call(name)
    others = ("가팀", "나팀/봄", "가팀2/봄", "xsowol", "sowol2")
    for name in (*others, "SOWOL", "v12", "cc", "", "a\nc"):
        assert not found.may_call(name)
    assert not token(tmp_path, models=[]).may_call("")
    assert token(tmp_path, models=["*"]).may_call("나팀/봄")


@pytest.mark.parametrize("suffix", [".mar", ".tar.gz"])
def test_a_suffix_before_the_star_is_part_of_the_prefix(tmp_path: Path, suffix: str) -> None:
    found = token(tmp_path, models=[unicodedata.normalize("NFD", f"가팀{suffix}*")])
    assert found.may_call(f"가팀{suffix}-2")
    assert not found.may_call("가팀원")


def test_what_a_token_may_not_is_403_and_counted(tmp_path: Path) -> None:
    found = token(tmp_path)
    with pytest.raises(Forbidden, match="나팀/봄"):
        found.check_model("나팀/봄")
    with pytest.raises(Forbidden, match="load"):
        found.check_load()
    assert (found.usage.refused["model"], found.usage.refused["load"]) == (1, 1)
    found.check_model("sowol")
    token(tmp_path, load=True).check_load()


@pytest.mark.parametrize("page", ["settings.md", "settings.ko.md"])
def test_the_page_shows_how_to_make_a_token_and_a_file(tmp_path: Path, page: str) -> None:
    text = (REPOSITORY / "docs/reference" / page).read_text("utf-8")
    command = re.findall(r"```\n(python3 -c .*)\n```", text)[0]
    made = subprocess.check_output(shlex.split(command), text=True).split()
    assert hashlib.sha256(made[0].encode()).hexdigest() == made[1]
    shown = re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0]
    path = tmp_path / "tokens.json"
    path.write_text(re.sub(r"[0-9a-f]{64}", made[1], shown), encoding="utf-8")
    found = read(path)[made[1]]
    assert (found.name, found.requests_per_minute, found.concurrency) == ("team-a", 600, 8)
    assert found.may_call("team-a/봄")


# Rate and concurrency


def test_a_minutes_requests_may_come_at_once_and_then_at_the_rate(tmp_path: Path) -> None:
    found, now_s = token(tmp_path, requests_per_minute=30), 1000.0
    for _ in range(30):
        found.begin(now_s)
    for waited_s, retry_after_s in ((0.0, 2.0), (1.5, 0.5)):
        with pytest.raises(TooManyRequests) as caught:
            found.begin(now_s + waited_s)
        assert caught.value.retry_after_s == pytest.approx(retry_after_s)
    found.begin(now_s + 2)  # refused ones took nothing
    with pytest.raises(TooManyRequests):
        found.begin(now_s + 2)
    for _ in range(30):  # no more than a minute's, however long nothing came
        found.begin(now_s + 10_000)
    with pytest.raises(TooManyRequests):
        found.begin(now_s + 10_000)
    assert found.usage.refused["rate"] == 4
    assert found.usage.requests == 30 + 2 + 2 + 30 + 1


def test_requests_in_flight_are_bounded_and_give_their_place_back(tmp_path: Path) -> None:
    found = token(tmp_path, concurrency=2, requests_per_minute=1000)
    found.begin(0)
    found.begin(0)
    with pytest.raises(TooManyRequests, match="2 requests in flight"):
        found.begin(0)
    found.end()
    found.begin(0)
    assert found.usage.in_flight == 2
    assert found.usage.refused["concurrency"] == 1
    assert found.usage.allowance == 1000 - 3  # the refused one took none of the rate
    unlimited = token(tmp_path)
    for _ in range(10_000):
        unlimited.begin(0)
    assert unlimited.usage.in_flight == 10_000


# Reloading


async def test_a_change_is_read_and_what_was_used_stays(tmp_path: Path) -> None:
    path = written(tmp_path / "tokens.json", entry(requests_per_minute=2))
    tokens = Tokens(str(path))
    await tokens.refresh()
    before = tokens.find(SECRET.encode())
    assert before is not None
    before.begin(1000.0)
    before.begin(1000.0)

    other = hashlib.sha256("새것".encode()).hexdigest()  # a new token of the same team
    written(path, entry(sha256=other, models=["나팀/*"], requests_per_minute=2))
    await tokens.refresh()
    assert tokens.find(SECRET.encode()) is None
    after = tokens.find("새것".encode())
    assert after is not None
    assert after.may_call("나팀/봄")
    assert after.usage.in_flight == 2
    with pytest.raises(TooManyRequests):
        after.begin(1000.0)
    before.end()
    assert after.usage.in_flight == 1
    written(path)
    await tokens.refresh()
    assert tokens.all() == []


@pytest.mark.parametrize("damage", ["half", "gone", "folder", "duplicate"])
async def test_a_wrong_file_keeps_the_tokens_before_and_is_logged_once(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "tokens.json", entry())
    tokens = Tokens(str(path))
    await tokens.refresh()
    if damage == "half":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "duplicate":
        written(path, entry(), entry())
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    for _ in range(3):
        await tokens.refresh()
    assert tokens.find(SECRET.encode()) is not None
    (line,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "the 1 tokens before stay" in line.getMessage()
    assert HASH not in caplog.text
    if damage == "folder":
        path.rmdir()
    written(path, entry(sha256="0" * 64))
    await tokens.refresh()
    assert tokens.find(SECRET.encode()) is None


async def test_a_file_that_does_not_change_is_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokens = Tokens(str(written(tmp_path / "tokens.json", entry())))
    for _ in range(5):
        await tokens.refresh()
    assert len(caplog.records) == 1
    stat = os.stat(tmp_path / "tokens.json")
    os.utime(tmp_path / "tokens.json", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    await tokens.refresh()
    assert len(caplog.records) == 2


async def test_without_a_file_there_are_no_tokens() -> None:
    tokens = Tokens("")
    await tokens.refresh()
    assert not tokens.exist
    assert tokens.find(b"") is None
