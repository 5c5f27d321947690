"""Times fetching a model's archive from S3 and unpacking it, by this server and by other tools.

The other tools are `aws s3 cp`, or boto3 without it, and `tar`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.run import in_turns
from testbed.s3 import ACCESS, S3, client

BUCKET, KEY = "benchmark", "model.tar.gz"


def measure(archive: Path, tries: int, workdir: Path, log: Path) -> dict[str, Any]:
    """Measure the seconds of each way, in turns. Needs moto (requirements/test.txt)."""

    def timed(way: Callable[[Path], dict[str, float]]) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=workdir, prefix=".fetched-") as folder:
            return way(Path(folder))

    with S3(log) as server, mock.patch.dict(os.environ, ACCESS, AWS_ENDPOINT_URL_S3=server.url):
        s3 = client(server.url)
        s3.create_bucket(Bucket=BUCKET)
        s3.upload_file(str(archive), BUCKET, KEY)
        ways = {"ours": partial(timed, _ours), "theirs": partial(timed, _theirs)}
        measured = in_turns(ways, tries)
    their_way = "aws s3 cp" if shutil.which("aws") else "boto3's download_file"
    return {"bytes": archive.stat().st_size, "their_way": their_way, **measured}


def _ours(folder: Path) -> dict[str, float]:
    """Fetch as the gateway does, which unpacks while it downloads."""
    from serving.store import Cache, Sources, open_store

    began = time.perf_counter()
    store = open_store(f"s3://{BUCKET}/")
    cache = Cache(Sources(store), folder, 0, 4 << 30)
    fetched = cache.acquire(store.find(KEY.removesuffix(".tar.gz")))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "download_s": fetched.download_s, "unpack_s": fetched.unpack_s}


def _theirs(folder: Path) -> dict[str, float]:
    """Download, then unpack, as a script would."""
    file, url = folder / KEY, os.environ["AWS_ENDPOINT_URL_S3"]
    began = time.perf_counter()
    if shutil.which("aws"):
        command = ["aws", "s3", "cp", "--quiet", f"s3://{BUCKET}/{KEY}", str(file)]
        subprocess.run([*command, "--endpoint-url", url], check=True)
    else:
        client(url).download_file(BUCKET, KEY, str(file))
    downloaded = time.perf_counter() - began
    subprocess.run(["tar", "-xzf", str(file), "-C", str(folder)], check=True)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "download_s": downloaded, "unpack_s": seconds - downloaded}
