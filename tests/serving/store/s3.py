"""A real S3 server on loopback (moto), and models to put there."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import requests
from botocore.loaders import create_loader
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from serving.store import Cache, Sources, open_store
from testbed.s3 import ACCESS as ENVIRONMENT
from testbed.s3 import client

BUCKET = "models"
LOCATION = f"s3://{BUCKET}/kogpt2/"


class S3Server:
    """`environment` is what a client needs to find it; `client` is one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": url}
        self.client = client(url)

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def put_many(self, keys: Iterable[str]) -> None:
        """Put objects of one byte, from within the server: over HTTP, a thousand take 15 s."""
        backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        for key in keys:
            backend.put_object(BUCKET, key, b"1")

    def empty(self) -> None:
        """Forgets all objects, and makes the bucket again."""
        requests.post(f"{self.url}/moto-api/reset", timeout=60)
        self.client.create_bucket(Bucket=BUCKET)

    @contextlib.contextmanager
    def checking_access(self) -> Iterator[None]:
        """Meanwhile, whoever is not known may do nothing."""
        requests.post(f"{self.url}/moto-api/reset-auth", data="0", timeout=60)
        try:
            yield
        finally:
            requests.post(f"{self.url}/moto-api/reset-auth", data="inf", timeout=60)


@contextlib.contextmanager
def s3_server(address: str = "127.0.0.1") -> Iterator[S3Server]:
    """Meanwhile boto3 and moto read descriptions of services once, not 0.1 s for each session."""
    server = ThreadedMotoServer(address, 0, verbose=False)
    server.start()
    try:
        once = mock.Mock(return_value=create_loader())
        with (
            mock.patch("botocore.session.create_loader", once),
            mock.patch("botocore.loaders.create_loader", once),
        ):
            host, port = server.get_host_and_port()
            s3 = S3Server(f"http://{host}:{port}")
            s3.empty()
            yield s3
            s3.client.close()
    finally:
        server.stop()
        assert server._server is not None
        server._server.server_close()  # moto leaves it open: clients would wait


def archive(files: Mapping[str, bytes], level: int = 1) -> bytes:
    """A tar.gz with these files."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(plain.getvalue(), level, mtime=0)


def open_cache(
    folder: Path,
    location: str = LOCATION,
    *,
    max_bytes: int = 1 << 30,
    model_max_bytes: int = 4 << 30,
) -> Cache:
    """The cache of a server with this store."""
    return Cache(Sources(open_store(location)), folder, max_bytes, model_max_bytes)
