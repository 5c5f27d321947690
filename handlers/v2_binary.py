"""Binary tensors of the Open Inference Protocol: they stand behind the JSON, in order.

The content type says where the JSON ends, as it does on SageMaker; the protocol's own header for
that is the gateway's to translate. Needs no numpy, which workers of text models do not have.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from common.errors import InvalidRequest

BINARY = "application/vnd.sagemaker-triton.binary+json"
HEADER_SIZE = "json-header-size"


def split(body: bytes, header_size: str) -> tuple[bytes, bytes]:
    """The JSON and what stands behind it. Raises `InvalidRequest`."""
    if not header_size.isdecimal() or int(header_size) > len(body):
        raise InvalidRequest(
            f"the length of the JSON is {header_size[:50]!r}, must be a number of bytes up to"
            f" {len(body)}, the body's"
        )
    return body[: int(header_size)], body[int(header_size) :]


def joined(header: bytes, pieces: Sequence[bytes]) -> tuple[bytes, str]:
    """The body and its content type."""
    return b"".join([header, *pieces]), f"{BINARY};{HEADER_SIZE}={len(header)}"


def pack_texts(texts: Sequence[str]) -> bytes:
    """Each text with its length in bytes in front, as a little endian uint32."""
    encoded = [text.encode("utf-8") for text in texts]
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)


def unpack_texts(data: bytes, name: str) -> list[str]:
    """Raises `InvalidRequest`."""
    texts, at = [], 0
    try:
        while at < len(data):
            (size,) = struct.unpack_from("<I", data, at)
            at += 4 + size
            if at > len(data):
                raise InvalidRequest(f"the last text of {name} is cut short")
            texts.append(data[at - size : at].decode("utf-8"))
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{name} does not hold texts in UTF-8: {error}") from None
    return texts
