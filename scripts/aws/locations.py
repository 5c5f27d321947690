"""S3 locations, `s3://bucket/prefix/`, and the models in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from command.errors import Problem
from scripts.aws.account import Account


@dataclass(frozen=True)
class Location:
    bucket: str
    key: str  # a prefix ends with "/" or is empty

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True)
class Artifact:
    name: str  # relative to the prefix
    size_bytes: int
    modified: Any


def parse(text: str) -> Location:
    """Parse a URL; a key without an archive's suffix is a prefix. Raises `Problem`."""
    scheme, mark, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not mark or not bucket:
        raise Problem(f"{text} must be s3://bucket/prefix/")
    if key and not key.endswith(("/", ".tar.gz")):
        key += "/"
    return Location(bucket, key)


def region_of(account: Account, bucket: str) -> str | None:
    """Return a bucket's region, None if it does not exist. Raises `Problem` without access.

    S3 names the region in refusals, too.
    """
    from botocore.exceptions import ClientError

    try:
        result = account.client("s3").head_bucket(Bucket=bucket)["ResponseMetadata"]
    except ClientError as error:
        result = error.response["ResponseMetadata"]
        if result["HTTPStatusCode"] == 404:
            return None
        if result["HTTPStatusCode"] == 403:
            raise Problem(
                f"bucket {bucket} is another account's, or you lack s3:ListBucket on it"
            ) from None
        if result["HTTPStatusCode"] not in (301, 400):
            raise
    region: str = result["HTTPHeaders"].get("x-amz-bucket-region", account.region)
    return region


def check_bucket(account: Account, location: Location, hint: str = "") -> None:
    """Raise `Problem` if the bucket is missing or in another region than the endpoint."""
    region = region_of(account, location.bucket)
    if region is None:
        raise Problem(f"there is no bucket {location.bucket}{hint}")
    if region != account.region:
        raise Problem(
            f"bucket {location.bucket} is in {region}, the command's region is {account.region};"
            f" SageMaker needs models in its own region: give --region {region}"
        )


def artifacts(account: Account, location: Location) -> list[Artifact]:
    """List the `.tar.gz` files under a prefix, or the one file."""
    result = account.all(
        "s3", "list_objects_v2", "Contents", Bucket=location.bucket, Prefix=location.key
    )
    return [
        Artifact(item["Key"][len(location.key) :], item["Size"], item["LastModified"])
        for item in result
        if item["Key"].endswith(".tar.gz")
    ]


def mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
