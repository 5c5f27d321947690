"""Answers of servers, as the client's commands read them. The first byte of an input says how it
comes: whole, as server-sent events or as a JSON object a line."""

from __future__ import annotations

from scripts.client.answers import EVENTS, LINES, read
from scripts.client.errors import CallFailed
from scripts.client.targets import Answer
from serving.errors import BadRequest

KINDS = ("application/json", EVENTS, LINES[0])
PIECE_BYTES = 7  # letters are cut in half


def answers(data: bytes) -> None:
    kind, body = KINDS[sum(data[:1]) % len(KINDS)], data[1:]
    cut = (body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES))
    try:
        completion = read(Answer(kind, cut))
    except CallFailed as error:
        raise BadRequest(str(error)) from None
    for text in (completion.text, *completion.others.values()):
        text.encode("utf-8")
