"""The server under test: its processes by kind, the models of its parts, what it leaves over."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from common.errors import EngineError
from engine.http.client import UnixConnection
from serving.mms.worker_processes import has_process
from testbed import process_tree
from testbed.control_group import ControlGroup
from testbed.server import Server
from tests.chaos.clock import Clock
from tests.chaos.history import View

# Parts of command lines. The texts' processes are forks of the zygote.
COMMANDS = {
    "java": "ModelServer",
    "launcher": "serving.mms.launcher",
    "engine": "-m engine ",
    "gateway": "serving.gateway",
    "host": "handlers.host",
    "worker": "model_service_worker",
    "zygote": "engine.sandbox.zygote",
    "texts": "engine.sandbox.zygote",
}
# One of each, whatever is loaded.
SETTLED = ("java", "launcher", "engine", "gateway", "host", "zygote")
# The folders that a fault fills, by the setting of each.
DISKS = {"run": "RUN_DIR", "cache": "MODEL_CACHE", "prepared": "ENGINE_CACHE_DIR"}
DISK_MIB = 96
QUIET_S = 60.0  # the longest wait until all parts answer


class System(Server):
    """The server, as a context manager.

    image: run it as a container of this image; "" for processes
    small_disks: mount a small disk for each of its folders where that is allowed
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        group: ControlGroup | None = None,
        image: str = "",
        clock: Clock | None = None,
        small_disks: bool = False,
    ) -> None:
        self.group, self.disks, self.clock = group, Disks(folder, small_disks), clock
        self._image, self._name = image, f"kogpt2-{folder.name}"
        clocked = clock.environment if clock else {}
        try:
            super().__init__(
                folder,
                folder / "server.log",
                backend=("native", "fp32"),
                environment={**environment, **self.disks.environment, **clocked},
                prefix=group.prefix if group else (),
            )
            if image:
                self.pid = int(self._docker("inspect", "--format", "{{.State.Pid}}"))
        except BaseException:
            self._remove()
            raise
        self.run_dir = self.disks.folders["run"]

    def __exit__(self, *_: object) -> None:
        for process in self.everything():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        below = self.everything()
        self.close()
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._remove()

    def _remove(self) -> None:
        if self._image:
            self._docker("rm", "--force", "--volumes")
        self.disks.close()

    def _docker(self, *command: str) -> str:
        done = subprocess.run(["docker", *command, self._name], capture_output=True, text=True)
        return done.stdout

    def _command(self, settings: Mapping[str, str]) -> list[str]:
        """Return a command like that of scripts/run, but with the host's network and folders."""
        if not self._image:
            return super()._command(settings)
        run = ["docker", "run", "--rm", "--name", self._name, "--network", "host"]
        run += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        run += ["--tmpfs", "/var/cache/kogpt2:mode=1777"]
        for path in self.disks.folders.values():
            run += ["--volume", f"{path}:{path}"]
        for name in settings.keys() - {"JAVA_HOME"}:
            run += ["--env", name]
        if user := os.getuid():  # root may read the files of the image's own user
            run += ["--user", f"{user}:{os.getgid()}"]
        return [*run, self._image, "serve"]

    @property
    def ports(self) -> tuple[int, int]:
        return self.port, self.management_port

    # Processes

    def everything(self) -> list[psutil.Process]:
        return process_tree.processes(self.pid)[1:]

    def processes(self, kind: str) -> list[psutil.Process]:
        return processes_of(self.pid, kind)

    # Models by part

    def view(self, quiet_s: float) -> View:
        """Raises `OSError`, `EngineError` or `ValueError` if a part does not answer."""
        held = self.ask_engine("/models", timeout_s=5)["models"]
        mms = names(UnixConnection(self.run_dir / "mms.sock"))
        listed = names(http.client.HTTPConnection("127.0.0.1", self.management_port))
        return View(
            time.monotonic(),
            quiet_s,
            listed,
            [model["name"] for model in held],
            mms,
            [path.name for path in (self.run_dir / "workers").iterdir()],
            len(self.processes("worker")),
            len(list(self.run_dir.glob(".mms.sock.*"))),
        )

    def agreed(self, within_s: float) -> View:
        """The view once all parts agree, or after `within_s`. Raises `TimeoutError` if a part does
        not answer at all."""
        began = time.monotonic()
        while True:
            quiet_s = time.monotonic() - began
            try:
                view = self.view(quiet_s)
            except (OSError, EngineError, ValueError, KeyError) as error:
                if quiet_s > QUIET_S:
                    raise TimeoutError(f"no answer in quiet: {error}") from error
            else:
                if quiet_s > within_s or not view.differences():
                    return view
            time.sleep(0.1)

    # Leftovers

    def counted(self) -> Counter[str]:
        """Processes by kind."""
        return Counter({f"{kind} processes": len(self.processes(kind)) for kind in COMMANDS})

    def files(self, *disks: str) -> set[str]:
        """The files in these of its folders; in all if none is given."""
        return {
            os.path.join(os.path.relpath(folder, self.disks.folder), name)
            for disk in disks or DISKS
            for folder, _, names in os.walk(self.disks.folders[disk])
            for name in names
        }

    def reserved_bytes(self) -> int:
        """The reserved part of the engine's budget."""
        statistics = self.ask_engine("/statistics")
        return int(statistics["weight_bytes"]) + int(statistics["kv_bytes"])

    def request_lines(self) -> Counter[str]:
        """Count the log lines of each request's end."""
        found: Counter[str] = Counter()
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            if '"request_id"' in line and '"path"' in line:
                with contextlib.suppress(ValueError):
                    found[json.loads(line)["request_id"]] += 1
        return found


def processes_of(pid: int, kind: str) -> list[psutil.Process]:
    """The living processes of a kind below a server, the oldest first."""
    found = []
    for process in process_tree.processes(pid)[1:]:
        with contextlib.suppress(psutil.Error):
            line = " ".join([*process.cmdline(), ""])
            if process.status() == psutil.STATUS_ZOMBIE or COMMANDS[kind] not in line:
                continue
            if kind in ("zygote", "texts"):
                parent = process.parent()
                forked = parent is not None and COMMANDS["zygote"] in " ".join(parent.cmdline())
                if forked != (kind == "texts"):
                    continue
            found.append((process.create_time(), process.pid, process))
    return [process for *_, process in sorted(found, key=lambda row: row[:2])]


class Disks:
    """A folder for each of `DISKS`; if `small`, on a tmpfs where mounts are allowed."""

    def __init__(self, folder: Path, small: bool) -> None:
        self.folder = folder
        self.folders = {name: folder / name for name in DISKS}
        self.mounted = False
        for path in self.folders.values():
            path.mkdir(exist_ok=True)
            path.chmod(0o777)  # the server may be another user
        if small and os.geteuid() == 0:
            done = [self._mount(path) for path in self.folders.values()]
            self.mounted = all(done)
        self.environment = {DISKS[name]: str(path) for name, path in self.folders.items()}

    @staticmethod
    def _mount(path: Path) -> bool:
        options = ["-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=777", "kogpt2-chaos", str(path)]
        return subprocess.run(["mount", *options], capture_output=True).returncode == 0

    def fill(self, name: str) -> None:
        with contextlib.suppress(OSError), (self.folders[name] / "filler").open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    def empty(self, name: str) -> None:
        (self.folders[name] / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        for path in self.folders.values():
            subprocess.run(["umount", "--lazy", str(path)], capture_output=True)


def left_of(run_dir: Path, id: str) -> Iterator[str]:
    """Return what remains of a worker after its model's unload."""
    if (run_dir / "workers" / id).exists():
        yield f"the folder of worker {id} outlives its unload"
    if has_process(id):
        yield f"the process of worker {id} outlives its unload"


def names(connection: http.client.HTTPConnection, limit: int = 100) -> list[str]:
    """The names of all models that the server or MMS lists, `limit` to a page."""
    found: list[str] = []
    query = f"/models?limit={limit}"
    try:
        connection.connect()
        connection.sock.settimeout(5)
        for _ in range(100):
            connection.request("GET", query)
            page = json.loads(connection.getresponse().read())
            found += [model["modelName"] for model in page["models"]]
            if (token := page.get("nextPageToken")) is None:
                break
            query = f"/models?limit={limit}&next_page_token={token}"
        return found
    finally:
        connection.close()
