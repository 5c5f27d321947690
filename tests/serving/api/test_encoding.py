from __future__ import annotations

import gzip
import zlib

import pytest

from serving.api.encoding import Decoder
from serving.errors import BadRequest, BodyTooLarge, UnsupportedEncoding

TEXT = "나 보기가 역겨워 가실 때에는 ".encode() * 100
RAW = zlib.compressobj(wbits=-15)
BODIES = {
    "gzip": gzip.compress(TEXT),
    "x-gzip": gzip.compress(TEXT[:50]) + gzip.compress(TEXT[50:]),
    "GZIP ": gzip.compress(TEXT),
    "deflate": zlib.compress(TEXT),
    "Deflate": RAW.compress(TEXT) + RAW.flush(),
    "identity": TEXT,
    "": TEXT,
}


def decode(encoding: str, body: bytes, size: int = 100_000, limit: int = 100_000) -> bytes:
    decoder = Decoder(encoding, limit)
    for at in range(0, len(body), size):
        decoder.feed(body[at : at + size])
    return decoder.finish()


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("encoding", BODIES)
def test_what_was_compressed_comes_out(encoding: str, size: int) -> None:
    assert decode(encoding, BODIES[encoding], size) == TEXT


@pytest.mark.parametrize("encoding", BODIES)
def test_the_limit_is_that_of_the_text(encoding: str) -> None:
    assert decode(encoding, BODIES[encoding], limit=len(TEXT)) == TEXT
    with pytest.raises(BodyTooLarge):
        decode(encoding, BODIES[encoding], limit=len(TEXT) - 1)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_not_unpacked(encoding: str) -> None:
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    assert len(bomb) < 300_000
    decoder = Decoder(encoding, 100_000)
    with pytest.raises(BodyTooLarge):
        decoder.feed(bomb)
    assert len(decoder._body) == 100_001


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "가"])
def test_other_encodings_are_told_which_there_are(encoding: str) -> None:
    with pytest.raises(UnsupportedEncoding, match="can be gzip, deflate or none"):
        Decoder(encoding, 100)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_what_is_not_compressed_so_is_a_bad_request(encoding: str) -> None:
    for body in (b"nonsense", BODIES[encoding][:-1], BODIES[encoding] + b"more"):
        with pytest.raises(BadRequest):
            decode(encoding, body)
    assert decode(encoding, b"") == b""
