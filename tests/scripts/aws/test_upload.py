"""kogpt2 upload puts, never overwrites, lists and deletes."""

from __future__ import annotations

from pathlib import Path

import pytest

from command.errors import Problem
from scripts import upload
from scripts.artifacts.archive import check, write_archive
from scripts.aws.account import Account
from scripts.aws.locations import Location
from tests.engine.models import make_artifact
from tests.scripts.aws.cloud import BUCKET, MODELS, Cloud
from tests.serving.store.s3 import archive


def model(folder: Path, name: str, weights: bytes = b"1") -> Path:
    path = folder / f"{name}.tar.gz"
    path.write_bytes(archive({"model.params": weights, "tokenizer.spiece": b"2"}))
    return path


def names(aws: Cloud) -> list[str]:
    found = aws.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return [item["Key"] for item in found]


def test_uploads_what_is_not_there_yet(aws: Cloud, tmp_path: Path) -> None:
    poems, prose = model(tmp_path, "poems"), model(tmp_path, "prose")
    said = aws.run("upload", MODELS, str(poems), code=2)
    assert said == f"there is no bucket {BUCKET}; --create-bucket makes it"
    out = aws.run("upload", MODELS, str(poems), "--create-bucket")
    assert f"made bucket {BUCKET} in us-east-1" in out
    found = aws.client("s3").get_object(Bucket=BUCKET, Key="kogpt2/poems.tar.gz")
    assert found["Body"].read() == poems.read_bytes()
    out = aws.run("upload", MODELS, str(poems), str(prose))
    assert "poems.tar.gz   0.0 MiB is there already, the same" in out
    assert "prose.tar.gz   0.0 MiB sent" in out
    assert names(aws) == ["kogpt2/poems.tar.gz", "kogpt2/prose.tar.gz"]


def test_never_overwrites(aws: Cloud, tmp_path: Path) -> None:
    aws.put_models()
    other, poems = model(tmp_path, "other"), model(tmp_path, "poems")
    aws.run("upload", MODELS, str(poems))
    before = poems.read_bytes()
    changed = model(tmp_path, "poems", b"changed")
    said = aws.run("upload", MODELS, str(other), str(changed), code=2)
    assert said.startswith(f"s3://{BUCKET}/kogpt2/poems.tar.gz is another model")
    stored = aws.client("s3").get_object(Bucket=BUCKET, Key="kogpt2/poems.tar.gz")
    assert stored["Body"].read() == before
    assert names(aws) == ["kogpt2/poems.tar.gz"]  # and nothing half done


@pytest.mark.parametrize("size", [1000, 20 << 20])  # in one part, and in several
def test_who_comes_second_does_not_overwrite(
    aws: Cloud, account: Account, tmp_path: Path, size: int
) -> None:
    """Both looked before either put: only S3's own condition can tell."""
    aws.put_models()
    path = tmp_path / "poems.tar.gz"
    path.write_bytes(bytes(size))
    place = Location(BUCKET, "kogpt2/")
    for _ in range(2):  # the same again: as if an answer had been lost
        upload.send(account, place, path, upload.digest(path))
    path.write_bytes(b"1" * size)
    with pytest.raises(Problem, match="is another model"):
        upload.send(account, place, path, upload.digest(path))
    kept = aws.client("s3").get_object(Bucket=BUCKET, Key="kogpt2/poems.tar.gz")["Body"].read()
    assert kept == bytes(size)
    unfinished = aws.client("s3").list_multipart_uploads(Bucket=BUCKET)
    assert unfinished.get("Uploads", []) == []


def test_wrong_models_are_named_before_anything_is_sent(aws: Cloud, tmp_path: Path) -> None:
    aws.put_models()
    good = model(tmp_path, "good")
    for name, content, expected in (
        ("시.zip", b"PK", "is not NAME.tar.gz"),
        ("empty.tar.gz", archive({"readme": b"no model"}), "holds no model"),
        ("broken.tar.gz", good.read_bytes()[:-20], "is no gzipped tar archive"),
        ("gone.tar.gz", None, "does not exist"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        assert f"{path} {expected}" in aws.run("upload", MODELS, str(good), str(path), code=2)
    assert names(aws) == []


def test_a_folder_is_packed_as_scripts_package_does(aws: Cloud, tmp_path: Path) -> None:
    aws.put_models()
    folder = make_artifact(tmp_path / "소월")
    aws.run("upload", MODELS, str(folder))
    assert "소월.tar.gz" in aws.run("upload", MODELS, "--list")
    write_archive(check(folder), tmp_path / "packed.tar.gz")
    found = aws.client("s3").get_object(Bucket=BUCKET, Key="kogpt2/소월.tar.gz")
    assert found["Body"].read() == (tmp_path / "packed.tar.gz").read_bytes()
    (folder / "config.json").write_text("{")
    assert "config.json" in aws.run("upload", MODELS, str(folder), code=2)


def test_a_dry_run_says_what_would_be_sent_and_sends_nothing(aws: Cloud, tmp_path: Path) -> None:
    archive, folder = model(tmp_path, "소월"), tmp_path / "동주"
    make_artifact(folder)
    out = aws.run("upload", MODELS, str(archive), str(folder), "--create-bucket", "--dry-run")
    assert "note: 소월.tar.gz is not ASCII" in out
    assert "note: 동주.tar.gz is not ASCII" in out
    assert f"make bucket {BUCKET}" in out
    assert "send 소월.tar.gz" in out
    assert aws.client("s3").list_buckets()["Buckets"] == []
    aws.put_models()
    assert "send 소월.tar.gz" in aws.run("upload", MODELS, str(archive), "--dry-run")
    assert names(aws) == []


def test_lists_and_deletes(aws: Cloud) -> None:
    aws.put_models(sowol=1 << 20, dongju=1 << 19)
    out = aws.run("upload", MODELS, "--list")
    assert "sowol.tar.gz   1.0 MiB" in out
    assert "2 models, 1.5 MiB" in out
    said = aws.run("upload", MODELS, "--delete", "gone.tar.gz", "--yes", code=2)
    assert said.startswith(f"no gone.tar.gz at {MODELS}")
    assert "give --yes" in aws.run("upload", MODELS, "--delete", "sowol.tar.gz", code=2)
    assert len(names(aws)) == 2
    out = aws.run("upload", MODELS, "--delete", "sowol.tar.gz", "--dry-run")
    assert f"delete {MODELS}sowol.tar.gz (1.0 MiB)" in out
    assert len(names(aws)) == 2
    aws.run("upload", MODELS, "--delete", "sowol.tar.gz", "--yes")
    assert names(aws) == ["kogpt2/dongju.tar.gz"]
