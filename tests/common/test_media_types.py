from __future__ import annotations

import pytest

from common.errors import NotAcceptable
from common.media_types import JSON, accepted

CSV, NPY = "text/csv", "application/x-npy"
OFFERED = (JSON, CSV, NPY)


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        (None, JSON),
        ("", JSON),
        ("*/*", JSON),
        ("text/csv", CSV),
        ("text/*;q=0.5", CSV),
        ("application/x-npy, application/json", JSON),
        ("application/json;q=0.5, application/x-npy", NPY),
        ("*/*;q=0.1, text/csv", CSV),
        ("application/json;q=0, */*", CSV),
        ("text/csv;q=많이", CSV),
        ("Application/X-NPY", NPY),
    ],
)
def test_accept_chooses_the_media_type(accept: str | None, media_type: str) -> None:
    assert accepted(accept, OFFERED) == media_type


@pytest.mark.parametrize("accept", ["image/png", "text/csv;q=0", "한글"])
def test_an_accept_without_an_offered_type_is_406(accept: str) -> None:
    with pytest.raises(NotAcceptable, match=f"Accept is {accept}, can be application/json"):
        accepted(accept, OFFERED)
