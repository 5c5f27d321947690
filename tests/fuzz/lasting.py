"""What a server has before hostile requests and has after them: its processes, the files around it,
its memory, its log without errors, a thread of steps that nothing holds up."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.server import Server
from tests.e2e.stores import statistics

# Nothing a client sends may end these: of workers and scripts, those that are there before.
PROCESSES = (
    *("serving.gateway", "ModelServer", "handlers.host", "-m engine ", "model_service_worker"),
    *("handlers.worker", "handlers/user_code/child.py"),
)
ZYGOTE = "engine.sandbox.zygote"
# Of gateway and engine each, from the loaded models on: some bodies of the largest size at once, as
# Python holds them, and what malloc keeps of that. A long run shows what leaks.
GROWTH_BYTES = 300 << 20
# A step that something holds up. The goal, 100 ms, is one for a quiet machine: on a busy one the
# clock counts others too, so the bound is wide and the result shows the longest.
STEP_S = 10.0
PREPARED = ".prepared"  # what the server adds to a model that it may write to


class Lasting:
    """`folder` is where the server, its store, `HOME` and `TMPDIR` are."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self._folder = server, folder
        self.processes = self._processes()
        self._files = self._around()
        self._grown = {"serving.gateway": 0, "-m engine ": 0}
        self._rss_bytes = self._memory()

    def _processes(self) -> dict[int, str]:
        found = {p for words in PROCESSES for p in self.server.descendants(words)}
        engines = {p.pid for p in self.server.descendants("-m engine ")}
        found |= {p for p in self.server.descendants(ZYGOTE) if p.ppid() in engines}
        return {p.pid: " ".join(p.cmdline()) for p in found}

    def _around(self) -> dict[str, bytes | None]:
        """All beside the server's own folder and log; of files what they hold."""
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
            for words in self._grown
        }

    def look(self) -> None:
        """Memory is as it may be; asked for now and then."""
        for words, now in self._memory().items():
            self._grown[words] = max(self._grown[words], now - self._rss_bytes[words])
        assert max(self._grown.values()) <= GROWTH_BYTES, self._grown

    def check(self, *, alone: bool = True) -> str:
        """After the requests; says what was measured. Of several clients, one unloads what another
        loads, which MMS and workers log as errors."""
        living = {process.pid for process in self.server.descendants()}
        lost = {pid: line for pid, line in self.processes.items() if pid not in living}
        assert not lost, lost
        failed = [
            line
            for line in self.server.text().splitlines()
            if '"traceback"' in line or (alone and '"error"' in line)
        ]
        assert not failed, failed[:3]
        files = self._around()
        changed = {
            path
            for path in files.keys() | self._files.keys()
            if files.get(path, b"?") != self._files.get(path, b"?")
        }
        assert not changed, sorted(changed)[:10]
        self.look()
        longest_s = statistics(self.server)["longest_step_s"]
        assert longest_s <= STEP_S, longest_s
        gateway, engine = (grown >> 20 for grown in self._grown.values())
        return (
            f"longest step {longest_s * 1e3:.0f} ms;"
            f" grown at most: gateway {gateway} MiB, engine {engine} MiB;"
            f" {len(self.processes)} processes and {len(self._files)} files as they were"
        )
