from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from serving.errors import ArchiveError
from serving.store import archive
from serving.store.archive import unpack


def make(path: Path, *members: tarfile.TarInfo, data: bytes = b"") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_an_archive_becomes_a_folder(tmp_path: Path) -> None:
    source = make(
        tmp_path / "시.tar.gz", member("모델.params"), member("code/a.py"), data="가".encode()
    )
    unpack(source, tmp_path / "models" / "시")
    assert (tmp_path / "models" / "시" / "모델.params").read_text("utf-8") == "가"
    assert (tmp_path / "models" / "시" / "code" / "a.py").exists()


def test_a_newer_archive_replaces_the_folder(tmp_path: Path) -> None:
    unpack(make(tmp_path / "a.tar.gz", member("old")), tmp_path / "m")
    unpack(make(tmp_path / "b.tar.gz", member("new")), tmp_path / "m")
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["new"]


@pytest.mark.parametrize(
    "bad",
    [
        member("../outside"),
        member("a/../outside"),
        member("a/../../outside"),
        member("/etc/outside"),
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("link", tarfile.SYMTYPE, "../../outside"),
        member("link", tarfile.LNKTYPE, "../outside"),
        member("link", tarfile.SYMTYPE, "."),
        member("link", tarfile.SYMTYPE, "nothing"),
        member("first"),
        member("first/below"),
        member("device", tarfile.CHRTYPE),
        member("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda info: f"{info.name}-{info.type.decode()}-{info.linkname}",
)
def test_what_would_leave_the_folder_is_refused_and_nothing_changes(
    tmp_path: Path, bad: tarfile.TarInfo
) -> None:
    models = tmp_path / "models"
    unpack(make(tmp_path / "good.tar.gz", member("kept")), models / "m")
    source = make(tmp_path / "bad.tar.gz", member("first"), bad)
    with pytest.raises(ArchiveError, match=r"bad\.tar\.gz cannot be unpacked"):
        unpack(source, models / "m")
    assert [p.name for p in (models / "m").iterdir()] == ["kept"]
    assert [p.name for p in models.iterdir()] == ["m"]
    assert not list(tmp_path.rglob("passwd"))


def test_links_to_files_of_the_archive_are_files(tmp_path: Path) -> None:
    source = make(
        tmp_path / "a.tar.gz",
        member("weights/한.params"),
        member("weights/같은", tarfile.SYMTYPE, "한.params"),
        member("code/other", tarfile.SYMTYPE, "../weights/한.params"),
        member("hard", tarfile.LNKTYPE, "weights/같은"),
        data=b"1234",
    )
    unpack(source, tmp_path / "m")
    for path in ("weights/같은", "code/other", "hard"):
        assert (tmp_path / "m" / path).read_bytes() == b"1234"
        assert not (tmp_path / "m" / path).is_symlink()


@pytest.mark.parametrize("cut", [0, 10, 60, -1, -8])
def test_a_damaged_archive_is_refused(tmp_path: Path, cut: int) -> None:
    source = make(tmp_path / "a.tar.gz", member("x"), data=b"0123456789" * 50)
    source.write_bytes(source.read_bytes()[:cut])
    with pytest.raises(ArchiveError, match=r"a\.tar\.gz"):
        unpack(source, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    source = make(tmp_path / "a.tar.gz", member("x"), data=bytes(range(256)) * 64)
    damaged = bytearray(source.read_bytes())
    damaged[-6] ^= 1  # in the check sum
    source.write_bytes(damaged)
    with pytest.raises(ArchiveError, match="damaged"):
        unpack(source, tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar.gz"]


def test_the_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 100)
    source = make(tmp_path / "a.tar.gz", member("x"), member("y"), data=b"0" * 60)
    with pytest.raises(ArchiveError, match="more than"):
        unpack(source, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_header_cannot_fill_the_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 64 << 20
    with gzip.open(tmp_path / "a.tar.gz", "wb") as file:
        file.write(info.tobuf() + bytes(64 << 20))
    with pytest.raises(ArchiveError, match="a header of"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "m")


def test_names_are_utf8(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", encoding="cp949") as tar:
        tar.format = tarfile.GNU_FORMAT
        tar.addfile(tarfile.TarInfo("모델.params"))
    with pytest.raises(ArchiveError, match="not UTF-8"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "m")
