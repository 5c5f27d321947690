"""Bodies that a client has compressed (`Content-Encoding`), within the bound of plain ones."""

from __future__ import annotations

import zlib

from serving.errors import BadRequest, BodyTooLarge, UnsupportedEncoding

GZIP, ZLIB, RAW = 31, 15, -15  # zlib's wbits


class Decoder:
    """Takes a body in pieces. No more than `limit` bytes and the last piece are ever kept."""

    def __init__(self, encoding: str, limit: int) -> None:
        """Raises `UnsupportedEncoding`."""
        self._encoding, self._limit = encoding.strip().lower(), limit
        if self._encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise UnsupportedEncoding(
                f"Content-Encoding is {encoding:.100}, can be gzip, deflate or none"
            )
        self._body = bytearray()
        self._inflate: zlib._Decompress | None = None
        self._is_plain = self._encoding in ("", "identity")

    def feed(self, piece: bytes) -> int:
        """Adds a piece of the compressed body; returns by how many bytes the body has grown.

        Raises `BodyTooLarge`, and `BadRequest` where it is not compressed in this format.
        """
        before = len(self._body)
        if self._is_plain:
            self._body += piece
        while piece and not self._is_plain:
            if self._inflate is None:
                self._inflate = zlib.decompressobj(self._window(piece))
            most = self._limit - len(self._body) + 1
            try:
                self._body += self._inflate.decompress(piece, most)
            except zlib.error as error:
                raise BadRequest(f"the body is not {self._encoding}: {error}") from None
            if self._inflate.unconsumed_tail:
                break
            piece = self._inflate.unused_data
            if self._inflate.eof:  # gzip knows several members, one behind the other
                if piece and self._encoding == "deflate":
                    raise BadRequest("the body goes on behind its deflate stream")
                if piece:
                    self._inflate = None
        if len(self._body) > self._limit:
            raise BodyTooLarge(f"the body has more than {self._limit} bytes")
        return len(self._body) - before

    def _window(self, piece: bytes) -> int:
        if self._encoding != "deflate":
            return GZIP
        # Meant is zlib's format (RFC 9110, 8.4.1.2), but many send the bare stream.
        return ZLIB if piece[0] & 0x0F == 8 else RAW

    def finish(self) -> bytes:
        """The whole body. Raises `BadRequest` if it ends too early."""
        if self._inflate is not None and not self._inflate.eof:
            raise BadRequest(f"the {self._encoding} body ends in its middle")
        return bytes(self._body)
