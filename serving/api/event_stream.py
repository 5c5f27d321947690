"""The event stream of the AWS protocols, as far as `InvokeEndpointWithResponseStream` needs it.

The format: https://smithy.io/2.0/aws/amazon-eventstream.html
"""

from __future__ import annotations

import struct
from zlib import crc32

EVENT_STREAM = "application/vnd.amazon.eventstream"
STRING = 7  # the type of a header's value
MAX_PAYLOAD_BYTES = 1 << 20  # of one event; botocore refuses more than 24 MiB


def payload_part(payload: bytes | str | memoryview) -> bytes:
    """Encode a payload as `PayloadPart` events: one, or more if it is too long for one."""
    content = payload.encode("utf-8") if isinstance(payload, str) else bytes(payload)
    starts = range(0, max(len(content), 1), MAX_PAYLOAD_BYTES)
    return b"".join(_event(content[start : start + MAX_PAYLOAD_BYTES]) for start in starts)


def _event(content: bytes) -> bytes:
    """Encode one event: lengths, their checksum, headers, payload, checksum of all."""
    headers = b"".join(
        struct.pack("!B", len(name)) + name + struct.pack("!BH", STRING, len(value)) + value
        for name, value in (
            (b":message-type", b"event"),
            (b":event-type", b"PayloadPart"),
            (b":content-type", b"application/octet-stream"),
        )
    )
    total = 12 + len(headers) + len(content) + 4
    prelude = struct.pack("!II", total, len(headers))
    message = prelude + struct.pack("!I", crc32(prelude)) + headers + content
    return message + struct.pack("!I", crc32(message))
