"""Reads `s3://` with boto3 and its standard variables for credentials, region and endpoint.

obstore, which would read all stores, has no profiles, so neither SSO nor credential processes:
https://github.com/apache/arrow-rs/pull/4238
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import boto3
from botocore import awsrequest, exceptions
from botocore.config import Config
from botocore.handlers import validate_bucket_name
from urllib3.exceptions import HTTPError

from common.errors import SettingError
from serving.errors import ArtifactChanged, ModelNotInStore, StoreAccessDenied, StoreUnavailable
from serving.store.catalog import StoredFile
from serving.store.stopping import Stoppable

CHUNK_BYTES = 32 << 10  # the pace of a slow store is measured in chunks of this size
# With all attempts, a request to a bucket that does not answer fails after about half a minute.
CLIENT_OPTIONS: dict[str, Any] = {
    "retries": {"mode": "standard", "max_attempts": 5},
    "connect_timeout": 3,
    "read_timeout": 20,
    "max_pool_connections": 32,
}
MISSING = ("404", "NoSuchKey", "NotFound")
DENIED = ("403", "AccessDenied", "AllAccessDisabled", "Forbidden")
CREDENTIALS = (  # not accepted, whatever they allow
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
)


class _HTTP(Stoppable, awsrequest.AWSHTTPConnection): ...  # type: ignore[misc]


class _HTTPS(Stoppable, awsrequest.AWSHTTPSConnection): ...  # type: ignore[misc]


# boto3 has no option for the class of connections.
awsrequest.AWSHTTPConnectionPool.ConnectionCls = _HTTP
awsrequest.AWSHTTPSConnectionPool.ConnectionCls = _HTTPS


class S3Bucket:
    """A `Bucket` of S3. Raises `SettingError` if boto3 rejects its configuration."""

    paced = True

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            validate_bucket_name({"Bucket": name})
        except exceptions.ParamValidationError:
            raise SettingError(
                f"s3://{name} cannot be used: {name!r} is no bucket's name"
            ) from None
        try:
            self._client = boto3.session.Session().client("s3", config=Config(**CLIENT_OPTIONS))
        except (exceptions.BotoCoreError, ValueError) as error:
            raise SettingError(f"s3://{name} cannot be used: {error}") from None

    def head(self, key: str) -> StoredFile | None:
        try:
            with self._errors("s3:GetObject", key):
                try:
                    answer = self._client.head_object(Bucket=self.name, Key=key)
                except exceptions.ClientError as error:
                    if _code(error) != "400":
                        raise
                    # Without a body, a HEAD has no reason, such as an expired token.
                    self._client.get_object(Bucket=self.name, Key=key, Range="bytes=0-0")
                    raise
        except ModelNotInStore:
            return None
        return StoredFile(key, key, answer["ContentLength"], answer["ETag"].strip('"'))

    def list(self, prefix: str) -> Iterator[StoredFile]:
        pages = self._client.get_paginator("list_objects_v2")
        with self._errors("s3:ListBucket", prefix):
            for page in pages.paginate(Bucket=self.name, Prefix=prefix):
                for item in page.get("Contents", ()):
                    key = item["Key"]
                    yield StoredFile(key, key, item["Size"], item["ETag"].strip('"'))

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        with self._errors("s3:GetObject", file.address):
            answer = self._client.get_object(
                Bucket=self.name,
                Key=file.address,
                Range=f"bytes={start}-{stop - 1}",
                IfMatch=f'"{file.version}"',
            )
            with contextlib.closing(answer["Body"]) as body:
                yield from body.iter_chunks(CHUNK_BYTES)

    @contextlib.contextmanager
    def _errors(self, action: str, key: str) -> Iterator[None]:
        """Convert boto3's errors to `ServingError`s."""
        where = f"s3://{self.name}/{key}"
        try:
            yield
        except exceptions.ClientError as error:
            code = _code(error)
            if code in MISSING:
                raise ModelNotInStore(f"there is nothing at {where}") from None
            if code == "NoSuchBucket":
                raise StoreAccessDenied(f"there is no bucket {self.name}") from None
            if code == "InvalidObjectState":
                raise StoreAccessDenied(
                    f"{where} is archived (its storage class is GLACIER or the like): restore it"
                ) from None
            if code in CREDENTIALS:
                raise StoreAccessDenied(
                    f"{where}: the credentials were not accepted ({code}); renew them"
                ) from None
            if code in ("412", "PreconditionFailed"):
                raise ArtifactChanged(f"{where} has changed; try again") from None
            if code in DENIED:
                hint = (
                    ""
                    if action == "s3:ListBucket"
                    else f"; without s3:ListBucket on the bucket {self.name}, S3 denies missing"
                    " objects, too"
                )
                raise StoreAccessDenied(f"{where}: {action} was denied ({code}){hint}") from None
            raise StoreUnavailable(f"{where}: {action} failed: {error}") from None
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
            raise StoreAccessDenied(
                f"{where}: {error}; give a role, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        # boto3 does not wrap urllib3's errors while a body is read.
        except (exceptions.BotoCoreError, HTTPError, OSError) as error:
            raise StoreUnavailable(f"{where} cannot be read: {error}") from None


def _code(error: exceptions.ClientError) -> str:
    """Return S3's code of an error; of a HEAD, which has none, the status."""
    return str(error.response.get("Error", {}).get("Code", ""))
