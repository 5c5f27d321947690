from __future__ import annotations

import os
from dataclasses import fields

import pytest

import engine.settings
import handlers.settings
from serving.process.isolation import passed
from tests.processes import python

CODE = """
import ctypes, os, subprocess, sys
from serving.process.isolation import PR_SET_DUMPABLE, close_to_others

if os.getuid() == 0:
    os.setuid(54321)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after a program is executed

def readable():
    reader = os.fork()
    if reader == 0:
        try:
            open(f"/proc/{os.getppid()}/environ", "rb").read()
        except PermissionError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == 0

before = readable()
close_to_others()
print(before, readable())
subprocess.run(["true"], check=True)  # starting programs still works
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")
def test_others_of_the_same_user_cannot_read_the_environment() -> None:
    done = python("-c", CODE)
    assert done.stdout.split() == ["True", "False"], done.stderr


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
