"""Files that the entrypoint creates before it starts the server's processes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from serving.entrypoint import MAX_SOCKET_PATH, _run_dir
from serving.errors import StartError
from serving.settings import Settings


def test_a_start_that_fails_for_a_long_tmpdir_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("가" * (MAX_SOCKET_PATH // 3))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(StartError, match="too long for a unix socket"), _run_dir(Settings()):
        pass
    assert list(long.iterdir()) == []
