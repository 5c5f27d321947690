from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.aws.account import Account, Aws
from tests.scripts.aws.cloud import Cloud, cloud


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with cloud(tmp_path_factory.mktemp("aws")) as made:
        yield made


@pytest.fixture
def aws(server: Cloud) -> Cloud:
    """An empty account."""
    server.reset()
    return server


@pytest.fixture
def account(aws: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    """The account as commands have it."""
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    account = Account(Aws())
    yield account
    account.client("s3").close()
