"""What a browser sends for a page of another site has no effect."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from serving.api import routes
from serving.api.sites import READS
from tests.serving.api.gateways import World

# Reads that load a model, and every route that is no read.
CALLS = [
    ("GET", "/predictions/봄"),
    ("HEAD", "/predictions/봄"),
    ("GET", "/v2/models/봄"),
    ("GET", "/v2/models/봄/versions/1/config"),
    *(
        (method, re.sub("{[^}]+}", "봄", route.path))
        for route in routes.REQUESTS
        for method in route.methods.split()
        if method not in (*READS, "*")
    ),
]
HOST = {"host": "localhost:8080"}
LOOPBACK = {"host": "127.0.0.1"}
FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:9000"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://localhost:9000"},
]
# For an image: by plain http a browser names neither the site nor the origin, and the page may hide
# the referrer.
IMAGE = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64)", "accept": "image/avif,image/webp"}
OWN = [
    {},
    {"user-agent": "curl/8.5.0"},
    {"origin": "http://localhost:8080"},
    {
        "sec-fetch-site": "same-origin",
        "origin": "https://public.example",
        "user-agent": "Mozilla/5",
    },
    {"sec-fetch-site": "none", "user-agent": "Mozilla/5.0"},
]


def status(world: World, method: str, path: str, headers: dict[str, str]) -> int:
    code, _, body = asyncio.run(world.call(method, path, **{**HOST, **headers}))
    if code == 403 and method != "HEAD":
        told = json.loads(body)
        said = told.get("message") or told["error"]
        assert "other sites" in str(said), told
        shape = {"/v1": dict, "/v2": str}.get(path[:3])
        assert shape is None or isinstance(told["error"], shape), told
    return code


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_a_page_of_another_site_has_no_effect(method: str, path: str) -> None:
    world = World()
    for headers in [*FOREIGN, *([IMAGE] if method in READS else [])]:
        assert status(world, method, path, headers) == 403, headers
    assert not world.mms.told_s
    for headers in OWN:
        assert status(world, method, path, headers) != 403, headers


def test_no_route_with_an_effect_is_left_out() -> None:
    assert len(CALLS) > 20
    assert {("DELETE", "/models/봄"), ("POST", "/v2/models/봄/infer")} <= {*CALLS}


def test_a_page_of_another_site_may_link_here() -> None:
    world = World()
    for path in ("/ping", "/docs", "/", "/models", "/v1/models/봄", "/v2/models/봄/ready"):
        headers = {"sec-fetch-site": "cross-site", "accept": "text/html"}
        assert status(world, "GET", path, headers) == 200, path


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        (LOOPBACK, ["", "localhost", "a.localhost:1", "127.0.0.1:8080"], ["evil.example"]),
        (LOOPBACK, ["[::1]:8080", "192.168.0.7", "LOCALHOST."], ["127.0.0.1.evil", "["]),
        ({**LOOPBACK, "allowed_hosts": "*"}, ["evil.example"], []),
        ({}, ["evil.example", "kogpt2:8080"], []),
        ({"allowed_hosts": "api.example"}, ["localhost:8080", "10.0.0.9"], ["x.api.example"]),
        ({"allowed_hosts": "a.b, *.example"}, ["API.example:80", "a.b"], ["example", "c.a.b"]),
    ],
)  # fmt: skip
def test_a_name_that_is_rebound_to_this_server_reaches_nothing(
    settings: dict[str, str], allowed: list[str], refused: list[str]
) -> None:
    world = World(**settings)
    for method, path in (("GET", "/ping"), ("GET", "/models"), ("DELETE", "/models/없다")):
        for host in (*allowed, *refused):
            headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
            code, _, body = asyncio.run(world.call(method, path, **headers))
            assert (code == 403) == (host in refused), (host, code)
            assert (b"ALLOWED_HOSTS" in body) == (host in refused)
