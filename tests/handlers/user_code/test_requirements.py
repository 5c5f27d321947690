"""Packages of a model's own, by pip."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ArtifactError
from common.logs import JsonFormatter
from handlers.user_code.requirements import MAX_LOG_BYTES, _pip

BACKEND = """
def build_wheel(*arguments, **more):
    for _ in range(20_000):
        print("글")
    raise SystemExit("없습니다")
"""


@pytest.fixture
def short_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file that pip or this process writes may be longer than the output that is kept.

    They write no bytecode: Python before 3.13 would leave files of it that are cut off, for all
    later imports.
    """
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_LOG_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("short_files")
def test_of_a_build_that_prints_a_lot_the_end_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "backend.py").write_text(BACKEND, encoding="utf-8")
    (source / "pyproject.toml").write_text(
        "[project]\nname = 'prints'\nversion = '1'\n"
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    )
    file = tmp_path / "requirements.txt"
    file.write_text("--no-index\n./source\n")
    (tmp_path / "packages").mkdir()
    (tmp_path / "temporary").mkdir()
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(ArtifactError, match=r"requirements\.txt could not be installed"),
    ):
        _pip(file, file.name, tmp_path / "packages", 300.0, None)
    assert "pip: 없습니다" in [record.getMessage() for record in caplog.records]
    logged = "".join(map(JsonFormatter("mms").format, caplog.records))
    assert len(logged.encode()) < MAX_LOG_BYTES
