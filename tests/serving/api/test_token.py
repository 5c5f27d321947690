"""How a token is compared. A clock would show the machine's noise: what is compared is seen."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from starlette.requests import Request

from serving.api.shared import check_token
from serving.errors import Unauthorized


@pytest.mark.parametrize("sent", ["비밀", "비밀-", "가", "비", "", "a" * 100_000])
def test_a_token_is_compared_whole_whatever_was_sent(
    sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, compared = secrets.compare_digest, []

    def noted(ours: Any, theirs: Any) -> bool:
        compared.append((bytes(ours), bytes(theirs)))
        return compare(ours, theirs)

    monkeypatch.setattr(secrets, "compare_digest", noted)
    header = (b"authorization", b"Bearer " + sent.encode())
    request = Request({"type": "http", "headers": [header]})
    known = ("비밀", "other")
    if sent == known[0]:
        check_token(request, *known)
    else:
        with pytest.raises(Unauthorized):
            check_token(request, *known)
    tried = known[:1] if sent == known[0] else known
    assert compared == [(sent.encode(), token.encode()) for token in tried]
