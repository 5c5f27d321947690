"""Refuse requests that a browser sends for a page of another site.

A page may have its visitor's browser send any GET, and a POST of text or of a form, to each server
that the visitor reaches. With a name of its own that resolves to this server (DNS rebinding) it may
read the answers, too: the `Host` header has that name.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from serving.api.request import Request
from serving.errors import Forbidden

READS = ("GET", "HEAD", "OPTIONS")
LOADING_READS = ("/predictions/", "/v2/models/")
# Browsers send Sec-Fetch-Site by https and to localhost only, and no Origin with a plain GET. But
# the User-Agent of all browsers begins so, and pages cannot change it.
BROWSER = "Mozilla/"


def check_host(request: Request, allowed: tuple[str, ...]) -> None:
    """Raise `Forbidden` for a host name that is none of `allowed` (`*.example.com`, `*` for any).
    Addresses and localhost are always allowed: they cannot be rebound."""
    host = request.headers.get("host", "")
    if host and "*" not in allowed and not _is_allowed(host, allowed):
        raise Forbidden(f"Host is {host[:200]}, which is none of ALLOWED_HOSTS")


@functools.lru_cache(maxsize=1024)
def _is_allowed(host: str, allowed: tuple[str, ...]) -> bool:
    with contextlib.suppress(ValueError):
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        if any(fnmatchcase(name, pattern) for pattern in ("localhost", "*.localhost", *allowed)):
            return True
        ipaddress.ip_address(name)
        return True
    return False


def check_site(request: Request) -> None:
    """Raise `Forbidden` for a request of another site's page that would have an effect."""
    path, headers = request.scope["path"], request.headers
    is_read = request.method in READS
    if is_read and (
        request.method == "OPTIONS"
        or not path.startswith(LOADING_READS)
        or path.endswith(("/ready", "/stats"))
    ):
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        foreign = site not in ("same-origin", "none")
    elif origin is not None:
        foreign = origin.partition("://")[2] != headers.get("host", "")
    else:
        foreign = is_read and headers.get("user-agent", "").startswith(BROWSER)
    if foreign:
        raise Forbidden(
            "pages of other sites cannot call, load or change models: call from a program, or"
            " from the server's own page"
        )
