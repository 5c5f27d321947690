"""Which HTML forms are forwarded to Multi Model Server."""

from __future__ import annotations

import contextlib
import time

import pytest
import requests

from serving.api.forms import MAX_FIELDS, check_form
from serving.errors import BadRequest

FORM, PARTS = "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
NAMED = 'Content-Disposition: form-data; name="시"'


def part(*head: str, content: str = "나 보기가") -> bytes:
    return "\r\n".join(["--x", *head, "", content, ""]).encode()


GOOD = part(NAMED) + b"--x--\r\n"
WRONG = {
    "nothing": (PARTS, b""),
    "no-head": (PARTS, b"--x\r\n\r\n"),
    "no-head-but-an-end": (PARTS, b"--x\r\n\r\n\r\n--x--"),
    "no-end": (PARTS, part(NAMED)),
    "no-end-of-a-head": (PARTS, b"--x\r\n" + NAMED.encode() + b"\r\n--x--"),
    "no-boundary": ("multipart/form-data", GOOD),
    "empty-boundary": ('multipart/form-data; boundary=""', GOOD),
    "long-boundary": (f"multipart/form-data; boundary={'x' * 71}", GOOD),
    "another-boundary": ("multipart/form-data; boundary=y", GOOD),
    "text-in-front": (PARTS, b"text\r\n" + GOOD),
    "no-name": (PARTS, part("Content-Disposition: form-data") + b"--x--"),
    "empty-name": (PARTS, part('Content-Disposition: form-data; name=""') + b"--x--"),
    "attachment": (PARTS, part('Content-Disposition: attachment; name="a"') + b"--x--"),
    "two-names": (PARTS, part(NAMED, NAMED) + b"--x--"),
    "no-disposition": (PARTS, part("Content-Type: text/plain") + b"--x--"),
    "no-header": (PARTS, part(NAMED, "nonsense") + b"--x--"),
    "bare-lf": (PARTS, part(NAMED + "\nX: y") + b"--x--"),
    "charset": (PARTS, part(NAMED, "Content-Type: text/plain; charset=zzz") + b"--x--"),
    "charset-of-all": (PARTS + "; charset=zzz", GOOD),
    "charset-of-fields": (FORM + "; charset=zzz", b"a=b"),
    "nested": (PARTS, part(NAMED, "Content-Type: multipart/mixed; boundary=y") + b"--x--"),
    "base64": (PARTS, part(NAMED, "Content-Transfer-Encoding: base64") + b"--x--"),
    "file-name": (PARTS, part(NAMED + "; filename*=zzz''a") + b"--x--"),
    "file-name-of-no-bytes": (PARTS, part(NAMED + "; filename*=utf-8''%z") + b"--x--"),
    "long-heads": (PARTS, part(NAMED, "X-A: " + "가" * 2_000_000) + b"--x--"),
    "many-heads": (PARTS, part(NAMED, "X-A: " + "a" * 1000) * 100 + b"--x--"),
    "many-parts": (PARTS, part(NAMED) * (MAX_FIELDS + 1) + b"--x--"),
    "no-byte": (FORM, b"%zz=1"),
    "many-fields": (FORM, b"a&" * MAX_FIELDS),
    "many-fields-otherwise-written": (f"{FORM.title()} ; charset=utf-8", b"a&" * MAX_FIELDS),
}
RIGHT = {
    "fields": (FORM, "시=%EA%B0%80&b".encode()),
    "fields-in-utf8": (FORM + "; charset=UTF-8", b"a=b"),
    "part": (PARTS, GOOD),
    "parts": (PARTS, part(NAMED) * MAX_FIELDS + b"--x--\r\nepilogue"),
    "quoted": ('Multipart/Form-Data; charset="utf-8"; boundary="x"', GOOD),
    "file": (
        PARTS,
        part(f'{NAMED}; filename="봄.txt"', "Content-Type: text/plain; charset=UTF-8") + b"--x--",
    ),
    "extended-file-name": (PARTS, part(f"{NAMED}; filename*=utf-8''%EB%B4%84.txt") + b"--x--"),
    "like-a-boundary": (PARTS, part(NAMED, content="a--x--\n--x--") + b"--x--"),
    "empty": (PARTS, b"--x--"),
    "no-form": ("text/plain; charset=zzz", b"--x\r\n\r\n" + b"a&%zz" * MAX_FIELDS),
    "written-otherwise": (PARTS, GOOD.replace(b"Disposition", b"DISPOSITION")),
}


@pytest.mark.parametrize("form", WRONG)
def test_what_netty_could_not_take_is_refused(form: str) -> None:
    with pytest.raises(BadRequest):
        check_form(*WRONG[form])


@pytest.mark.parametrize("form", RIGHT)
def test_what_is_right_is_sent_on(form: str) -> None:
    check_form(*RIGHT[form])


def test_what_a_client_makes_is_sent_on() -> None:
    files = {"file": ("진달래꽃.txt", "나 보기가", "text/plain"), "b": b"\0\r\n--\r\n" * 1000}
    made = requests.Request("POST", "http://a", data={"시": "역겨워"}, files=files).prepare()
    assert isinstance(made.body, bytes)
    check_form(made.headers["Content-Type"], made.body)


def test_a_form_is_checked_in_a_time_that_grows_with_its_length() -> None:
    began = time.process_time()
    for body in (b"\r\n--x" * 1_600_000, b"--x\r\n" + b"a:\r\n" * 1_600_000, b"%" * 6_500_000):
        for kind in (FORM, PARTS):
            with contextlib.suppress(BadRequest):
                check_form(kind, body)
    for value in ("; " * 30_000, 'name="' * 10_000, "*=" * 30_000, "form-data;" * 6000):
        with contextlib.suppress(BadRequest):
            check_form(PARTS, part(f"Content-Disposition: form-data; {value}") + b"--x--")
    assert time.process_time() - began < 30
