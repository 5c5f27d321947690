from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from serving.errors import ArchiveError
from serving.store import archive_limits
from tests.serving.store.archives import unpack


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
def test_what_would_leave_the_folder_is_refused(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    source = make(tmp_path / "bad.tar.gz", member("first"), bad)
    with pytest.raises(ArchiveError, match=r"bad\.tar\.gz cannot be unpacked") as raised:
        unpack(source, tmp_path / "models" / "m")
    assert {p.name for p in tmp_path.rglob("*")} == {"bad.tar.gz", "models", "m", "first"}
    assert str(tmp_path) not in raised.value.message


def test_a_backslash_of_windows_separates_as_a_slash_does(tmp_path: Path) -> None:
    names = ("시.params", "code\\inference.py", "code\\lib\\운율.py")
    folder = member("code\\", tarfile.DIRTYPE)
    make(tmp_path / "a.tar.gz", folder, *map(member, names), data=b"1")
    with zipfile.ZipFile(tmp_path / "b.mar", "w") as archive:
        for name in ("code\\", *names):
            archive.writestr(name, b"" if name.endswith("\\") else b"1")
    for source in (tmp_path / "a.tar.gz", tmp_path / "b.mar"):
        unpacked = tmp_path / source.stem
        unpack(source, unpacked)
        paths = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
        assert paths == {"시.params", "code/inference.py", "code/lib/운율.py"}
    for out in ("..\\out", "a\\..\\..\\out", "\\out"):
        make(tmp_path / "a.tar.gz", member(out))
        with pytest.raises(ArchiveError, match="leads out of its folder"):
            unpack(tmp_path / "a.tar.gz", tmp_path / "out")


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    hidden = ("._시.params", "code/._inference.py", "__MACOSX/._시.params", ".prepared/a", "./.env")
    make(tmp_path / "a.tar.gz", *map(member, (*hidden, "시.params")), data=b"1")
    unpack(tmp_path / "a.tar.gz", tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["시.params"]


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


@pytest.mark.parametrize("kept", [0, 10, 60, -1, -8, None])
def test_a_damaged_archive_is_refused(tmp_path: Path, kept: int | None) -> None:
    source = make(tmp_path / "a.tar.gz", member("x"), data=bytes(range(256)) * 64)
    data = bytearray(source.read_bytes())
    data[-6] ^= kept is None  # in the check sum
    source.write_bytes(data[:kept])
    with pytest.raises(ArchiveError, match=r"a\.tar\.gz .*(no files|damaged|ends)"):
        unpack(source, tmp_path / "m")


def test_the_size_is_bounded_before_more_is_written(tmp_path: Path) -> None:
    source = make(tmp_path / "a.tar.gz", member("x"), member("y"), data=b"0" * 60)
    with pytest.raises(ArchiveError, match="MODEL_MAX_MIB"):
        unpack(source, tmp_path / "m", max_bytes=100)
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["x"]


def test_a_header_cannot_fill_the_memory(tmp_path: Path) -> None:
    for kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
        info = tarfile.TarInfo("x")
        info.type, info.size = kind, 64 << 20
        with pytest.raises(ArchiveError, match="extended headers have"):
            unpack(raw(tmp_path / "a.tar.gz", info.tobuf()), tmp_path / "m")


def header(kind: bytes, data: bytes) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, len(data)
    return info.tobuf() + data + bytes(-len(data) % 512)


def record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    length = next(n for n in range(len(rest), len(rest) + 9) if n == len(rest) + len(str(n)))
    return b"%d" % length + rest


def raw(path: Path, *pieces: bytes) -> Path:
    path.write_bytes(gzip.compress(b"".join(pieces) + bytes(1024)))
    return path


@pytest.mark.parametrize("last", [tarfile.REGTYPE, tarfile.DIRTYPE])
def test_a_tree_too_deep_is_refused_before_it_is_made(tmp_path: Path, last: bytes) -> None:
    for depth in (33, 1200):
        path = make(tmp_path / "a.tar.gz", member("first"), member("가/" * depth + "f", last))
        with pytest.raises(ArchiveError, match="deeper than 32 folders"):
            unpack(path, tmp_path / f"{depth}")
        assert [p.name for p in (tmp_path / f"{depth}").iterdir()] == ["first"]
    name = "가/" * 31 + "f"
    unpack(make(tmp_path / "a.tar.gz", member("first"), member(name, last)), tmp_path / "m")
    assert (tmp_path / "m" / name).exists()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (tarfile.GNUTYPE_LONGNAME, "가".encode()),
        (tarfile.XHDTYPE, record("path", "가")),
        (tarfile.XGLTYPE, record("comment", "x")),
    ],
)
def test_chained_headers_are_read_one_after_another(
    tmp_path: Path, kind: bytes, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = [header(kind, data)] * 2000
    unpack(raw(tmp_path / "a.tar.gz", *chain, header(tarfile.REGTYPE, b"1")), tmp_path / "m")
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["x" if kind == b"g" else "가"]
    monkeypatch.setattr("serving.store.archive_tar.MAX_HEADER_BYTES", 1_000_000)  # of all
    with pytest.raises(ArchiveError, match="extended headers have more than"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "n")


def test_an_extended_header_is_read_in_one_pass(tmp_path: Path) -> None:
    """tarfile's own search takes the square of it: half an hour for this one."""
    source = raw(tmp_path / "a.tar.gz", header(tarfile.XHDTYPE, b"1" * (1 << 20)))
    with pytest.raises(ArchiveError, match="damaged header"):
        unpack(source, tmp_path / "m")


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_long_names_and_links_are_read_in_either_format(tmp_path: Path, format: int) -> None:
    name = "가" * 60 + "/" + "나" * 70
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=format) as tar:
        first, link = member(name), member("다" * 60, tarfile.LNKTYPE, name)
        first.size = 3
        tar.addfile(first, io.BytesIO(b"123"))
        tar.addfile(link)
    unpack(tmp_path / "a.tar.gz", tmp_path / "m")
    assert (tmp_path / "m" / name).read_bytes() == b"123"
    assert (tmp_path / "m" / ("다" * 60)).read_bytes() == b"123"


@pytest.mark.parametrize(
    "pieces",
    [
        [header(tarfile.GNUTYPE_SPARSE, b"")],
        [header(tarfile.XHDTYPE, record("GNU.sparse.major", "1")), header(tarfile.REGTYPE, b"1")],
        [header(tarfile.XHDTYPE, record("GNU.sparse.map", "0,1")), header(tarfile.REGTYPE, b"1")],
    ],
    ids=["old", "1.0", "0.1"],
)
def test_sparse_files_are_refused(tmp_path: Path, pieces: list[bytes]) -> None:
    with pytest.raises(ArchiveError, match="sparse"):
        unpack(raw(tmp_path / "a.tar.gz", *pieces), tmp_path / "m")


@pytest.mark.parametrize(
    "pax",
    [b"5 a=", b"5 a=b", b"8 path=x\n", b"1000 path=x\n", b"x path=x\n", b"10 size=-1\n", b"0 a=\n"],
)
def test_a_damaged_extended_header_is_refused(tmp_path: Path, pax: bytes) -> None:
    pieces = header(tarfile.XHDTYPE, pax), header(tarfile.REGTYPE, b"1")
    with pytest.raises(ArchiveError, match="damaged header"):
        unpack(raw(tmp_path / "a.tar.gz", *pieces), tmp_path / "m")


def test_folders_count_as_files_do_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "MAX_FILES", 100)
    nested = make(tmp_path / "a.tar.gz", *(member(f"{n}/" + "a/" * 30 + "f") for n in range(4)))
    again = (member(name, tarfile.DIRTYPE).tobuf() * 101 for name in ("./", "a", ".prepared"))
    for path in (nested, *(raw(tmp_path / f"{i}.tar.gz", data) for i, data in enumerate(again))):
        with pytest.raises(ArchiveError, match="more than 100 files"):
            unpack(path, tmp_path / path.stem)


@pytest.mark.parametrize("folder", ["", "model/"])
def test_what_the_engine_trusts_cannot_be_brought(tmp_path: Path, folder: str) -> None:
    source = make(
        tmp_path / "a.tar.gz",
        member(f"{folder}.prepared/x.json"),
        member(f"{folder}.prepared", tarfile.DIRTYPE),
        member(f"{folder}a.params"),
        member(f"{folder}.prepared/b.bin", tarfile.LNKTYPE, f"{folder}a.params"),
        member(f"{folder}b.params"),
        data=b"12345",
    )
    unpack(source, tmp_path / "m")
    assert {p.name for p in (tmp_path / "m" / folder).iterdir()} == {"a.params", "b.params"}
    assert (tmp_path / "m" / folder / "b.params").read_bytes() == b"12345"


def test_names_are_utf8(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", encoding="cp949") as tar:
        tar.format = tarfile.GNU_FORMAT
        tar.addfile(tarfile.TarInfo("모델.params"))
    with pytest.raises(ArchiveError, match="not UTF-8"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "m")
