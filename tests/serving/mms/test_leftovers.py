"""Files that Multi Model Server and ended workers leave behind."""

from __future__ import annotations

import socket
from pathlib import Path

from serving.mms.leftovers import remove_leftovers


def test_only_what_nobody_uses_any_more_is_removed(tmp_path: Path) -> None:
    for name in ("0a-00-stdout", "0a-00-stderr", "models.json", "-stdout.txt"):
        (tmp_path / name).touch()
    (tmp_path / "봄-stdout").mkdir()
    with socket.socket(socket.AF_UNIX) as used, socket.socket(socket.AF_UNIX) as left:
        used.bind(str(tmp_path / ".mms.sock.1"))
        left.bind(str(tmp_path / ".mms.sock.2"))
        left.close()
        remove_leftovers(tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {".mms.sock.1", "models.json", "-stdout.txt", "봄-stdout"}
