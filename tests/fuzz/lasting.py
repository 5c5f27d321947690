"""What hostile requests must not change: a server's processes, the files around it, its memory, a
log without errors, and the time of the engine's steps."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.server import Server
from tests.e2e.stores import statistics

# No request may end these processes.
PROCESSES = (
    *("serving.gateway", "ModelServer", "handlers.host", "-m engine ", "model_service_worker"),
    *("handlers.worker", "handlers/user_code/child.py"),
)
ZYGOTE = "engine.sandbox.zygote"
# Of gateway and engine each: a few of the largest bodies at once as Python objects, and what malloc
# keeps of them. A long run shows leaks.
GROWTH_BYTES = 300 << 20
# The goal, 100 ms, is for a quiet machine; on a busy one the clock counts other processes, too.
STEP_S = 10.0
PREPARED = ".prepared"  # the server's own folder beside a model


class Lasting:
    """`folder` has the server, its store, `HOME` and `TMPDIR`."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self._folder = server, folder
        self.processes = self._processes()
        self._files = self._around()
        self._rss_bytes = self._memory()

    def _processes(self) -> dict[int, str]:
        found = {p for words in PROCESSES for p in self.server.descendants(words)}
        engines = {p.pid for p in self.server.descendants("-m engine ")}
        found |= {p for p in self.server.descendants(ZYGOTE) if p.ppid() in engines}
        return {p.pid: " ".join(p.cmdline()) for p in found}

    def _around(self) -> dict[str, bytes | None]:
        """All paths beside the server's own folder and log, with the content of files."""
        found: dict[str, bytes | None] = {}
        own = {self.server.run_dir, self.server.log}
        for path in self._folder.rglob("*"):
            if not own & {path, *path.parents} and PREPARED not in path.parts:
                found[str(path.relative_to(self._folder))] = (
                    path.read_bytes() if path.is_file() else None
                )
        return found

    def _memory(self) -> dict[str, int]:
        return {
            words: sum(p.memory_info().rss for p in self.server.descendants(words))
            for words in ("serving.gateway", "-m engine ")
        }

    def check_memory(self) -> None:
        grown = {words: now - self._rss_bytes[words] for words, now in self._memory().items()}
        assert max(grown.values()) <= GROWTH_BYTES, grown

    def check(self, *, alone: bool = True) -> None:
        """Checks all after the requests. One of several clients (not `alone`) unloads a model that
        another loads, which MMS and workers log as errors."""
        living = {process.pid for process in self.server.descendants()}
        lost = {pid: line for pid, line in self.processes.items() if pid not in living}
        assert not lost, lost
        words = ('"traceback"', '"error"')[: 1 + alone]
        log = self.server.text().splitlines()
        failed = [line for line in log if any(word in line for word in words)]
        assert not failed, failed[:3]
        files = self._around()
        paths = sorted(files.keys() | self._files.keys())
        changed = [p for p in paths if files.get(p, b"?") != self._files.get(p, b"?")]
        assert not changed, changed[:10]
        self.check_memory()
        longest_s = statistics(self.server)["longest_step_s"]
        assert longest_s <= STEP_S, longest_s
