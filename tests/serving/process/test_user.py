from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from handlers.user_code.confinement import capabilities
from serving.errors import StartError
from serving.process.user import become
from tests.processes import in_a_fork, python

A_USER = 54326
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up root")


def test_root_becomes_a_user_for_good_that_writes_where_the_server_must(open_folder: Path) -> None:
    closed, shared = open_folder / "닫힘", open_folder / "shared"
    closed.mkdir(0o755)
    shared.mkdir()
    shared.chmod(0o1777)

    def user() -> dict[str, Any]:
        become(A_USER, [closed, shared, open_folder / "new" / "캐시"])
        for place in (closed, shared, open_folder / "new" / "캐시"):
            (place / "시").write_text("산에는 꽃 피네", encoding="utf-8")
        with pytest.raises(PermissionError):
            (open_folder / "other").write_text("x")
        with pytest.raises(PermissionError):
            os.setuid(0)
        return {
            "ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
            "capabilities": list(capabilities.permitted()),
            "home": os.environ["HOME"],
        }

    assert in_a_fork(user) == {"ids": [A_USER] * 6, "capabilities": [], "home": "/"}
    assert shared.stat().st_uid == 0  # all may write to it
    assert closed.stat().st_uid == A_USER


WITHOUT = f"""
from handlers.user_code.confinement import capabilities
from serving.errors import StartError
from serving.process.user import become
capabilities.drop_all_but({{capabilities.CHOWN}})
try:
    become({A_USER}, [])
except StartError as error:
    print(error.message)
"""


def test_without_the_capability_the_way_out_is_named() -> None:
    # Not in a fork: threads that libraries start in it keep the capability, which glibc aborts for.
    assert f"docker run --user {A_USER}" in python("-c", WITHOUT).stdout


def test_a_folder_that_cannot_be_given_is_named(open_folder: Path) -> None:
    (open_folder / "파일").write_text("")

    def user() -> str:
        with pytest.raises(StartError) as caught:
            become(A_USER, [open_folder / "파일" / "run"])
        return caught.value.message

    assert "파일/run cannot be given to user" in in_a_fork(user)
