"""The examples as they stand: moto is the account, a server on this machine the endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import REPOSITORY, Server
from tests.e2e.stores import SHORT, small, text
from tests.platform.endpoint import Endpoint
from tests.platform.runtime import runtime
from tests.scripts.aws.cloud import BUCKET, WIDE_S, Cloud
from tests.scripts.conftest import platform_of

pytestmark = pytest.mark.slow

ROLE = "arn:aws:iam::123456789012:role/mine"
NOTEBOOK = REPOSITORY / "examples" / "sagemaker.ipynb"
# An interpreter with requirements/sagemaker.txt, which .venv cannot have too.
SDK_PYTHON = os.environ.get("SAGEMAKER_PYTHON", "")
needs_sdk = pytest.mark.skipif(not SDK_PYTHON, reason="SAGEMAKER_PYTHON names none with the SDK")


def cells() -> str:
    found = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return "\n".join("".join(one["source"]) for one in found if one["cell_type"] == "code")


@pytest.mark.parametrize(
    ("name", "python"),
    [
        ("sagemaker_boto3.py", sys.executable),
        ("sagemaker.ipynb", sys.executable),
        pytest.param("sagemaker_sdk.py", SDK_PYTHON, marks=needs_sdk),
    ],
)
def test_an_example_serves_a_fine_tune_and_leaves_no_endpoint(
    aws: Cloud, served: Server, tmp_path: Path, name: str, python: str
) -> None:
    aws.put_models()
    image = aws.put_image()
    folder = small(tmp_path / "model", 0)
    (tmp_path / "deploy").symlink_to(REPOSITORY / "deploy")
    if name.endswith(".py"):
        command = [str(REPOSITORY / "examples" / name), str(folder), BUCKET, image, ROLE]
    else:
        command = ["-c", cells()]
    agent = platform_of(served, aws.client("s3"), BUCKET, "fine-tunes/")
    with runtime(Endpoint("poems", [agent])) as api:
        given = {"FOLDER": str(folder), "BUCKET": BUCKET, "IMAGE": image}
        place = {"AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": api.url}
        done = subprocess.run(
            [python, *command],
            cwd=tmp_path,
            env={**aws.environment, **given, **place},
            capture_output=True,
            text=True,
            timeout=2 * WIDE_S,  # the SDK is large, and compiled when it is first imported
        )
    assert done.returncode == 0, done.stderr
    wanted = {**SHORT, "inputs": "나 보기가 역겨워"}
    assert done.stdout.strip() == text(served.predict("m0", wanted)).strip()
    assert aws.client("sagemaker").list_endpoints()["Endpoints"] == []
