"""Reads archives by `https://` from allowed hosts."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from posixpath import basename
from urllib.parse import unquote, urljoin, urlsplit

import requests

from serving.errors import (
    ArtifactChanged,
    ModelNotInStore,
    StoreAccessDenied,
    StoreUnavailable,
    UrlNotAllowed,
)
from serving.names import normal_name
from serving.store.catalog import StoredFile, StoredModel, public_url
from serving.store.stopping import StoppableAdapter

TIMEOUT_S = (3.0, 20.0)  # to connect; between two bytes
MAX_REDIRECTS = 5
CHUNK_BYTES = 32 << 10  # the pace of a slow host is measured in chunks of this size
PORTS = {"https": 443, "http": 80}


class Https:
    """Reads archives from `hosts`, each a `host` or a `host:port`.

    Plain http is allowed for loopback addresses only, redirects within the same origin only.
    """

    paced = True

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self.ranged = True

    def locate(self, url: str) -> StoredModel:
        """Return the model at a url, with the size and version that the host reports for it.

        Raises `UrlNotAllowed`, `ModelNotInStore`, `StoreAccessDenied`, `StoreUnavailable`.
        """
        with self._open(url, "bytes=0-0") as answer:
            size = _size_bytes(answer)
            version = _version(answer, size)
        name = normal_name(basename(unquote(urlsplit(url).path)))
        return StoredModel(name or "model", url, version, size, "archive")

    def files(self, model: StoredModel) -> list[StoredFile]:
        with self._open(model.url, "bytes=0-0") as answer:
            self.ranged = answer.status_code == 206
        return [StoredFile("", model.url, model.size_bytes, model.version)]

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        wanted = f"bytes={start}-{stop - 1}" if self.ranged else None
        with self._open(file.address, wanted) as answer:
            size = _size_bytes(answer)
            ranged = answer.status_code == 206
            if _version(answer, size) != file.version or (start > 0 and not ranged):
                raise ArtifactChanged(f"{public_url(file.address)} has changed; try again")
            try:
                yield from answer.iter_content(CHUNK_BYTES)
            except (requests.RequestException, OSError) as error:
                raise StoreUnavailable(
                    f"{public_url(file.address)} broke off: {_why(error)}"
                ) from None

    @contextlib.contextmanager
    def _open(self, url: str, wanted: str | None) -> Iterator[requests.Response]:
        self._check(url)
        target = url
        for _ in range(MAX_REDIRECTS):
            try:
                # Without compression, ranges and sizes in the response are those of the file.
                headers = {"Accept-Encoding": "identity", **({"Range": wanted} if wanted else {})}
                with requests.Session() as session:
                    for scheme in PORTS:
                        session.mount(f"{scheme}://", StoppableAdapter())
                    answer = session.get(
                        target,
                        headers=headers,
                        stream=True,
                        timeout=TIMEOUT_S,
                        allow_redirects=False,
                    )
            except (requests.RequestException, OSError, UnicodeError) as error:
                raise StoreUnavailable(f"{public_url(url)} cannot be read: {_why(error)}") from None
            with answer:
                if not answer.is_redirect:
                    _raise_for_status(answer.status_code, url)
                    yield answer
                    return
                target = urljoin(target, answer.headers["Location"])
                if _origin(target) != _origin(url):
                    raise UrlNotAllowed(f"{public_url(url)} redirects to {public_url(target)}")
        raise StoreUnavailable(f"{public_url(url)} redirects more than {MAX_REDIRECTS} times")

    def _check(self, url: str) -> None:
        scheme, host, port = _origin(url)
        names = {f"{host}:{port}"} | ({host} if port == PORTS.get(scheme) else set())
        if not names & self._hosts:
            allowed = ", ".join(sorted(self._hosts)) or "none"
            raise UrlNotAllowed(f"{public_url(url)}: allowed hosts (HTTPS_HOSTS) are {allowed}")
        if scheme == "http" and not _is_loopback(host):
            raise UrlNotAllowed(f"{public_url(url)} is not https://")


def _origin(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port. Raises `UrlNotAllowed` for urls that are ambiguous."""
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS[parts.scheme]
    except (ValueError, KeyError):
        raise UrlNotAllowed(f"{public_url(url)!r} is no https:// url") from None
    odd = any(character in url for character in "\\ \t\r\n") or "@" in parts.netloc
    if odd or not parts.hostname or not parts.hostname.isascii():
        raise UrlNotAllowed(f"{public_url(url)!r} is no plain https://host/path url")
    return parts.scheme, parts.hostname, port


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _raise_for_status(status: int, url: str) -> None:
    if status in (200, 206):
        return
    if status in (404, 410):
        raise ModelNotInStore(f"there is nothing at {public_url(url)}")
    if status in (401, 403):
        raise StoreAccessDenied(f"{public_url(url)} answers {status}")
    raise StoreUnavailable(f"{public_url(url)} answers {status}")


def _size_bytes(answer: requests.Response) -> int:
    """Return the size of the whole file, also from a partial response."""
    size = answer.headers.get("Content-Length", "")
    if answer.status_code == 206:
        size = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if not size.isdecimal():
        raise StoreUnavailable(
            f"{public_url(answer.url)} has no size: no Content-Length or Content-Range"
        )
    return int(size)


def _version(answer: requests.Response, size: int) -> str:
    stamp = answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
    return stamp.strip('"') + f"-{size}"


def _why(error: Exception) -> str:
    """Return the type of an error, because its text would contain the url with its query."""
    return type(error).__name__
