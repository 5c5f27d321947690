from __future__ import annotations

import json
import logging
import sys

import pytest

from common.errors import ArtifactError
from common.logs import JsonFormatter
from serving.errors import ArchiveError

CUT = "가" * 998 + "..." + "가" * 998


def line(message: str, *arguments: object, **fields: object) -> str:
    record = logging.LogRecord("", logging.INFO, "", 0, message, arguments, None)
    if fields:
        record.fields = fields
    return JsonFormatter("gateway").format(record)


def test_a_line_is_json_with_korean_as_it_is() -> None:
    found = json.loads(line("모델 %s", "소월", model="소월", status=200))
    assert (found["message"], found["model"], found["status"]) == ("모델 소월", "소월", 200)
    assert "소월" in line("소월")


def test_a_log_line_is_bounded() -> None:
    long = "가" * 1_000_000
    found = json.loads(line("%s", long, path=long, status=200))
    assert found["message"] == CUT
    assert found["path"] == found["message"]
    try:
        raise ValueError(long)
    except ValueError:
        record = logging.LogRecord("", logging.ERROR, "", 0, "x", (), sys.exc_info())
    traceback = json.loads(JsonFormatter("gateway").format(record))["traceback"]
    assert traceback.splitlines()[-1].startswith("ValueError: 가가")
    assert len(traceback) < 10_000


@pytest.mark.parametrize(
    "odd", ["\x9b2J", "\u2028{}", "\u2029", "\x7f", "\x85", "\u202e월소", "\n"]
)
def test_a_client_cannot_steer_who_reads_the_log(odd: str) -> None:
    written = line("모델 %s", odd)
    assert written.isprintable()
    assert json.loads(written)["message"] == f"모델 {odd}"


def test_a_name_that_is_not_utf8_can_be_logged() -> None:
    assert line("\udcff").encode("utf-8")


@pytest.mark.parametrize("kind", [ArtifactError, ArchiveError])
def test_an_errors_message_is_bounded(kind: type[ArtifactError | ArchiveError]) -> None:
    error = kind("가" * 1_000_000)
    assert error.message == str(error) == error.to_body()["message"] == CUT
    assert kind(f"{'가' * 1_000_000} is too long").message.endswith("가 is too long")
    assert kind("짧다").message == "짧다"
