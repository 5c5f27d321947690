"""docs/deploy/sagemaker.md's local mode: SageMaker's SDK 2.x starts the image by docker compose."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from testbed import s3
from tests.container.compose import compose_program
from tests.container.containers import Container, docker, mount, program
from tests.e2e.server import REPOSITORY, free_port
from tests.e2e.test_bring_your_own_handlers import GUIDE

pytestmark = pytest.mark.container

# An interpreter with requirements/sagemaker-local.txt.
PYTHON = os.environ.get("SAGEMAKER_LOCAL_PYTHON", "")
BUCKET = "models"
PAGE = REPOSITORY / "docs" / "deploy" / "sagemaker.md"


@pytest.fixture
def root_image(image: str) -> Iterator[str]:
    """The image that starts as root, as the page makes it."""
    (line,) = (line for line in PAGE.read_text("utf-8").splitlines() if "USER 0" in line)
    name = f"kogpt2-serving:{secrets.token_hex(4)}"
    command = line.replace("kogpt2-serving:cpu", image).replace("kogpt2-serving:root", name)
    done = program("bash", "-c", command, timeout_s=60)
    assert done.returncode == 0, done.stdout
    yield name
    for left in docker("ps", "-aq", "--filter", f"ancestor={name}").split():  # the SDK's
        docker("rm", "-f", "-v", left)
    docker("rmi", name)


@pytest.mark.skipif(not PYTHON, reason="SAGEMAKER_LOCAL_PYTHON names none with the SDK 2.x")
def test_sagemakers_sdk_serves_a_model_and_a_guides_script_on_this_machine(
    root_image: str, tmp_path: Path
) -> None:
    compose_program()
    (tmp_path / "gpt2-inference.py").write_text(GUIDE, encoding="utf-8")
    with s3.S3(tmp_path / "s3.log") as store:
        client = s3.client(store.url)
        client.create_bucket(Bucket=BUCKET)
        archive = REPOSITORY / "model_store" / "sowol.tar.gz"
        client.upload_file(str(archive), BUCKET, "fine-tunes/sowol.tar.gz")
        script = str(Path(__file__).with_name("local_mode.py"))
        arguments = [root_image, BUCKET, str(free_port()), str(tmp_path), "gpt2-inference.py"]
        done = program(
            PYTHON, script, *arguments, timeout_s=400, cwd=tmp_path,
            env={**os.environ, **s3.ACCESS, "AWS_ENDPOINT_URL": store.url},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    plain, guide = json.loads((tmp_path / "answers.json").read_text("utf-8"))
    assert plain[:2] == guide[:2]  # the text and its steps; the third is the time
    assert plain[0].startswith("나는")


def test_a_model_that_is_closed_to_the_images_user_ends_the_container(
    image: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir(0o700)
    with closing(Container(*mount(tmp_path / "model", "/opt/ml/model"))) as container:
        assert docker("wait", container.id).strip() == "1"
        assert "user 10001 cannot read /opt/ml/model: " in docker("logs", container.id)
