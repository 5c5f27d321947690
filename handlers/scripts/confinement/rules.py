"""What a model's own program (its script, or pip for it) may see and do, whoever runs the server.

It reads Python, the system's libraries and its model, writes to a temporary folder, and talks to
its worker and, unless that is forbidden, to the network. It has no capabilities to speak of, and a
user of its own where the server is root. docs/operate/security.md says what each kernel
enforces.
"""

from __future__ import annotations

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

from common.oom import SCRIPT, expendable
from handlers.scripts.confinement import capabilities, landlock, seccomp

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38

REPOSITORY = Path(__file__).resolve().parents[3]
OURS = ("common", "engine", "handlers", "compat")
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt/native", "/opt/nvidia",
    "/proc", "/sys",
)  # fmt: skip
# Not all of /etc: secrets are mounted there.
SETTINGS = tuple(
    f"/etc/{name}"
    for name in (
        "ssl", "pki", "ca-certificates", "alternatives", "fonts", "OpenCL", "vulkan", "ld.so.cache",
        "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "mime.types", "hosts", "host.conf",
        "resolv.conf", "nsswitch.conf", "gai.conf", "passwd", "group", "protocols", "services",
        "os-release", "debian_version", "pip.conf",
    )
)  # fmt: skip
# Variables whose values are paths that libraries read.
NAMED = (
    "LD_LIBRARY_PATH", "JAVA_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE", "PIP_CONFIG_FILE", "PIP_CERT", "PIP_FIND_LINKS",
)  # fmt: skip
SHARED_MEMORY = "/dev/shm"  # noqa: S108  multiprocessing's locks and queues are there
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
GPU_DEVICES = ("/dev/nvidia*", "/dev/dri")

# Variables for our own processes; pip's may hold a password.
HIDDEN = (
    "PROBE_SECRET", "ENGINE_SOCKET", "RUN_DIR", "LOG_LOCATION", "METRICS_LOCATION",
)  # fmt: skip
HIDDEN_PREFIXES = ("MMS_", "MODEL_SERVER_", "PIP_")
# What pip needs, and the builds that it starts.
OF_PIP = (
    *NAMED, "PATH", "PYTHON*", "PIP_*", "LANG", "LANGUAGE", "LC_*", "TZ", "HTTP_PROXY",
    "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy",
)  # fmt: skip
FOLDERS = ("HOME", "TMPDIR", "TEMP", "TMP")

# No user of these numbers is anybody else's: https://systemd.io/UIDS-GIDS
UIDS = range(60578, 61184)


@dataclass(frozen=True)
class Confinement:
    """`read` and `write` are what it needs beyond Python and the system."""

    read: Sequence[str]
    write: Sequence[str]
    network: bool = True
    uid: int | None = None

    def enter(self) -> None:
        """Confines this thread and all that it starts, for good. Raises `OSError`."""
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        if landlock.abi():
            devices = [*DEVICES, *(path for name in GPU_DEVICES for path in glob.glob(name))]
            read = [*SYSTEM, *SETTINGS, *_python(), *self.read]
            landlock.restrict(read, [SHARED_MEMORY, *self.write], devices)
        kept = _kept()
        if self.uid is not None:
            _prctl(PR_SET_KEEPCAPS, 1)
            os.setgroups([])
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)
            _prctl(PR_SET_DUMPABLE, 1)  # so that its own files in /proc are its own
        capabilities.keep(kept)
        if seccomp.available():
            truncation = 0 < landlock.abi() < landlock.TRUNCATE_ABI
            seccomp.refuse_calls(self.network, truncation)


def belong_to(worker: int, confinement: Confinement | None) -> None:
    """Makes this process one of a model's: it ends with its worker, is the first to go without
    memory, dumps no core, and is confined. Raises `OSError`."""
    expendable(SCRIPT)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if confinement is not None:
        confinement.enter()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user would have taken it back
    if os.getppid() != worker:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _python() -> list[str]:
    """Where this process imports from (our own packages, and not what lies beside them) and what
    the environment points to."""
    folders = [path for path in sys.path if path and Path(path).resolve() != REPOSITORY]
    values = " ".join(os.environ.get(name, "") for name in NAMED)
    named = values.replace(os.pathsep, " ").split()
    ours = [str(REPOSITORY / name) for name in OURS]
    return [*ours, *folders, sys.prefix, sys.base_prefix, *named]


def _kept() -> set[int]:
    """What root reads files of any owner with, where Landlock says which; else without writing."""
    held = capabilities.held()
    if capabilities.DAC_READ_SEARCH in held:
        return {capabilities.DAC_READ_SEARCH}
    return held & {capabilities.DAC_OVERRIDE} if landlock.abi() else set()


def environment(temporary: str, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a script, from those of its worker; `temporary` is its home, too."""
    kept = {
        name: value
        for name, value in given.items()
        if name not in HIDDEN and not name.startswith(HIDDEN_PREFIXES)
    }
    return {**kept, **dict.fromkeys(FOLDERS, temporary)}


def pip_environment(temporary: str, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of pip for a model, from those of its worker; `temporary` is its home, too."""
    kept = {k: v for k, v in given.items() if any(fnmatchcase(k, name) for name in OF_PIP)}
    return {**kept, **dict.fromkeys(FOLDERS, temporary)}


class OwnUser:
    """A user that no other model's programs have while this process lives, or none: `uid`."""

    def __init__(self, run_dir: str) -> None:
        self.uid: int | None = None
        if not may_change_user():
            return
        folder = Path(run_dir) / "users"
        folder.mkdir(mode=0o700, exist_ok=True)
        for uid in UIDS:
            lock = os.open(folder / str(uid), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
            except BlockingIOError:
                os.close(lock)
                continue
            self.uid = uid
            return


def may_change_user() -> bool:
    """Whether this process is root with what that takes, and its user namespace has `UIDS`."""
    if os.geteuid() != 0 or not _kept() or not capabilities.held() >= capabilities.OF_USERS:
        return False
    rows = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(row[0]) <= UIDS[0] and UIDS[-1] < int(row[0]) + int(row[2]) for row in rows)


def missing() -> list[str]:
    """What this machine cannot keep models' scripts from, a clause each, for people."""
    found = []
    if not landlock.abi():
        found.append(
            "they read every file of the server's (no Landlock: the kernel lacks it, or the"
            " container forbids it)"
        )
        if not may_change_user():
            found.append("they write what the server may write, and trace its processes")
    if landlock.abi() < landlock.SCOPES_ABI and not may_change_user():
        found.append("they can signal the server's processes (the kernel is older than 6.12)")
    if not seccomp.available():
        lacks = "there is no filter for this machine"
        found.append(f"they connect to the server's sockets and make user namespaces ({lacks})")
        if 0 < landlock.abi() < landlock.TRUNCATE_ABI:
            found.append(
                f"they truncate other models' files (a kernel older than 6.2, and {lacks})"
            )
    return found
