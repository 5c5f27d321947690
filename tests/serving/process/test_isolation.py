from __future__ import annotations

import os
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

import engine.settings
import handlers.settings
from serving.process.isolation import close_to_others, passed
from tests.processes import become_a_user, in_a_fork

A_USER = 54321


def environment_is_readable() -> bool:
    """Whether another process of this user, a fork, can read this one's environment."""
    reader = os.fork()
    if reader == 0:
        try:
            Path(f"/proc/{os.getppid()}/environ").read_bytes()
        except PermissionError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == 0


def test_others_of_the_same_user_cannot_read_the_environment() -> None:
    def user() -> list[bool]:
        become_a_user(A_USER)
        before = environment_is_readable()
        close_to_others()
        subprocess.run(["true"], check=True)  # starting programs still works
        return [before, environment_is_readable()]

    assert in_a_fork(user) == [True, False]


@pytest.mark.parametrize("settings", [engine.settings.Settings, handlers.settings.Settings])
def test_every_setting_of_the_engine_and_the_workers_is_passed_or_set(settings: type) -> None:
    set_by_serve = {"PROBE_SECRET"}
    names = {f.metadata["variable"] for f in fields(settings)}
    assert names - set(passed(dict.fromkeys(names, "1"))) <= set_by_serve


def test_scripts_get_what_they_read_and_a_secret_only_if_it_is_named() -> None:
    known = {"LANG": "ko_KR.UTF-8", "TZ": "Asia/Seoul"}
    known |= {"SM_NUM_GPUS": "1", "SAGEMAKER_PROGRAM": "x"}
    known |= {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0", "TOKENIZERS_PARALLELISM": "true"}
    known |= {"HTTPS_PROXY": "http://proxy:3128", "AWS_REGION": "ap-northeast-2"}
    secrets = {"AWS_SECRET_ACCESS_KEY": "a", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "b"}
    secrets |= {"DATABASE_URL": "postgres://가:나@db/x", "DB_PASSWORD": "c", "비밀": "d"}
    secrets |= {"GH_PAT": "e", "SAGEMAKER_API_TOKEN": "f", "SM_HP_KEY": "g"}
    secrets |= {"PIP_INDEX_URL": "https://a:b@pypi/simple"}
    secrets |= {"HTTP_PROXY": "http://me:pass@proxy:3128", "MANAGEMENT_TOKEN": "h"}
    poems = {"TOP_K": "3", "POEM_STYLE": "시조"}
    given = {**known, **secrets, **poems, "OTHER": "c", "POEM_TOKEN": "a"}
    assert passed(given) == known
    assert passed(given, "TOP_K, POEM_*") == {**known, **poems}
    named = {"POEM_TOKEN": "a", "DB_PASSWORD": "c"}
    assert passed(given, "POEM_TOKEN,DB_PASSWORD") == {**known, **named}
