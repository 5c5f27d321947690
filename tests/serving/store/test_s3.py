from __future__ import annotations

import http.server
import socket
import threading
from pathlib import Path

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sts.models import sts_backends

from common.errors import SettingError
from serving.errors import (
    ArtifactChanged,
    StartError,
    StoreAccessDenied,
    StoreUnavailable,
)
from serving.store import open_store
from serving.store import s3 as s3_module
from serving.store.objects import ObjectStore
from tests.serving.store.s3 import BUCKET, LOCATION, S3Server, archive, open_cache

pytestmark = pytest.mark.usefixtures("s3")


def put_unpacked(s3: S3Server, name: str) -> None:
    for path in ("모델.params", "code/inference.py", "empty", ".DS_Store"):
        s3.put(f"kogpt2/{name}/{path}", b"" if path == "empty" else path.encode())


def test_a_long_listing_is_whole_and_of_its_prefix_only(s3: S3Server) -> None:
    s3.put("kogpt2-other/a.tar.gz", b"1")
    s3.put_many(f"kogpt2/시{number:04}.tar.gz" for number in range(1200))
    assert len(open_store(LOCATION).models()) == 1200


def test_an_unpacked_prefix_becomes_a_folder(s3: S3Server, tmp_path: Path) -> None:
    put_unpacked(s3, "동주")
    cache, store = open_cache(tmp_path), open_store(LOCATION)
    fetched = cache.acquire(store.find("동주"))
    files = {
        p.relative_to(fetched.path).as_posix(): p.read_text() for p in fetched.path.rglob("*.*")
    }
    assert files == {"모델.params": "모델.params", "code/inference.py": "code/inference.py"}
    assert (fetched.path / "empty").read_bytes() == b""
    assert cache.acquire(store.find("동주")).hit
    s3.put("kogpt2/동주/모델.params", b"new")
    assert (cache.acquire(store.find("동주")).path / "모델.params").read_bytes() == b"new"


def test_an_artifact_that_changes_before_it_is_fetched_is_not_mixed(
    s3: S3Server, tmp_path: Path
) -> None:
    cache, store = open_cache(tmp_path), open_store(LOCATION)
    s3.put("kogpt2/a.tar.gz", archive({"a.params": b"old"}))
    put_unpacked(s3, "b")
    for name, key in (("a", "kogpt2/a.tar.gz"), ("b", "kogpt2/b/모델.params")):
        found = store.find(name)
        s3.put(key, archive({"a.params": b"new"}))
        with pytest.raises(ArtifactChanged):
            cache.acquire(found)
        assert not cache.acquire(store.find(name)).hit
    assert not list((tmp_path / "parts").iterdir())


def test_what_keeps_a_store_closed_is_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("kogpt2/a.tar.gz", b"1")
    store = open_store(LOCATION)
    with s3.checking_access():
        with pytest.raises(StoreAccessDenied, match=rf"{BUCKET}/kogpt2/a.*s3:GetObject"):
            store.find("a")
        with pytest.raises(StoreAccessDenied, match=r"were not accepted \(InvalidAccessKeyId\)"):
            store.models()
    with pytest.raises(StoreAccessDenied, match="no bucket nowhere"):
        open_store("s3://nowhere/").find("a")
    with pytest.raises(SettingError, match=r"s3://봄 cannot be used: '봄' is no bucket's name"):
        open_store("s3://봄/")
    s3.client.put_object(Bucket=BUCKET, Key="kogpt2/시.tar.gz", Body=b"1", StorageClass="GLACIER")
    (archived,) = (model for model in store.models() if model.name == "시")
    assert isinstance(store, ObjectStore)
    with pytest.raises(StoreAccessDenied, match=r"kogpt2/시\.tar\.gz is archived .*restore it"):
        list(store.read(*store.files(archived), 0, 1))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreAccessDenied, match="AWS_ACCESS_KEY_ID"):
        open_store(LOCATION).find("a")


@pytest.mark.parametrize("listening", [False, True], ids=["refused", "silent"])
def test_an_endpoint_that_does_not_answer_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, listening: bool
) -> None:
    """With fewer retries: how long a request waits is `Lookups`' to decide."""
    quick = {"retries": {"mode": "standard", "max_attempts": 2}, "read_timeout": 0.5}
    monkeypatch.setattr(s3_module, "CLIENT_OPTIONS", {**s3_module.CLIENT_OPTIONS, **quick})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if not listening:
            listener.close()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        with pytest.raises(StoreUnavailable, match="cannot be read"):
            open_store(LOCATION).find("a")


def test_a_location_without_a_bucket_or_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    for location, reason in (
        ("s3:///prefix", "bucket"),
        ("ftp://host/", "may be a folder or s3://"),
        (str(tmp_path / "없음"), "not a folder"),
    ):
        with pytest.raises(StartError, match=reason):
            open_store(location)


def test_a_pods_identity_is_enough(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EKS gives a pod of the annotated service account a token and a role, and no keys (IRSA)."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "token").write_text("signed by the cluster", "utf-8")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/kogpt2-store")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3.url)
    s3.put("kogpt2/소월.tar.gz", b"12345")
    assert [model.name for model in open_store(LOCATION).models()] == ["소월"]
    (role,) = sts_backends[DEFAULT_ACCOUNT_ID]["aws"].assumed_roles
    assert role.role_arn.endswith("role/kogpt2-store")


EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"


class Expired(http.server.BaseHTTPRequestHandler):
    """Answers as S3 does to an expired token: HEAD has no body, and so no code."""

    def do_HEAD(self) -> None:
        self.send_response(400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(400)
        self.send_header("Content-Length", str(len(EXPIRED)))
        self.end_headers()
        self.wfile.write(EXPIRED)

    def log_message(self, *_: object) -> None: ...


def test_an_expired_token_is_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Expired) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        store = open_store(LOCATION)
        for call in (lambda: store.find("봄"), store.models):
            with pytest.raises(StoreAccessDenied, match=r"credentials were.*ExpiredToken") as error:
                call()
            assert "ListBucket" not in error.value.message
        server.shutdown()
