"""`.mar`, the zip that Multi Model Server's archiver makes, as an archive like any other."""

from __future__ import annotations

import io
import random
import stat
import struct
import zipfile
from pathlib import Path

import pytest

from serving.errors import ArchiveError
from serving.store import archive_limits, download, open_store
from serving.store.archive import extract
from tests.serving.store.archives import MAX_BYTES, unpack
from tests.serving.store.s3 import S3Server, open_cache


def make(path: Path, files: dict[str, bytes], mode: int = 0o100644) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, data)
    return path


def test_a_mar_becomes_a_folder(tmp_path: Path) -> None:
    source = make(tmp_path / "시.mar", {"서비스.py": "가".encode(), "MAR-INF/MANIFEST.json": b"{}"})
    unpack(source, tmp_path / "models" / "시")
    assert (tmp_path / "models" / "시" / "서비스.py").read_text("utf-8") == "가"
    assert (tmp_path / "models" / "시" / "MAR-INF" / "MANIFEST.json").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../outside", "leads out"),
        ("./first", "twice"),
        ("", "no name of a file"),
        (".", "no name of a file"),
    ],
)
def test_what_no_archive_may_hold_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    bad = make(tmp_path / "bad.mar", {"first": b"1", name: b"2"})
    with pytest.raises(ArchiveError, match=rf"bad\.mar cannot be unpacked: .* {reason}"):
        unpack(bad, tmp_path / "models" / "m")
    assert not list(tmp_path.rglob("outside"))


def test_links_and_devices_are_refused(tmp_path: Path) -> None:
    for kind in (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR):
        bad = make(tmp_path / "bad.mar", {"link": b"/etc/passwd"}, kind | 0o777)
        with pytest.raises(ArchiveError, match="no file or folder"):
            unpack(bad, tmp_path / "m")


def test_a_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "MAX_FILES", 100)
    many = make(tmp_path / "many.mar", dict.fromkeys(map(str, range(101)), b""))
    # One that claims 4 GiB.
    data = bytearray(make(tmp_path / "big.mar", {"a": b"x" * 100}).read_bytes())
    at = data.rfind(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFFE)
    reserved: list[int] = []
    for packed in (many.read_bytes(), bytes(data)):
        with pytest.raises(ArchiveError, match="more than 100 files or 64 MiB"):
            extract(io.BytesIO(packed), tmp_path / "m", "a.mar", MAX_BYTES, reserved.append)
    assert not reserved


def test_a_damaged_mar_says_so(tmp_path: Path) -> None:
    good = make(tmp_path / "good.mar", {"a": b"x" * 10_000, "b": bytes(range(256))}).read_bytes()
    for i, bad in enumerate((good[:60], good[:-30], good[:40] + b"\xff" * 20 + good[60:])):
        (tmp_path / f"{i}.mar").write_bytes(bad)
        with pytest.raises(ArchiveError, match="cannot be unpacked"):
            unpack(tmp_path / f"{i}.mar", tmp_path / "m")


def test_a_mar_in_s3_is_read_from_its_end_while_it_is_downloaded(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "RANGE_BYTES", 64 << 10)
    weights = random.Random(1).randbytes(160 << 10)  # noqa: S311  three ranges
    packed = make(tmp_path / "a.mar", {"weights": weights, "MAR-INF/MANIFEST.json": b"{}"})
    s3.put("kogpt2/마르.mar", packed.read_bytes())
    cache = open_cache(tmp_path / "cache")
    fetched = cache.acquire(open_store("s3://models/kogpt2/").find("마르"))
    assert (fetched.path / "weights").read_bytes() == weights
