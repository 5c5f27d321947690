"""The examples, and the call at the end of kogpt2 deploy.

moto is the account, a server on this machine the endpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.deploy import PROMPT, TOKENS
from tests.e2e.server import REPOSITORY, Server
from tests.e2e.stores import SHORT, packed, small, text
from tests.platform.endpoint import Endpoint
from tests.platform.runtime import runtime
from tests.scripts.aws.cloud import BUCKET, MODELS, WIDE_S, Cloud
from tests.scripts.conftest import platform_of

pytestmark = pytest.mark.slow

BASIC = ("poems", "--models", MODELS, "--instance-type", "ml.m5.large", "--yes")
ROLE = "arn:aws:iam::123456789012:role/mine"
NOTEBOOK = REPOSITORY / "examples" / "sagemaker.ipynb"
# An interpreter with requirements/sagemaker.txt, which .venv cannot have too.
SDK_PYTHON = os.environ.get("SAGEMAKER_PYTHON", "")
needs_sdk = pytest.mark.skipif(not SDK_PYTHON, reason="SAGEMAKER_PYTHON names none with the SDK")


@pytest.fixture
def account(aws: Cloud, tmp_path: Path) -> Cloud:
    """An account with a text model, and larger and smaller ones that cannot be called like it."""
    aws.put_models(first=10, last=1 << 20)
    aws.put_image()
    archive = packed(small(tmp_path / "model", 0), tmp_path / "sowol.tar.gz")
    for name in ("team/sowol", "소월"):
        aws.client("s3").upload_file(str(archive), BUCKET, f"kogpt2/{name}.tar.gz")
    return aws


def test_a_text_model_is_called_and_its_answer_shown(account: Cloud, served: Server) -> None:
    agent = platform_of(served, account.client("s3"), BUCKET, "kogpt2/")
    with runtime(Endpoint("poems", [agent])) as api:
        url = {"AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": api.url}
        out = account.run("deploy", *BASIC, **url)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS}}
    expected = text(served.post("/invocations", json=body))  # the same weights
    assert f"a call of team/sowol.tar.gz: {PROMPT}\n{expected}\n" in out
    assert "poems is in service" in out


def test_a_call_that_fails_ends_with_the_way_to_the_logs(account: Cloud) -> None:
    with runtime() as api:  # which has no endpoint of that name
        url = {"AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": api.url}
        said = account.run("deploy", *BASIC, code=1, **url)
    begin = "poems is in service, but a call failed: ValidationError: Endpoint poems"
    assert said.startswith(begin)
    assert said.endswith("Its logs: kogpt2 logs poems --since 15m --region us-east-1")
    assert account.stack("poems").status == "CREATE_COMPLETE"


def test_without_a_text_model_none_is_called(aws: Cloud) -> None:
    aws.put_models(first=10)
    aws.put_image()
    assert "no model was called" in aws.run("deploy", *BASIC)


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
