"""Limits what a model's own program (its script, or pip for it) may read, write and connect to.

It reads Python, the system's libraries and its model, writes to a temporary folder, and uses its
connection to its worker and, with SCRIPT_NETWORK, the network. It has at most one capability, to
read files, and a user of its own if the server is root. docs/operate/security.md lists what each
kernel enforces.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from common import landlock
from common.errors import Overloaded
from common.oom import SCRIPT, expendable
from common.trees import remove
from handlers.user_code.confinement import capabilities, seccomp

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38

REPOSITORY = Path(__file__).resolve().parents[3]
SERVER_PACKAGES = ("common", "engine", "handlers", "compat")
SYSTEM_PATHS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt/native", "/opt/nvidia",
    "/proc", "/sys",
)  # fmt: skip
# Not all of /etc: secrets are mounted there.
ETC_PATHS = tuple(
    f"/etc/{name}"
    for name in (
        "ssl", "pki", "ca-certificates", "alternatives", "fonts", "OpenCL", "vulkan", "ld.so.cache",
        "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "mime.types", "hosts", "host.conf",
        "resolv.conf", "nsswitch.conf", "gai.conf", "passwd", "group", "protocols", "services",
        "os-release", "debian_version", "pip.conf",
    )
)  # fmt: skip
# Environment variables with paths that libraries read.
PATH_VARIABLES = (
    "LD_LIBRARY_PATH", "JAVA_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE", "PIP_CONFIG_FILE", "PIP_CERT", "PIP_FIND_LINKS",
)  # fmt: skip
SHARED_MEMORY = "/dev/shm"  # noqa: S108  multiprocessing's locks and queues
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
GPU_DEVICES = ("/dev/nvidia*", "/dev/dri")

# Environment variables that scripts do not get: the server's own, and pip's, which may hold a
# password.
HIDDEN_VARIABLES = (
    "PROBE_SECRET", "ENGINE_SOCKET", "RUN_DIR", "LOG_LOCATION", "METRICS_LOCATION",
)  # fmt: skip
HIDDEN_PREFIXES = ("MMS_", "MODEL_SERVER_", "PIP_")
# Environment variables of pip and of the builds that it starts.
PIP_VARIABLES = (
    *PATH_VARIABLES, "PATH", "PYTHON*", "PIP_*", "LANG", "LANGUAGE", "LC_*", "TZ", "HTTP_PROXY",
    "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy",
)  # fmt: skip
HOME_VARIABLES = ("HOME", "TMPDIR", "TEMP", "TMP")

# Unassigned on Linux distributions: https://systemd.io/UIDS-GIDS
UIDS = range(60578, 61184)


@dataclass(frozen=True)
class Confinement:
    """The limits of a program; `read` and `write` are paths beyond those of Python and system.

    Without `shared_memory` all its memory counts in its RLIMIT_DATA: `/dev/shm` is closed, too.
    """

    read: Sequence[str]
    write: Sequence[str]
    network: bool = True
    uid: int | None = None
    shared_memory: bool = True

    def enter(self) -> None:
        """Permanently confines this thread and its children. Raises `OSError`."""
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        if landlock.abi():
            devices = [*DEVICES, *(path for name in GPU_DEVICES for path in glob.glob(name))]
            read = [*SYSTEM_PATHS, *ETC_PATHS, *_python(), *self.read]
            shared = [SHARED_MEMORY] if self.shared_memory else []
            landlock.restrict(read, [*shared, *self.write], devices)
        remaining = _remaining_capabilities()
        if self.uid is not None:
            _prctl(PR_SET_KEEPCAPS, 1)
            os.setgroups([])
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)
            _prctl(PR_SET_DUMPABLE, 1)  # else root owns its files in /proc
        capabilities.drop_all_but(remaining)
        if seccomp.available():
            truncation = 0 < landlock.abi() < landlock.TRUNCATE_ABI
            seccomp.refuse_calls(self.network, truncation, self.shared_memory)


def become_model_process(worker: int, confinement: Mapping[str, Any] | None) -> None:
    """Confines this process by a `Confinement`'s fields, ties it to its worker. Raises `OSError`.

    The process is killed when the worker ends, is the first to be killed when memory runs out, and
    dumps no core.
    """
    expendable(SCRIPT)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if confinement is not None:
        Confinement(**confinement).enter()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # last: a change of user resets it
    if os.getppid() != worker:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _python() -> list[str]:
    """List the paths of imports and of `PATH_VARIABLES`; of the server, only its packages."""
    folders = [path for path in sys.path if path and Path(path).resolve() != REPOSITORY]
    values = " ".join(os.environ.get(name, "") for name in PATH_VARIABLES)
    packages = [str(REPOSITORY / name) for name in SERVER_PACKAGES]
    from_variables = values.replace(os.pathsep, " ").split()
    return [*packages, *folders, sys.prefix, sys.base_prefix, *from_variables]


def _remaining_capabilities() -> set[int]:
    """Choose the capability to read any file: DAC_READ_SEARCH, or with Landlock DAC_OVERRIDE."""
    permitted = capabilities.permitted()
    if capabilities.DAC_READ_SEARCH in permitted:
        return {capabilities.DAC_READ_SEARCH}
    return permitted & {capabilities.DAC_OVERRIDE} if landlock.abi() else set()


def environment(temporary: str, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Select a script's environment variables from its worker's; `temporary` is the home folder."""
    passed = {
        name: value
        for name, value in given.items()
        if name not in HIDDEN_VARIABLES and not name.startswith(HIDDEN_PREFIXES)
    }
    return {**passed, **dict.fromkeys(HOME_VARIABLES, temporary)}


def pip_environment(temporary: str, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Select pip's environment variables from its worker's; `temporary` is the home folder."""
    passed = {k: v for k, v in given.items() if any(fnmatchcase(k, name) for name in PIP_VARIABLES)}
    return {**passed, **dict.fromkeys(HOME_VARIABLES, temporary)}


def allocate_user(run_dir: str) -> int | None:
    """Reserve a uid for a model until this process ends; None if this process is not root.

    Removes what an earlier model with this uid has left in `/dev/shm`. Raises `Overloaded` if all
    are in use: the model's program would run as root.
    """
    if not may_change_user():
        return None
    folder = Path(run_dir) / "users"
    folder.mkdir(mode=0o700, exist_ok=True)
    for uid in UIDS:
        lock = os.open(folder / str(uid), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends
        except BlockingIOError:
            os.close(lock)
            continue
        for left in Path(SHARED_MEMORY).glob("*"):
            with contextlib.suppress(OSError):
                if left.lstat().st_uid == uid:
                    remove(left)
        return uid
    raise Overloaded(
        f"all {len(UIDS)} users for models' programs are in use; unload a model that has a program"
    )


def may_change_user() -> bool:
    """Return whether this process is root, may change its user, and has `UIDS` in its namespace."""
    if (
        os.geteuid() != 0
        or not _remaining_capabilities()
        or not capabilities.permitted() >= capabilities.SWITCH_USER
    ):
        return False
    rows = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(row[0]) <= UIDS[0] and UIDS[-1] < int(row[0]) + int(row[2]) for row in rows)


def unenforced() -> list[str]:
    """List what this machine cannot prevent scripts from doing, in clauses for the log."""
    clauses = []
    if not landlock.abi():
        clauses.append(
            "they read every file of the server's (no Landlock: the kernel lacks it, or the"
            " container forbids it)"
        )
        if not may_change_user():
            clauses.append("they write what the server may write, and trace its processes")
    if landlock.abi() < landlock.SCOPES_ABI and not may_change_user():
        clauses.append("they can signal the server's processes (the kernel is older than 6.12)")
    if not seccomp.available():
        reason = "there is no seccomp filter for this machine"
        clauses.append(f"they connect to the server's sockets and make user namespaces ({reason})")
        if 0 < landlock.abi() < landlock.TRUNCATE_ABI:
            clauses.append(
                f"they truncate other models' files (a kernel older than 6.2, and {reason})"
            )
    return clauses
