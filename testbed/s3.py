"""An S3 server (moto) in a process of its own, and boto3's clients of servers on loopback."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from testbed.process import Program, fetch, free_port

# Any credentials will do: the server on loopback checks none.
ACCESS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3(Program):
    """A moto server as a child process. Needs moto (requirements/test.txt)."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "moto.server", "-H127.0.0.1", f"-p{self.port}"]
        super().__init__(command, log)
        self._wait(lambda: fetch(self.url, 5))


def client(
    url: str, service: str = "s3", region: str = ACCESS["AWS_REGION"], **options: Any
) -> Any:
    """Return a boto3 client of the server, or of a proxy in front of it, at `url`."""
    import boto3

    return boto3.client(
        service,
        endpoint_url=url,
        region_name=region,
        aws_access_key_id=ACCESS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=ACCESS["AWS_SECRET_ACCESS_KEY"],
        **options,
    )
