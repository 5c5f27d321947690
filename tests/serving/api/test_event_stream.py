"""AWS's event stream, read as boto3 reads it."""

from __future__ import annotations

from botocore.eventstream import EventStreamBuffer
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.api.event_stream import payload_part

PAYLOADS = st.lists(
    st.one_of(st.binary(max_size=300), st.text(max_size=60), st.just("나 보기가")), max_size=6
)


@settings(max_examples=20)
@given(PAYLOADS, st.integers(5, 500))
def test_botocore_reads_each_part_however_the_bytes_are_cut(
    payloads: list[bytes | str], size: int
) -> None:
    said = b"".join(map(payload_part, payloads))
    buffer, parts = EventStreamBuffer(), []
    for start in range(0, len(said), size):
        buffer.add_data(said[start : start + size])
        parts += [event.to_response_dict() for event in buffer]
    assert [part["body"] for part in parts] == [
        payload.encode() if isinstance(payload, str) else payload for payload in payloads
    ]
    assert all(part["headers"][":event-type"] == "PayloadPart" for part in parts)
    assert all(part["status_code"] == 200 for part in parts)


def test_botocore_reads_an_answer_that_is_longer_than_one_event_may_be() -> None:
    payload = "나 보기가".encode() * (2 << 20)  # 26 MiB
    buffer = EventStreamBuffer()
    buffer.add_data(payload_part(payload))
    assert b"".join(event.payload for event in buffer) == payload
