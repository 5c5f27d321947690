"""What a model's program can and cannot do, where the server is root or a user. Skips what the
kernel cannot enforce; tests/test_security_page.py names these tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import landlock
from common.errors import Overloaded
from handlers.user_code.confinement import rules, seccomp
from handlers.user_code.confinement.rules import environment, may_change_user, unenforced
from tests.e2e.server import REPOSITORY
from tests.handlers.user_code.confinement import confined

A_USER = 54321
ATTEMPTS = confined.attempts(Path(), 0, None)
ALLOWED = ATTEMPTS["allowed"]
BY_LANDLOCK, BY_SECCOMP = ATTEMPTS["landlock"], ATTEMPTS["seccomp"]
BY_SCOPE_OR_USER, BY_USER = ATTEMPTS["scope or user"], ATTEMPTS["user"]


@pytest.fixture(scope="module", params=["root", "user", "user, Linux 5.19", "user, Linux 5.13"])
def tried(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The outcome of each attempt, with this kernel's Landlock or that of an older one."""
    server, _, kernel = request.param.partition(", ")
    abi = min(landlock.abi(), {"Linux 5.13": 1, "Linux 5.19": 2}.get(kernel, landlock.abi()))
    if os.geteuid() != 0:
        if server == "root":
            pytest.skip("the tests do not run as root")
        user = os.geteuid()
    else:
        user = A_USER if server == "user" else 0
    # Not below pytest's own folder, which no other user can enter.
    folder = Path(tempfile.mkdtemp(prefix="confined-"))
    try:
        program = [sys.executable, "-m", confined.__name__, str(folder), str(user), str(abi)]
        environment = {**os.environ, "SERVER_SECRET": "비밀"}
        output = subprocess.check_output(program, cwd=REPOSITORY, env=environment, timeout=120)
        found: dict[str, str] = {**json.loads(output), "abi": str(abi)}
        print(f"landlock ABI {abi}, user of its own: {found['user'] or 'no'}")
        assert bool(found["user"]) == (server == "root" and may_change_user())
        yield found
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("what", ALLOWED)
def test_a_program_of_a_model(tried: dict[str, str], what: str) -> None:
    is_readable = tried["user"] or os.geteuid() != 0 or sys.prefix.startswith("/usr")
    if what == "imports" and not is_readable:
        pytest.skip("this Python is in a folder that only root can enter")
    assert tried[what] == ""


@pytest.mark.parametrize("what", [*BY_LANDLOCK, *BY_SECCOMP, *BY_SCOPE_OR_USER, *BY_USER])
def test_no_program_of_a_model(tried: dict[str, str], what: str) -> None:
    if what in BY_LANDLOCK and not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    if what in BY_SECCOMP and not seccomp.available():
        pytest.skip("there is no filter for this machine")
    if what in BY_SCOPE_OR_USER and not tried["user"] and int(tried["abi"]) < landlock.SCOPES_ABI:
        pytest.skip("this kernel's Landlock knows no scopes of signals")
    if what in BY_USER and not tried["user"]:
        pytest.skip("not prevented without a user of its own: see docs/operate/security.md")
    assert tried[what] in ("PermissionError", "OSError", "CalledProcessError"), tried[what]


def test_nothing_of_root_is_left_but_reading(tried: dict[str, str]) -> None:
    assert tried["capabilities"] in ("[]", "[2]")
    assert tried["becomes root"] == "PermissionError" or tried["user"] == ""


def test_what_this_machine_cannot_keep_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    monkeypatch.setattr(seccomp, "available", lambda: False)
    clauses = " ".join(unenforced())
    assert "no Landlock" in clauses
    assert "sockets and make user namespaces" in clauses
    assert "truncate" not in clauses  # they write
    monkeypatch.setattr(landlock, "abi", lambda: landlock.TRUNCATE_ABI - 1)
    assert "truncate other models' files" in " ".join(unenforced())
    monkeypatch.setattr(seccomp, "available", lambda: True)
    assert "truncate" not in " ".join(unenforced())
    monkeypatch.undo()
    if landlock.abi() >= landlock.SCOPES_ABI:
        assert not unenforced()


def test_a_model_without_a_user_left_for_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "may_change_user", lambda: True)
    monkeypatch.setattr(rules, "UIDS", range(60578, 60580))
    assert [rules.allocate_user(str(tmp_path)) for _ in range(2)] == [60578, 60579]
    with pytest.raises(Overloaded, match="all 2 users for models' programs are in use"):
        rules.allocate_user(str(tmp_path))


def test_a_user_gets_nothing_that_an_earlier_model_has_left_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "may_change_user", lambda: True)
    monkeypatch.setattr(rules, "UIDS", [os.geteuid()])
    monkeypatch.setattr(rules, "SHARED_MEMORY", str(tmp_path))
    run_dir = tmp_path.parent
    (tmp_path / "비밀").write_text("가중치", encoding="utf-8")
    (tmp_path / "폴더" / "속").mkdir(parents=True)
    assert rules.allocate_user(str(run_dir)) == os.geteuid()
    assert not os.listdir(tmp_path)


def test_a_script_gets_no_variables_of_the_server() -> None:
    given = {"PROBE_SECRET": "a", "MMS_JOB_QUEUE_SIZE": "1", "PIP_INDEX_URL": "b", "LANG": "c"}
    found = environment("/tmp/x", {**given, "HOME": "/root"})  # noqa: S108
    assert found == {"LANG": "c"} | dict.fromkeys(("HOME", "TMPDIR", "TEMP", "TMP"), "/tmp/x")  # noqa: S108
