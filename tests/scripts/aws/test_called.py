"""kogpt2 deploy ends with a call of a model; here the endpoint is a server on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.deploy import PROMPT, TOKENS
from tests.e2e.server import Server
from tests.e2e.stores import packed, small, text
from tests.platform.endpoint import Endpoint
from tests.platform.runtime import runtime
from tests.scripts.aws.cloud import BUCKET, MODELS, Cloud
from tests.scripts.conftest import platform_of

pytestmark = pytest.mark.slow

BASIC = ("poems", "--models", MODELS, "--instance-type", "ml.m5.large", "--yes")


@pytest.fixture
def account(aws: Cloud, tmp_path: Path) -> Cloud:
    """One with a text model, and larger and smaller ones that cannot be called like that."""
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
