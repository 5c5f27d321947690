"""Each sentence of docs/operate/security.md that says what cannot happen names a test, or has one
here; the others say what is not prevented, or are no claims. A new sentence without a
test fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from serving.process.isolation import passed
from tests.handlers.user_code.confinement import test_rules

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "operate" / "security.md").read_text("utf-8")
PROGRAMS = {*test_rules.BY_LANDLOCK, *test_rules.BY_SECCOMP, *test_rules.BY_SCOPE_OR_USER}
PROGRAMS |= {*test_rules.BY_USER}

# The beginning of a sentence that names no test, and the tests of what it says.
TESTS = {
    "On a network that is not yours set both": "test_every_route_but_health_asks_for_its_token",
    "A model's own Python, and pip for its": "test_a_program_of_a_model",
    "Landlock | Python": "test_no_program_of_a_model test_a_program_of_a_model "
    "test_a_script_has_a_temporary_folder_of_its_own_that_goes_with_the_model",
    "seccomp (": "test_no_program_of_a_model",
    "capabilities | none": "test_nothing_of_root_is_left_but_reading",
    "user | one per model": "test_no_program_of_a_model",
    "Before Linux 6.2 Landlock knows no truncation": "test_no_program_of_a_model",
    "What a machine cannot enforce is logged": "test_what_this_machine_cannot_keep_is_said",
    "`ALLOW_MODEL_REQUIREMENTS` is off": "test_requirements_are_refused_unless_they_are_allowed",
    "More come with `GRPC_PORT`": ("test_a_process_that_reads_clients_bytes_has_no_other_package"),
    "`requests` and what it brings": "test_a_process_that_reads_clients_bytes_has_no_other_package",
    "Passed are `PATH`": "test_what_it_says_is_passed_is_passed",
    "Of these, names with `TOKEN`": "test_secrets_of_any_name_are_not",
    **dict.fromkeys(
        ("gateway |", "a model's texts, in a sandbox |", "the workers' host |"),
        "test_a_process_that_reads_clients_bytes_has_no_other_package",
    ),
    **dict.fromkeys(
        ("Netty 4.1.91 | TLS", "Commons IO"),
        "test_a_clients_bytes_reach_none_of_what_has_advisories",
    ),
}
# The packages of the jar, and the days of their classes, which tell the versions.
LIBRARIES = {
    "com/amazonaws": (2023, 6, 20),
    "software/amazon": (2019, 6, 25),
    "io/netty": (2023, 4, 3),  # 4.1.91, as its properties say
    "org/apache/logging/log4j": (2021, 12, 27),  # 2.17.1
    "org/apache/logging/slf4j": (2021, 12, 27),
    "org/apache/commons/io": (2017, 10, 15),  # 2.6
    "org/apache/commons/cli": (2015, 6, 14),  # 1.3.1
    "org/slf4j": (2021, 7, 20),  # 1.7.32
    "com/google": (2021, 10, 29),  # Gson 2.8.9
    "com/lmax": (2021, 4, 29),  # Disruptor 3.4.4
}
# Prints which distributions there are modules of once these are imported.
LOADED = """
import importlib, importlib.metadata, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
tops = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([
    package.metadata["Name"].lower().replace("_", "-")
    for package in importlib.metadata.distributions()
    if tops & {file.parts[0].partition(".")[0] for file in package.files or []}
]))
"""
# Ourselves; what puts itself into every process; and a back-port for Python 3.10.
UNTOLD = {"kogpt2-serving", "setuptools", "exceptiongroup"}
# A row of the table, and what `test_no_program_of_a_model` tries for it.
ROWS = {
    "read or change other models": "reads another model, reads another model by a program, "
    "changes another model, removes another model, lists the server's folder, "
    "links to another model, moves another model, opens files by number, "
    "truncates another model, truncates another model as it opens it for nothing",
    "change its own model's files": "changes its model, truncates its model, "
    "truncates its model as it reads",
    "read the environment or memory": "reads the server's environment, reads the server's memory, "
    "reads the server's memory by a call, traces the server",
    "connect to `mms.sock`": "connects to a socket of the server, connects half of a pair, "
    "sends by half of a pair, connects to an abstract socket, lists sockets by netlink",
    "signal the server's processes": "signals the server, signals everybody",
    "set limits of other processes": "limits the server, has io_uring",
    "make itself less likely to be killed": "is less expendable",
    "gain privileges, make namespaces": "mounts, makes a device, makes a user namespace, "
    "starts a process in a user namespace, starts a process in a user namespace by clone3",
    "set extended attributes": "sets an attribute of another model",
    "change the mode, owner or times": "changes the mode of another model, slows the server down",
}
# What is said of the page, of kernels, or to whoever runs the server.
NO_CLAIMS = (
    "| by | what is left |",
    "| who | trusted with |",
    "| the operator",
    "| who may call the management port",
    "| a model's script |",
    "| a model's files |",
    "| clients |",
    "| it cannot |",
    "The server speaks no TLS",
    "The tests have Landlock as of",
    "*No Landlock* as root is",
    "Mount the store read-only",
    "A proxy that lets pages of other origins in",
    "A script also",
    "Limit requests per client",
    "`serving/process/isolation.py` has all",
    "| library |",
    "| process | packages |",
    "Versions are pinned",
    "Version 1.1.11 is the newest",
    "Netty 4.1.91 | CVE-2024-47535",
    "Gson 2.8.9",
)
# What follows a *not prevented*.
NOT_PREVENTED = (
    "*Not prevented*",
    "Without a user of its own, a script can remove",
)


def sentences(page: str) -> list[str]:
    """Rows of tables, and of all else what a full stop ends."""
    found: list[str] = []
    for line in page.splitlines():
        if line.startswith("|"):
            found += [line] * bool(line.strip("| -"))
        elif line and not line.startswith(("#", "[한국어]")):
            found += re.split(r"(?<=\.)\s+(?=[A-Z*`])", line.removeprefix("- "))
    return found


def named(sentence: str) -> bool:
    return "`test_" in sentence or sentence.startswith((*TESTS, *ROWS, *NO_CLAIMS, *NOT_PREVENTED))


def test_each_sentence_has_a_test() -> None:
    bare = [s for s in sentences(PAGE) if not named(s) and not named(s.removeprefix("| "))]
    assert bare == []
    assert not named("A script cannot read the operator's mail.")


def test_nothing_is_kept_here_that_the_page_no_longer_says() -> None:
    said = [s.removeprefix("| ") for s in sentences(PAGE)] + sentences(PAGE)
    kept = (*TESTS, *ROWS, *NO_CLAIMS, *NOT_PREVENTED)
    assert [begin for begin in kept if not any(s.startswith(begin) for s in said)] == []


def test_the_tests_are_there() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)", sources))
    assert {name for names in TESTS.values() for name in names.split()} - defined == set()
    assert {what for row in ROWS.values() for what in row.split(", ")} == PROGRAMS


def test_the_jar_has_the_libraries_of_the_table() -> None:
    found = find_spec("mms")
    assert found is not None
    assert found.origin is not None
    with ZipFile(Path(found.origin).with_name("frontend") / "model-server.jar") as jar:
        classes = [file for file in jar.infolist() if file.filename.endswith(".class")]
        netty = jar.read("META-INF/io.netty.versions.properties").decode()
    days: dict[str, tuple[int, ...]] = {}
    for file in classes:
        parts = file.filename.split("/")
        if parts[0] in ("META-INF", "module-info.class"):
            continue
        package = "/".join(parts[: 4 if parts[:2] == ["org", "apache"] else 2])
        days[package] = min(days.get(package, file.date_time[:3]), file.date_time[:3])
    assert days == LIBRARIES
    assert "4.1.91.Final" in netty


@pytest.mark.parametrize(
    ("process", "modules"),
    [
        ("gateway", ["serving.gateway"]),
        (
            "a model's texts, in a sandbox",
            ["engine.text.child", "engine.text.hugging_face", "engine.text.chat_template"],
        ),
        ("the workers' host", ["handlers.host", "handlers.handler_service"]),
    ],
)
def test_a_process_that_reads_clients_bytes_has_no_other_package(
    process: str, modules: list[str]
) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {process} | `")]
    command = [sys.executable, "-c", LOADED, *modules]
    found = set(json.loads(subprocess.check_output(command, cwd=ROOT)))
    assert set(re.findall(r"`(.+?)`", row)) == found - UNTOLD


@pytest.mark.parametrize("language", ["", ".ko"])
def test_what_it_says_is_passed_is_passed(language: str) -> None:
    page = (ROOT / "docs" / "operate" / f"security{language}.md").read_text("utf-8")
    (line,) = [line for line in page.splitlines() if "`PATH`" in line and "`TZ`" in line]
    names = re.findall(r"`([A-Z][A-Z_]+\*?)`", line)
    assert len(names) > 15
    given = {name.replace("*", "X"): "1" for name in names}
    assert passed(given) == given
