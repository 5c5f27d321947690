"""Where a request ends is read in one way only: what a proxy in front could read otherwise is
refused, and with it all that follows on the connection.

The cases are those that are published of request smuggling (RFC 9112, 11.2), one a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.serving.api.test_http_protocol import LAST, Served, told

HOST = b"Host: a\r\n"
HIDDEN = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 8\r\n\r\nSMUGGLED"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(linger_s=0.2) as running:
        yield running


def post(headers: bytes, body: bytes, version: bytes = b"1.1") -> bytes:
    return b"POST /echo HTTP/%s\r\n%s%s\r\n%s" % (version, HOST, headers, body)


CHUNKED = b"Transfer-Encoding: chunked\r\n"
NO_CHUNKS = b"0\r\n\r\n"
AMBIGUOUS = {
    "both-lengths": post(b"Content-Length: 5\r\n" + CHUNKED, NO_CHUNKS + HIDDEN),
    "both-lengths-turned": post(CHUNKED + b"Content-Length: 5\r\n", NO_CHUNKS + HIDDEN),
    "two-lengths": post(b"Content-Length: 0\r\nContent-Length: 99\r\n", HIDDEN),
    "the-same-length-twice": post(b"Content-Length: 0\r\nContent-Length: 0\r\n", HIDDEN),
    "a-list-of-lengths": post(b"Content-Length: 0, 99\r\n", HIDDEN),
    "plus": post(b"Content-Length: +99\r\n", HIDDEN),
    "minus": post(b"Content-Length: -1\r\n", HIDDEN),
    "hexadecimal": post(b"Content-Length: 0x10\r\n", HIDDEN),
    "space-in-length": post(b"Content-Length: 9 9\r\n", HIDDEN),
    "length-beyond-64-bits": post(b"Content-Length: 18446744073709551616\r\n", HIDDEN),
    "length-beyond-python": post(b"Content-Length: " + b"9" * 5000 + b"\r\n", HIDDEN),
    "no-length-in-length": post(b"Content-Length: \r\n", HIDDEN),
    "space-before-colon": post(b"Content-Length : 99\r\n", HIDDEN),
    "space-before-colon-chunked": post(b"Transfer-Encoding : chunked\r\n", NO_CHUNKS + HIDDEN),
    "underscore": post(b"Content_Length: 99\r\nContent-Length: +1\r\n", HIDDEN),
    "folded": post(b"X-A: b\r\n Content-Length: 99\r\n", HIDDEN),
    "folded-coding": post(b"Transfer-Encoding:\r\n chunked\r\n", NO_CHUNKS + HIDDEN),
    "folded-first": b"POST /echo HTTP/1.1\r\n Host: a\r\n\r\n" + HIDDEN,
    "bare-lf": b"POST /echo HTTP/1.1\nHost: a\nContent-Length: 99\n\n" + HIDDEN,
    "bare-cr": post(b"X-A: b\rContent-Length: 99\r\n", HIDDEN),
    "nul": post(b"X-A: b\0\r\n", HIDDEN),
    "two-codings": post(CHUNKED + b"Transfer-Encoding: identity\r\n", NO_CHUNKS + HIDDEN),
    "chunked-not-last": post(b"Transfer-Encoding: chunked, identity\r\n", NO_CHUNKS + HIDDEN),
    "another-coding-before": post(b"Transfer-Encoding: gzip\r\n" + CHUNKED, NO_CHUNKS + HIDDEN),
    "chunked-twice": post(CHUNKED + CHUNKED, NO_CHUNKS + HIDDEN),
    "another-coding-too": post(b"Transfer-Encoding: gzip, chunked\r\n", NO_CHUNKS + HIDDEN),
    "another-coding": post(b"Transfer-Encoding: xchunked\r\n", NO_CHUNKS + HIDDEN),
    "coding-and-more": post(b"Transfer-Encoding: chunked-x\r\n", NO_CHUNKS + HIDDEN),
    "coding-in-quotes": post(b'Transfer-Encoding: "chunked"\r\n', NO_CHUNKS + HIDDEN),
    "vertical-tab": post(b"Transfer-Encoding: \x0bchunked\r\n", NO_CHUNKS + HIDDEN),
    "identity": post(b"Transfer-Encoding: identity\r\n", HIDDEN),
    "chunked-in-http-1.0": post(CHUNKED, NO_CHUNKS + HIDDEN, b"1.0"),
    "two-hosts": post(b"Host: b\r\nContent-Length: 0\r\n", HIDDEN),
    "chunk-with-bare-lf": post(CHUNKED, b"2\nab\n0\n\n" + HIDDEN),
    "extension-with-bare-lf": post(CHUNKED, b"2;a\nab\r\n0\r\n\r\n" + HIDDEN),
    "chunk-too-long": post(CHUNKED, b"2\r\nabXX\r\n0\r\n\r\n" + HIDDEN),
    "chunk-too-short": post(CHUNKED, b"9\r\nab\r\n0\r\n\r\n" + HIDDEN),
    "chunk-with-0x": post(CHUNKED, b"0x2\r\nab\r\n0\r\n\r\n" + HIDDEN),
    "chunk-with-minus": post(CHUNKED, b"-2\r\nab\r\n0\r\n\r\n" + HIDDEN),
    "chunk-with-space": post(CHUNKED, b"2 \r\nab\r\n0\r\n\r\n" + HIDDEN),
    "chunk-beyond-64-bits": post(CHUNKED, b"1" + b"0" * 16 + b"\r\nab\r\n0\r\n\r\n" + HIDDEN),
    "length-in-trailer": post(CHUNKED, b"0\r\nContent-Length: 99\r\n\r\n" + HIDDEN),
    "coding-in-trailer": post(CHUNKED, b"0\r\nTransfer-Encoding: chunked\r\n\r\n" + HIDDEN),
    "no-colon": post(b"abc\r\n", HIDDEN),
    "no-name": post(b": b\r\n", HIDDEN),
    "space-in-name": post(b"X A: b\r\n", HIDDEN),
    "http-1.2": post(b"Content-Length: 0\r\n", HIDDEN, b"1.2"),
    "no-version": b"POST /echo\r\n" + HOST + b"\r\n" + HIDDEN,
    "tabs": b"POST\t/echo\tHTTP/1.1\r\n" + HOST + b"\r\n" + HIDDEN,
    "a-method-that-is-none": "가 /echo HTTP/1.1\r\n".encode() + HOST + b"\r\n" + HIDDEN,
    "http-2.0": post(b"Content-Length: 0\r\n", HIDDEN, b"2.0"),
    "path-not-encoded": post(b"Content-Length: 0\r\n", HIDDEN).replace(
        b"/echo", b"/\xec\x8b\x9c", 1
    ),
    "connect": b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\n" + HIDDEN,
    "only-a-method": b"GET\r\n\r\n",
    "http-2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01",
}
OFFER = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_what_ends_in_two_ways_is_refused_with_all_behind_it(served: Served, case: str) -> None:
    for offer in (b"", OFFER):
        answer = served.ask(AMBIGUOUS[case].replace(HOST, HOST + offer, 1) + LAST)
        # The body of a request that is wrong further back may have been answered by then.
        assert b"SMUGGLED" not in answer
        assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1
        assert told(answer) == (400, "BadRequestException")


CLEAR = {
    "tab": post(b"Transfer-Encoding:\tchunked\r\n", NO_CHUNKS),
    "upper-case": post(b"TRANSFER-ENCODING: Chunked\r\n", NO_CHUNKS),
    "extension": post(CHUNKED, b'2;a="b"\r\nab\r\n0;c\r\n\r\n'),
    "many-chunks": post(CHUNKED, b"1;x\r\n0\r\n" * 1000 + NO_CHUNKS),
    "leading-zeros": post(CHUNKED, b"0002\r\nab\r\n000\r\n\r\n"),
    "empty-lines-before": b"\r\n\r\n" + post(b"Content-Length: 2\r\n", b"ab"),
    "a-body-like-a-request": post(b"Content-Length: %d\r\n" % len(LAST), LAST),
    "get-with-body": post(b"Content-Length: 2\r\n", b"ab").replace(b"POST", b"GET", 1),
    "absolute": post(b"Content-Length: 2\r\n", b"ab").replace(b"/echo", b"http://b/echo", 1),
}


@pytest.mark.parametrize("case", CLEAR)
def test_what_ends_in_one_way_is_answered_and_so_is_the_next(served: Served, case: str) -> None:
    answer = served.ask(CLEAR[case] + LAST)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
