from __future__ import annotations

from pathlib import Path

import pytest

from command import environments


def test_a_folder_of_any_name_is_a_name_and_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / '봄 $(touch hacked)`touch hacked`"'
    (root / "scripts").mkdir(parents=True)
    (root / "scripts" / "setup.sh").write_text('ensure_group() { printf "%s\\n" "$@"; }\n', "utf-8")
    monkeypatch.setattr(environments, "ROOT", root)
    monkeypatch.chdir(tmp_path)
    environments.ensure_environment(root / ".venv-load", "load")
    assert capfd.readouterr().out == f"{root}/.venv-load\nload\n"
    assert not (tmp_path / "hacked").exists()
