"""What a client's bytes reach in Multi Model Server's jar, whose Netty and Log4j are of 2023: no
string is looked up by them, and no form ends the JVM that all models share."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.e2e.scripts import transform
from tests.e2e.server import Server, eventually
from tests.e2e.stores import SHORT, error, serving, small, text
from tests.serving.api.test_forms import RIGHT

pytestmark = pytest.mark.slow

# What has advisories in the jar and no bound of ours (docs/develop/dependencies.md):
# Netty's TLS, HTTP/2, compression, other protocols and requests of its own; Java's JNDI,
# Log4j's sockets; Commons IO's reader of XML and its names of files.
OUT_OF_REACH = re.compile(
    r"io\.netty\.handler\.(ssl\.|codec\.(http2|compression|haproxy|redis|mqtt|smtp|dns|stomp|socks))"
    r"|io\.netty\.handler\.codec\.http\.(HttpRequestEncoder|HttpClientCodec)"
    r"|log4j\.core\.net\.(SslSocketManager|TcpSocketManager)|com\.sun\.jndi\."
    r"|commons\.io\.(input\.XmlStreamReader|FilenameUtils)"
)
PRINTS = """
text = body.decode('utf-8', 'replace') if isinstance(body, (bytes, bytearray)) else str(body)
print(text, flush=True)
return text, 'text/plain'
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("java")
    small(folder / "store" / "봄")
    transform(folder / "store" / "script", PRINTS)
    options = "-Xmx256m -XX:+UseSerialGC -XX:+ExitOnOutOfMemoryError -XX:TieredStopAtLevel=1"
    options += f" -Xlog:class+load:file={folder / 'classes'}"
    with serving(
        folder / "run", folder / "store", SAGEMAKER_MODEL_SERVER_VMARGS=options
    ) as running:
        yield running


def java(server: Server) -> set[int]:
    return {p.pid for p in server.descendants("ModelServer") if "java" in p.cmdline()[0]}


FORM, PARTS = "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="%d"\r\n\r\n\r\n'
FORMS = {
    "fields": (FORM, b"a&" * 3_000_000),
    "names": (FORM, b"&".join(b"%x=1" % i for i in range(700_000))),
    "parts": (PARTS, b"".join(PART % i for i in range(90_000)) + b"--x--\r\n"),
    "no-byte": (FORM, b"%zz=%"),
}


@pytest.mark.parametrize("form", FORMS)
def test_no_form_ends_the_jvm(server: Server, form: str) -> None:
    kind, body = FORMS[form]
    before = java(server)
    for name in ("봄", "script"):
        answer = server.predict(name, body, **{"Content-Type": kind})
        assert error(answer) == (400, "BadRequestException")
    assert java(server) == before
    assert text(server.predict("봄", SHORT))


@pytest.mark.parametrize("form", RIGHT)
def test_netty_takes_what_is_sent_on(server: Server, form: str) -> None:
    kind, body = RIGHT[form]
    answer = server.predict("script", body, **{"Content-Type": kind})
    assert answer.status_code == 200, answer.text


def test_strings_that_log4j_once_looked_up_are_strings(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        hook = f"${{jndi:ldap://127.0.0.1:{port}/a}}"
        hidden = f"${{${{lower:j}}ndi:rmi://127.0.0.1:{port}/가}}"
        names = ("Accept", "X-Amzn-SageMaker-Custom-Attributes", "X-Request-Id", "User-Agent")
        headers = {**dict.fromkeys(names, hook), "X-Amzn-SageMaker-Target-Model": hook}
        for name in ("봄", "script", hook):
            for kind in ("text/plain", hook, FORM, PARTS):
                disposition = f'form-data; name="{hook}"; filename="{hook}"'
                part = f"--x\r\nContent-Disposition: {disposition}\r\n\r\n{hook}\r\n--x--"
                body = (hidden if kind == "text/plain" else part).encode()
                path = f"{quote(name, safe='')}?{hook}={hook}"
                server.predict(path, body, **headers, **{"Content-Type": kind})
        server.load(hook, "봄")
        server.load("봄", hook, handler=hook)
        # The script has printed it, and so Log4j was given it.
        eventually(lambda: "ndi:rmi://127.0.0.1" in server.text())
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_clients_bytes_reach_none_of_what_has_advisories(server: Server) -> None:
    """After the tests above; Netty's form decoder is reached, which is why forms are bounded."""
    server.predict("script", b"a=b", **{"Content-Type": FORM})
    log = Path(server.store).parent / "classes"
    loaded = set(re.findall(r"(?:io|org|com)\.[\w.$]+", log.read_text()))
    assert any("HttpPostRequestDecoder" in name for name in loaded)
    assert not {name for name in loaded if OUT_OF_REACH.search(name)}
