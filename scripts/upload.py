"""`kogpt2 upload`: uploads fine-tunes to S3, lists and deletes them."""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command.errors import Problem
from command.options import argument, option
from command.tables import table
from common.model_files import is_model
from scripts.aws import locations
from scripts.aws.account import SHARED, Account, Change, confirm
from scripts.aws.locations import Location, mebibytes

SUFFIX = ".tar.gz"


@dataclass(kw_only=True)
class Upload(Change):
    to: str = argument("", metavar="s3://BUCKET/PREFIX/")
    models: list[Path] = argument("archives and folders", [])
    show: bool = option(False, "list the models", "--list")
    delete: list[str] = option(
        [], "delete a model by its name in --list; repeatable", metavar="NAME"
    )
    create_bucket: bool = option(False, "create a missing bucket, private and encrypted")


def run(options: Upload) -> None:
    """Upload fine-tunes to an endpoint's S3 prefix, list them, and delete them.

    A model is a NAME.tar.gz, or a folder, which is packed as `kogpt2 package` does. No model is
    overwritten, because instances that have loaded it keep the old version: give a new version
    another name. A model that is in S3 already is not uploaded again.

    Examples:
    kogpt2 upload s3://my-bucket/fine-tunes/ poems.tar.gz model_store/*.tar.gz
    kogpt2 upload s3://my-bucket/fine-tunes/ my-model/ --create-bucket
    kogpt2 upload s3://my-bucket/fine-tunes/ --list
    kogpt2 upload s3://my-bucket/fine-tunes/ --delete poems.tar.gz
    """
    if bool(options.models) + options.show + bool(options.delete) != 1:
        raise Problem("give models to upload, or --list, or --delete NAME")
    location = locations.parse(options.to)
    for path in options.models:
        if not path.exists():
            raise Problem(f"{path} does not exist")
    account = Account(options)
    if options.create_bucket:
        create_bucket(account, location.bucket, options.dry_run)
    else:
        locations.check_bucket(account, location, "; --create-bucket makes it")
    if options.show:
        show(account, location)
    elif options.delete:
        delete(account, location, options)
    else:
        with tempfile.TemporaryDirectory() as work:
            archives = [as_archive(path, Path(work)) for path in options.models]
            upload(account, location, archives, options.dry_run)


def create_bucket(account: Account, bucket: str, dry_run: bool) -> None:
    """Create a missing bucket; S3 makes new ones private and encrypted."""
    if locations.region_of(account, bucket) is not None:
        locations.check_bucket(account, Location(bucket, ""))
        return
    if dry_run:
        print(f"  make bucket {bucket} in {account.region}")
        return
    place: dict[str, Any] = (
        {}
        if account.region == "us-east-1"  # S3 does not accept it as a constraint
        else {"CreateBucketConfiguration": {"LocationConstraint": account.region}}
    )
    s3 = account.client("s3")
    s3.create_bucket(Bucket=bucket, **place)
    s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": SHARED})
    rules = [{"ID": "unfinished uploads", "Status": "Enabled", "Filter": {"Prefix": ""},
              "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}]  # fmt: skip
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})
    print(f"made bucket {bucket} in {account.region}")


def as_archive(path: Path, work: Path) -> Path:
    """Return a checked .tar.gz; a folder is packed into `work`. Raises `Problem`."""
    if path.is_dir():
        # Here, because it imports the server's code, which --list does not need.
        from scripts.artifacts.archive import check, write_archive

        target = work / f"{path.resolve().name}{SUFFIX}"
        write_archive(check(path), target)
        return target
    if not path.name.endswith(SUFFIX):
        raise Problem(f"{path} is not NAME{SUFFIX} (SageMaker takes nothing else)")
    try:
        with gzip.open(path) as file:
            with tarfile.open(fileobj=file) as tar:
                names = tar.getnames()
            while file.read(1 << 20):  # reads up to the end, where gzip checks its checksum
                pass
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise Problem(f"{path} is no gzipped tar archive ({error})") from None
    if not is_model(names):
        raise Problem(f"{path} holds no model (kogpt2 package FOLDER packs one, or says why not)")
    return path


def upload(account: Account, location: Location, archives: list[Path], dry_run: bool) -> None:
    sums = {path: digest(path) for path in archives}
    there = {path for path in archives if is_there(account, location, path, sums[path])}
    for path in archives:
        if not re.fullmatch(r"[\x21-\x7e]+", path.name):
            print(
                f"note: {path.name} is not ASCII: invoke-endpoint cannot name it (TargetModel is an"
                " HTTP header), but MODEL_STORE=s3://... on a server of your own can"
            )
        if path not in there and dry_run:
            print(f"  send {path.name} ({mebibytes(path.stat().st_size)}) to {location}")
            continue
        if path not in there:
            send(account, location, path, sums[path])
        outcome = "is there already, the same" if path in there else f"sent to {location}"
        print(f"{path.name:<14} {mebibytes(path.stat().st_size)} {outcome}")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        result = hashlib.sha256()
        while chunk := file.read(1 << 20):
            result.update(chunk)
    return result.hexdigest()


def is_there(account: Account, location: Location, path: Path, sha256: str) -> bool:
    """Return whether this archive is in S3. Raises `Problem` if another archive has its name."""
    key = location.key + path.name
    result = account.find("s3", "head_object", Bucket=location.bucket, Key=key)
    if result is None:
        return False
    if result["Metadata"].get("sha256") != sha256:
        raise Problem(
            f"s3://{location.bucket}/{key} is another model, and nothing is overwritten:"
            " give yours a new name"
        )
    return True


def send(account: Account, location: Location, path: Path, sha256: str) -> None:
    """Upload an archive unless the name has been taken meanwhile."""
    from botocore.exceptions import ClientError
    from tqdm import tqdm

    client = account.client("s3")

    def never_overwrite(params: dict[str, Any], **_: Any) -> None:
        params["IfNoneMatch"] = "*"

    # upload_file has no option for this condition, so it is added to the calls it makes.
    for operation in ("PutObject", "CompleteMultipartUpload"):
        client.meta.events.register(f"before-parameter-build.s3.{operation}", never_overwrite)
    size = path.stat().st_size
    try:
        with tqdm(total=size, unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
            client.upload_file(
                str(path),
                location.bucket,
                location.key + path.name,
                ExtraArgs={"Metadata": {"sha256": sha256}},
                Callback=bar.update,
            )
    except Exception as error:
        cause = error if isinstance(error, ClientError) else error.__context__
        if not isinstance(cause, ClientError):
            raise
        if cause.response["Error"]["Code"] not in (
            "PreconditionFailed",
            "ConditionalRequestConflict",
        ):
            raise
        is_there(account, location, path, sha256)


def show(account: Account, location: Location) -> None:
    result = locations.artifacts(account, location)
    if not result:
        print(f"no *{SUFFIX} at {location}")
        return
    rows = [(a.name, mebibytes(a.size_bytes), f"{a.modified:%Y-%m-%d %H:%M}") for a in result]
    print(table(["model", "size", "changed"], rows))
    print(f"{len(result)} models, {mebibytes(sum(a.size_bytes for a in result))}")


def delete(account: Account, location: Location, options: Upload) -> None:
    """Delete models; instances that have loaded one keep it until they unload it."""
    there = {artifact.name: artifact for artifact in locations.artifacts(account, location)}
    names = options.delete
    if unknown := [name for name in names if name not in there]:
        raise Problem(f"no {unknown[0]} at {location}: --list shows what is there")
    for name in names:
        print(f"  delete {location}{name} ({mebibytes(there[name].size_bytes)})")
    if options.dry_run:
        return
    if not confirm(options, f"Delete {len(names)} of {len(there)} models?"):
        raise Problem("nothing deleted")
    for name in names:
        account.client("s3").delete_object(Bucket=location.bucket, Key=location.key + name)
