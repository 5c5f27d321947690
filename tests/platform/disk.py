"""An instance's storage volume: archives of models, fetched from S3 and unpacked."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from tests.platform.limits import validation_error


class Disk:
    """`folder` has `<hash>/model/`. `downloads` counts the fetches.

    With `closed` what is unpacked is for root only, else for every user.
    """

    def __init__(
        self, folder: Path, s3: Any, bucket: str, prefix: str, *, closed: bool = False
    ) -> None:
        self.folder, self._closed = folder, closed
        self.downloads = 0
        self._s3, self._bucket, self._prefix = s3, bucket, prefix
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        return (self.folder / name / "model").is_dir()

    def fetch(self, target: str, name: str) -> None:
        """Downloads and unpacks an archive. Raises the platform's error if there is none."""
        key = self._prefix + target.lstrip("/")
        try:
            data = self._s3.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        except ClientError as error:
            raise validation_error(
                f"Failed to download model data(bucket: {self._bucket}, key: {key})."
                " Please ensure that there is an object located at the URL and that the role"
                " passed to CreateModel has permissions to download the model."
            ) from error
        fresh = self.folder / f".{name}" / "model"
        fresh.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(fresh, filter="data")
        modes = (0o700, 0o600) if self._closed else (0o755, 0o644)  # of folders, of files
        for path in (fresh.parent, *fresh.parent.rglob("*")):
            path.chmod(modes[path.is_file()])
        os.replace(fresh.parent, self.folder / name)
        self.downloads += 1
