"""The cores of all loaded models. A base and its adapters share a core."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable

from engine.model import Core, Model


class Cores:
    """Finds, opens and removes cores. Thread-safe: the condition `changed` guards all of them."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.by_name: dict[str, Core] = {}
        self._opening: set[Hashable] = set()  # keys of bases that a thread is opening
        self._names: set[str] = set()

    def has(self, key: Hashable) -> bool:
        """Return whether a loaded core has this key, so that an adapter would share it."""
        with self._changed:
            return self._find(key, is_adapter=True) is not None

    def _find(self, key: Hashable, is_adapter: bool) -> Core | None:
        cores = (core for core in self.by_name.values() if core.key == key)
        shared = (c for c in cores if is_adapter or any(m.adapter is not None for m in c.models))
        return next(shared, None)

    def take_name(self, name: str) -> str:
        """Reserve and return `name`, with a number behind it if another core has that name."""
        with self._changed:
            numbered = (f"{name} ({number})" for number in itertools.count(2))
            free = next(n for n in itertools.chain([name], numbered) if n not in self._names)
            self._names.add(free)
            return free

    def free_name(self, name: str) -> None:
        with self._changed:
            self._names.discard(name)

    def load(
        self,
        key: Hashable,
        open: Callable[[], Core],
        make: Callable[[Core], Model],
        is_adapter: bool,
    ) -> Model:
        """Make a model on the core with this key, which is opened first if it is not loaded.

        If several threads load adapters of one base at once, one of them opens the base. A whole
        model shares a core only with its own adapters. `make` is called with the lock, so it must
        not wait for anything, a file included. Raises what `open` raises.
        """
        with self._changed:
            while is_adapter and key in self._opening:
                self._changed.wait()
            core = self._find(key, is_adapter)
            if core is not None:
                return self._add(core, make)
            if is_adapter:
                self._opening.add(key)
        try:
            core = open()
            with self._changed:
                self.by_name[core.name] = core
                return self._add(core, make)
        finally:
            with self._changed:
                if is_adapter:
                    self._opening.discard(key)
                self._changed.notify_all()

    @staticmethod
    def _add(core: Core, make: Callable[[Core], Model]) -> Model:
        model = make(core)
        core.models.add(model)
        return model

    def remove(self, model: Model) -> bool:
        """Remove a model; return True if it was the last on its core, which the caller closes."""
        with self._changed:
            core = model.core
            core.models.remove(model)
            if core.models:
                return False
            self.forget(core)
            self._names.discard(core.name)
            return True

    def forget(self, core: Core) -> None:
        """Remove a core, so that no new model shares it.

        Its name is taken until its last model is removed.
        """
        with self._changed:
            self.by_name.pop(core.name, None)
