"""kogpt2 package: what the server would refuse is refused; the rest is packed, always the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from command.errors import Problem
from engine.artifacts.open import open_artifact
from scripts.artifacts.archive import check, write_archive
from tests.engine.hugging_face import make_hugging_face, write_json
from tests.engine.models import make_artifact
from tests.scripts import command
from tests.serving.store.archives import unpack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "시 모음")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return command.run("package", *arguments)


def test_a_folder_becomes_an_archive_that_the_server_unpacks(folder: Path, tmp_path: Path) -> None:
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert "2 layers, 64 units, 2 heads" in done.stdout
    unpack(folder.with_name("시 모음.tar.gz"), tmp_path / "unpacked")
    files = {p.name: p.read_bytes() for p in (tmp_path / "unpacked").iterdir()}
    assert files == {p.name: p.read_bytes() for p in folder.iterdir()}
    open_artifact(tmp_path / "unpacked")


@pytest.mark.parametrize("make", [make_artifact, make_hugging_face])
def test_the_same_files_give_the_same_bytes(
    make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(make)
    made = []
    for name, now in (("one", 1e9), ("two", 2e9)):
        monkeypatch.setattr(time, "time", lambda now=now: now)  # gzip would write it
        folder = make(tmp_path / name / "model")
        (folder / "extra").mkdir()
        (folder / "extra" / "읽어 보기.txt").write_text("가", encoding="utf-8")
        write_archive(check(folder), tmp_path / f"{name}.tar.gz")
        made.append((tmp_path / f"{name}.tar.gz").read_bytes())
        os.utime(folder / "config.json", (1, 1))
    assert made[0] == made[1]


def test_weights_that_are_no_numbers_are_refused(folder: Path) -> None:
    tensor = open_artifact(folder).index["_final_ln.beta"]
    with (folder / tensor.file).open("r+b") as file:
        file.seek(tensor.offset)
        file.write(b"\xff" * 4)
    with pytest.raises(Problem, match=r"kogpt2\.params: _final_ln\.beta holds NaN or infinity"):
        check(folder)


def test_what_tools_leave_behind_is_left_out(folder: Path, tmp_path: Path) -> None:
    for name in (".prepared", ".git", "__pycache__"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    for name in (".DS_Store", "optimizer.pt", "rng_state_0.pth", "scheduler.pt"):
        (folder / name).write_text("x")
    for name in ("trainer_state.json", "training_args.bin"):
        (folder / name).write_text("x")
    names = {path.name for path in check(folder).files}
    assert names == {"config.json", "kogpt2.params", "kogpt2.spiece"}


def test_a_prepared_model_is_packed(folder: Path) -> None:
    (folder / ".prepared").mkdir()
    for name in ("봄.safetensors", "봄.source.json"):
        (folder / ".prepared" / name).write_text("x")
    assert folder / ".prepared" / "봄.safetensors" in check(folder).files
    assert "봄.source.json" not in {path.name for path in check(folder).files}


def test_progress_counts_every_byte(folder: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    checked = check(folder)
    write_archive(checked, tmp_path / "a.tar.gz", seen.append)
    assert sum(seen) == checked.num_bytes


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "kogpt2.spiece").unlink(), "no *.spiece files"),
        (lambda f: write_json(f / "generation.json", {"온도": 1}), "온도 is not known"),
        (lambda f: (f / "kogpt2.spiece").write_bytes(b"x"), "is not a sentencepiece model"),
        (lambda f: os.mkfifo(f / "pipe"), "pipe is not a regular file"),
        (lambda f: (f / "broken").symlink_to("nowhere"), "broken cannot be read"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_what_would_not_be_served_is_refused_with_the_reason(
    folder: Path, damage: object, said: str
) -> None:
    assert callable(damage)
    damage(folder)
    done = run(folder)
    assert done.returncode == 2
    assert done.stderr.startswith("package: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not folder.with_name("시 모음.tar.gz").exists()
    assert len(done.stderr.splitlines()) == 1


def test_nothing_is_overwritten_and_nothing_half_written_stays(
    folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "a.tar.gz"
    target.write_bytes(b"mine")
    with pytest.raises(Problem, match="exists"):
        write_archive(check(folder), target)
    assert target.read_bytes() == b"mine"
    with pytest.raises(Problem, match=r"must be called NAME\.tar\.gz"):
        write_archive(check(folder), tmp_path / "a.zip")
    with pytest.raises(Problem, match="cannot write"):
        write_archive(check(folder), tmp_path / "없는 곳" / "a.tar.gz")
    assert {p.name for p in tmp_path.iterdir()} == {"a.tar.gz", folder.name}


def test_an_archive_is_checked_and_packed_as_its_folder_is(folder: Path, tmp_path: Path) -> None:
    packed, again = folder.with_name("시 모음.tar.gz"), tmp_path / "again.tar.gz"
    assert run(folder).returncode == 0
    done = run(packed, "--check")
    assert (done.returncode, "2 layers" in done.stdout) == (0, True), done.stderr
    done = run(packed)
    assert (done.returncode, "give --out" in done.stderr) == (2, True)
    assert run(packed, "--out", again).returncode == 0
    assert again.read_bytes() == packed.read_bytes()
    packed.write_bytes(b"no archive")
    assert "cannot be unpacked" in run(packed, "--check").stderr
    assert "does not exist" in run(tmp_path / "없음.tar.gz", "--check").stderr


def test_check_writes_nothing(folder: Path) -> None:
    done = run(folder, "--check")
    assert done.returncode == 0
    assert list(folder.parent.iterdir()) == [folder]
