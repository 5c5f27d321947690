"""What every error says without anybody having thought of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import serving.errors  # noqa: F401
from common.errors import EngineUnavailable, ServiceError


def errors(of: type[ServiceError] = ServiceError) -> Iterator[type[ServiceError]]:
    for kind in of.__subclasses__():
        yield kind
        yield from errors(kind)


@pytest.mark.parametrize("kind", [k for k in errors() if k.status == 503], ids=lambda k: k.__name__)
def test_what_passes_by_itself_says_when_to_ask_again(kind: type[ServiceError]) -> None:
    assert kind("저장소가 응답하지 않습니다").retry_after_s >= 1
    assert kind("저장소가 응답하지 않습니다", retry_after_s=7).retry_after_s == 7


def test_one_that_is_told_keeps_to_itself_when_the_next_is() -> None:
    assert EngineUnavailable("a", retry_after_s=7).retry_after_s == 7
    assert EngineUnavailable("b").retry_after_s == 1
