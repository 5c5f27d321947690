"""The routes of SageMaker's multi-model contract and of Multi Model Server, to the letter."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import re
import subprocess
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import requests

from engine.http.client import UnixConnection
from serving.mms.launcher import HEALTH
from tests.chaos.system import names as listed
from tests.e2e.server import Server, eventually
from tests.e2e.stores import (
    FAST,
    SHORT,
    error,
    packed,
    raw,
    slow,
    small,
    text,
)
from tests.engine.models import spiece

NFD = unicodedata.normalize("NFD", "소월")
SHOWN_NAMES = ["team/봄 날", "100%", "물음표?#", "a" * 200]


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    for seed, name in enumerate(("a", "b", "봄")):
        small(clean.store / name, seed)
    slow(clean.store / "slow")
    small(clean.store / "garbage").joinpath("kogpt2.params").write_bytes(b"\0" * 5000)
    packed(clean.store / "a", clean.store / f"{NFD}.tar.gz")
    return clean


@pytest.fixture(autouse=True)
def unloaded(server: Server) -> Iterator[None]:
    yield
    for name in server.loaded():
        server.unload(quote(name))


@pytest.mark.parametrize("management", [False, True])
def test_both_ports_load_list_describe_and_unload(server: Server, management: bool) -> None:
    def ask(method: str, path: str = "/models", **body: str) -> requests.Response:
        return server.request(method, path, management=management, json=body or None)

    loaded = ask("post", model_name="x", url="a")
    assert (loaded.status_code, loaded.json()) == (200, {"status": "Workers scaled"})
    again = ask("post", model_name="x", url="b")
    assert error(again) == (409, "ConflictStatusException")
    shown = {"models": [{"modelName": "x", "modelUrl": "a", "residency": "hot"}]}
    assert ask("get").json() == shown
    described = ask("get", "/models/x").json()
    assert (described["modelName"], described["modelUrl"]) == ("x", "a")
    gone = ask("delete", "/models/x")
    assert (gone.status_code, gone.json()) == (200, {"status": 'Model "x" unregistered'})
    assert ask("get").json() == {"models": []}
    for method in ("get", "delete"):
        assert error(ask(method, "/models/x")) == (404, "ModelNotFoundException")


@pytest.mark.parametrize("name", SHOWN_NAMES)
def test_names_with_anything_printable_work(server: Server, name: str) -> None:
    assert server.load(name, "a").status_code == 200
    assert server.loaded() == [name]
    path = quote(name, safe="")
    assert server.get(f"/models/{path}").json()["modelName"] == name
    assert text(server.predict(path, SHORT))
    assert text(server.post(f"/models/{path}/invoke", json=SHORT))
    header = {"X-Amzn-SageMaker-Target-Model": name.encode()}
    assert text(server.post("/invocations", json=SHORT, headers=header))
    answer = server.unload(path)
    assert answer.json() == {"status": f'Model "{name}" unregistered'}


def test_all_spellings_are_one_model(server: Server) -> None:
    assert server.load(NFD, "소월.tar.gz").status_code == 200
    for name in ("소월", "소월.tar.gz", NFD, "소월.mar"):
        assert server.load(name, "소월").status_code == 409
        for path in (f"/predictions/{quote(name)}", f"/models/{quote(name)}/invoke"):
            assert text(server.post(path, json=SHORT))
        target = {"X-Amzn-SageMaker-Target-Model": name.encode()}
        assert server.post("/invocations", json="나", headers=target).status_code == 200
        ready = server.get(f"/v2/models/{quote(name)}/ready")
        assert ready.json() == {"name": "소월", "ready": True}
        described = server.get(f"/models/{quote(name)}")
        assert described.json()["modelName"] == "소월"
    assert server.loaded() == ["소월"]
    assert server.unload(quote(f"{NFD}.tar.gz")).status_code == 200


def test_a_korean_name_works_as_curl_sends_it(server: Server) -> None:
    assert server.load("봄").status_code == 200
    for url in (server.management("/models/봄"), server.url("/models/봄")):
        done = subprocess.run(["curl", "-s", url], capture_output=True, timeout=60, check=True)
        assert json.loads(done.stdout)["modelName"] == "봄"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "Parameter url is required."),
        ({"model_name": "x"}, 400, "Parameter url is required."),
        ({"model_name": "x", "url": ""}, 400, "Parameter url is required."),
        ({"url": 5}, 400, "url"),
        ({"url": "a", "model_name": ["x"]}, 400, "model_name"),
        ({"url": "a", "model_name": "\ud800"}, 400, "half a surrogate pair"),
        ({"url": "\ud800"}, 400, "half a surrogate pair"),
        ({"url": "a", "model_name": "x" * 5000}, 400, "model_name"),
        ({"url": "a", "initial_workers": "many"}, 400, "initial_workers"),
        ({"url": "a", "initial_workers": 0}, 400, "initial_workers"),
        ({"url": "a", "고정": True}, 400, "고정 is not known; known are backend, base, batch_size"),
        ({"url": "a", "response_timeout": "--5"}, 400, "response_timeout"),
        ({"url": "a", "synchronous": "maybe"}, 400, "synchronous"),
        ({"url": "a", "batch_size": {}}, 400, "batch_size"),
        ({"url": "a", "handler": "os:system"}, 400, "handler"),
        ({"url": "a", "runtime": "python2"}, 400, "can be python, python3"),
        ({"url": "a", "runtime": 3}, 400, "runtime"),
        ({"url": "a", "\ud800": 1}, 400, "half a surrogate pair"),
        ({"url": "nothing"}, 404, "nothing"),
        ({"url": "x" * 300}, 404, "xxx"),
        ({"url": "../store/a"}, 400, ".."),
        ({"url": "/etc"}, 400, "Allowed"),
        ([], 400, "object"),
        *((body, 400, "") for body in (b"{", b"\xff\xfe", b"[" * 100_000)),
    ],
    ids=str,
)
def test_a_wrong_load_is_told_what_is_wrong(
    server: Server, body: Any, status: int, said: str
) -> None:
    sent: Any = {"json": body}
    if isinstance(body, bytes):
        sent = {"data": body, "headers": {"Content-Type": "application/json"}}
    answer = server.post("/models", **sent)
    assert error(answer)[0] == status, answer.text
    assert said in answer.json()["message"]
    assert server.loaded() == []


def test_a_form_of_another_site_loads_no_model(server: Server) -> None:
    """A browser sends these without asking first; origins: serving/api/test_sites.py."""
    for management in (False, True):
        for kind in ({}, {"Content-Type": "text/plain"}):
            sent = {"data": b'{"url": "a"}', "headers": kind}
            answer = server.post("/models", management=management, **sent)
            assert error(answer) == (415, "UnsupportedMediaTypeException")
        assert server.loaded() == []


def test_a_model_can_be_registered_by_the_query_string(server: Server) -> None:
    query = "url=a&model_name=q&initial_workers=2&synchronous=true&response_timeout=9"
    assert server.post(f"/models?{query}").status_code == 200
    described = server.get("/models/q").json()
    assert described["minWorkers"] == 2
    assert server.post("/models?url=b").status_code == 200  # the name comes from the url
    assert server.loaded() == ["b", "q"]
    assert error(server.post("/models?url=a&initial_workers=x"))[0] == 400


def test_an_asynchronous_load_appears_later(server: Server) -> None:
    answer = server.post("/models?url=a&synchronous=false")
    assert answer.status_code == 202
    for again in ("", "&synchronous=false"):
        answer = server.post(f"/models?url=a{again}")
        assert error(answer) == (409, "ConflictStatusException")
    eventually(lambda: server.loaded() == ["a"])
    assert server.post("/models?url=garbage&synchronous=false").status_code == 202
    eventually(lambda: "model garbage did not load" in server.text())
    assert error(server.post("/models?url=nothing&synchronous=false"))[0] == 404


def test_of_many_loads_of_one_name_one_wins_and_others_load_beside_it(server: Server) -> None:
    names = ["y", "z", *["x"] * 6]
    with ThreadPoolExecutor(8) as pool:
        statuses = [a.status_code for a in pool.map(lambda name: server.load(name, "a"), names)]
    assert statuses[:2] == [200, 200]
    assert sorted(statuses[2:]) == [200] + [409] * 5
    assert server.loaded() == ["x", "y", "z"]
    assert text(server.predict("x", SHORT))


def test_the_list_comes_in_pages(server: Server) -> None:
    for name in ("m1", "m2", "m3", "m4"):
        server.load(name, "a")

    def page(**query: Any) -> tuple[list[str], str | None]:
        answer = server.get("/models", params=query).json()
        return [m["modelName"] for m in answer["models"]], answer.get("nextPageToken")

    names, token = page(limit=2)
    assert names == ["m1", "m2"]
    assert token is not None
    assert page(limit=2, next_page_token=token) == (["m3", "m4"], None)
    assert page(limit=4) == (["m1", "m2", "m3", "m4"], None)
    assert page(limit=101) == page(limit=10_000) == page()
    for query in ("limit=0", "limit=x", "next_page_token=x", "next_page_token=-1"):
        assert error(server.get(f"/models?{query}"))[0] == 400, query
    management = http.client.HTTPConnection("127.0.0.1", server.management_port)
    assert listed(management, limit=3) == ["m1", "m2", "m3", "m4"]
    with contextlib.closing(UnixConnection(server.run_dir / "mms.sock")) as mms:
        assert len(set(listed(mms, limit=3))) == 4
        mms.request("GET", HEALTH)
        assert json.load(mms.getresponse())["models"] == []


def test_what_is_not_here_is_told(server: Server) -> None:
    for path in ("/", "/nothing", "/model", "/predictions"):
        answer = server.get(path)
        assert error(answer)[0] in (404, 405), path
    nothing = error(server.get("/nothing"))
    assert nothing == (404, "ResourceNotFoundException")
    for method, path, known in (
        ("delete", "/models", "GET, HEAD, POST"),
        ("get", "/invocations", "POST"),
        ("post", "/ping", "GET, HEAD"),
        ("get", "/v2/repository/index", "POST"),
    ):
        answer = server.request(method, path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == known
    here = server.post("/predictions/a", json=SHORT, management=True)
    assert error(here) == (404, "ResourceNotFoundException")
    assert error(server.post("/invocations", json=SHORT))[0] == 400
    assert server.head("/ping").status_code == 200
    assert server.head("/models/nothing").status_code == 404
    server.load("봄", "a")
    described = server.options("/predictions/봄").json()
    assert list(described["paths"]) == [f"/predictions/{quote('봄')}"]
    for answer in (server.options("/predictions/없음"), server.post("/봄/predict", json=SHORT)):
        assert error(answer)[0] == 404  # the second is a legacy route of Multi Model Server's
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = server.predict("봄", gzip.compress(json.dumps(SHORT).encode()), **headers)
    assert error(answer) == (415, "UnsupportedMediaTypeException")
    assert "without compression" in answer.json()["message"]


def test_a_load_reports_a_file_with_almost_the_right_name(server: Server) -> None:
    folder = small(server.store / "윈도")
    (folder / "config.json").rename(folder / "config (1).json")
    warning = "'config (1).json' is not read: config.json is the name of such a file"
    answer = server.load("x", "윈도").json()
    assert answer == {"status": "Workers scaled", "warnings": [warning]}
    assert warning in server.text()


def test_workers_can_be_scaled(server: Server) -> None:
    server.load("x", "a", initial_workers=1)
    scaled = server.put("/models/x?min_worker=3")
    assert (scaled.status_code, scaled.json()) == (200, {"status": "Workers scaled"})
    assert server.get("/models/x").json()["minWorkers"] == 3
    assert text(server.predict("x", SHORT))
    for query in ("min_worker=x", "min_worker=0", "min_worker=3&max_worker=2"):
        assert error(server.put(f"/models/x?{query}"))[0] == 400
    answer = server.put("/models/nothing?min_worker=1")
    assert error(answer) == (404, "ModelNotFoundException")


def test_the_interface_describes_itself_without_any_other_host(server: Server) -> None:
    for management in (False, True):
        for method, path in (
            ("options", "/"),
            ("get", "/api-description"),
            ("get", "/openapi.json"),
        ):
            document = server.request(method, path, management=management).json()
            assert document["openapi"].startswith("3.")
            assert {"/ping", "/models", "/models/{name}"} <= set(document["paths"])
            assert ("/invocations" in document["paths"]) != management
        page = server.get("/docs", management=management)
        assert page.headers["content-type"].startswith("text/html")
        assert not re.search(r"(src|href)\s*=\s*['\"]?(https?:)?//", page.text)


def test_every_answer_has_a_request_id(server: Server) -> None:
    for path in ("/ping", "/models", "/nothing", "/models/x", "/metrics"):

        def answered(given: str | bytes | None, path: str = path) -> str:
            headers = {} if given is None else {"x-request-id": given}
            return server.get(path, headers=headers).headers["x-request-id"]

        assert answered("my-own.id_7") == "my-own.id_7"
        assert len({answered(None), answered(None)}) == 2
        for odd in ("x" * 129, "two words", "가".encode(), b"\x80"):
            assert re.fullmatch(r"[0-9a-f-]{36}", answered(odd))


ODD_HEADERS = [
    ("Accept", "가".encode(), 400),
    ("Accept", b"\xff\xfe", 400),
    ("Accept", b"x" * 5000, 406),
    ("Accept", b"a/b;q=\t1", 400),
    ("Content-Type", "가".encode(), 400),
    ("Content-Type", b"application/json; charset=nonsense", 415),
    ("Content-Type", b"multipart/form-data; boundary=x", 400),
    ("Content-Type", b"multipart/form-data", 400),
    ("Content-Type", b"x" * 8000, 400),
    ("Content-Type", b"application/x-www-form-urlencoded; charset=nonsense", 400),
    ("X-Amzn-SageMaker-Target-Model", "가".encode(), 200),
    ("X-Amzn-SageMaker-Target-Model", b"\xff", 200),
    ("X-Amzn-SageMaker-Target-Model", b"../../etc/passwd", 200),
    ("X-Amzn-SageMaker-Target-Model", b"x" * 9000, 400),
    ("X-Amzn-SageMaker-Custom-Attributes", "가".encode(), 400),
    ("X-Amzn-SageMaker-Custom-Attributes", b"a%0d%0ab: c", 200),
    ("X-Amzn-SageMaker-Custom-Attributes", b"x" * 50_000, 400),
    ("X-KoGPT2-Probe", b"guess", 200),
    ("X-KoGPT2-Timeout", b"nonsense", 200),
    ("Connection", b"upgrade", 200),
    ("Transfer-Encoding", b"nonsense", 400),
]


def test_odd_headers_cannot_hurt_a_worker(server: Server) -> None:
    server.load("x", "a", initial_workers=1)
    workers = {p.pid for p in server.descendants("model_service_worker")}
    body = json.dumps(SHORT).encode()
    expected = {"Content-Type": b"application/json", "Content-Length": b"%d" % len(body)}
    for name, value, status in ODD_HEADERS:
        headers = {**expected, name: value}
        if name == "Transfer-Encoding":
            del headers["Content-Length"]
        lines = [name.encode() + b": " + value for name, value in headers.items()]
        head = [b"POST /models/x/invoke HTTP/1.1", b"Host: localhost", *lines]
        answer = raw(server.port, b"\r\n".join(head) + b"\r\n\r\n" + body)
        assert int(answer.split()[1]) == status, (name, value, answer)
        assert text(server.predict("x", SHORT))
        assert {p.pid for p in server.descendants("model_service_worker")} == workers, value


JSON = "application/json"


@pytest.mark.parametrize(
    ("body", "content_type", "status", "names"),
    [
        ('{"inputs": "a", "parameters": {"온도": 1}}'.encode(), JSON, 400, "온도"),
        (('"' + "가 나 다 " * 2000 + '"').encode(), JSON, 413, "tokens"),
        ("가".encode("euc-kr"), "text/plain; charset=euc-kr", 415, "euc-kr"),
        (b"inputs=a", "application/x-www-form-urlencoded", 415, "curl"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_the_worker_lives(
    server: Server, body: bytes, content_type: str, status: int, names: str
) -> None:
    """Other bodies: handlers/test_payload.py."""
    server.load("x", "a", initial_workers=1)
    workers = {p.pid for p in server.descendants("model_service_worker")}
    answer = server.predict("x", body, **{"Content-Type": content_type})
    assert error(answer)[0] == status
    assert names in answer.json()["message"]
    assert text(server.predict("x", SHORT))
    assert {p.pid for p in server.descendants("model_service_worker")} == workers


# The life of a model


def test_a_client_that_goes_away_does_not_break_its_load(server: Server) -> None:
    with pytest.raises(requests.Timeout):
        server.post("/models", json={"url": "slow"}, timeout=(60, 0.005))
    eventually(lambda: server.loaded() == ["slow"])
    assert text(server.predict("slow", SHORT))


@pytest.mark.slow
def test_a_single_model_that_does_not_load_is_never_healthy(tmp_path: Path) -> None:
    small(tmp_path / "ml" / "model")
    (tmp_path / "ml" / "model" / "kogpt2.params").write_bytes(b"garbage")
    (tmp_path / "server").mkdir()
    environment = {**FAST, "SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}
    server = Server(tmp_path / "server", None, environment)
    try:
        eventually(lambda: "model model did not load" in server.text())
        eventually(lambda: "did not load" in server.get("/ping").text)
        loaded = error(server.get("/ping"))
        assert loaded == (503, "ServiceUnavailableException")  # so the start is given up in time
    finally:
        server.stop()


def test_an_artifact_can_hold_more_than_a_model(server: Server) -> None:
    folder = small(server.store / "more")
    (folder / "json.py").write_text("raise SystemExit('an artifact ran')")
    (folder / "README").write_bytes(spiece())
    assert server.load("more").status_code == 200
    assert text(server.predict("more", SHORT))
    assert server.unload("more").status_code == 200
    (folder / "MAR-INF").mkdir()
    (folder / "MAR-INF" / "MANIFEST.json").write_text('{"model": {"handler": "evil"}}')
    refused = server.load("more")
    assert error(refused)[0] == 400
    assert "the model has no file evil" in refused.json()["message"]
