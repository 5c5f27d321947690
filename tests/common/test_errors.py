"""Errors that pass by themselves say when to try again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import serving.errors  # noqa: F401
from common.errors import ServiceError


def errors(of: type[ServiceError] = ServiceError) -> Iterator[type[ServiceError]]:
    for kind in of.__subclasses__():
        yield kind
        yield from errors(kind)


@pytest.mark.parametrize("kind", [k for k in errors() if k.status == 503], ids=lambda k: k.__name__)
def test_a_503_has_a_time_to_try_again_of_its_own(kind: type[ServiceError]) -> None:
    default = kind("저장소가 응답하지 않습니다").retry_after_s
    assert default >= 1
    assert kind("저장소가 응답하지 않습니다", retry_after_s=7).retry_after_s == 7
    assert kind("다음").retry_after_s == default
