"""The cores of all loaded models: a base and its adapters share one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable

from engine.model import Core, Model


class Cores:
    """Finds, opens and drops cores. Thread-safe: `changed` guards them."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.by_name: dict[str, Core] = {}
        self._opening: set[Hashable] = set()  # keys
        self._names: set[str] = set()

    def has(self, key: Hashable) -> bool:
        """Whether an adapter of this base would share a core that is loaded."""
        with self._changed:
            return self._find(key, is_adapter=True) is not None

    def _find(self, key: Hashable, is_adapter: bool) -> Core | None:
        cores = (core for core in self.by_name.values() if core.key == key)
        shared = (c for c in cores if is_adapter or any(m.adapter is not None for m in c.models))
        return next(shared, None)

    def take_name(self, name: str) -> str:
        """Reserve a name like this one that no other core has, until `forget` or `free_name`."""
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
        """Have `make` create a model on the core of this key, opened by `open` if it is not loaded.

        Of several loads of adapters at once, one opens their base. A whole model shares a core only
        with adapters of it. Raises what `open` and `make` raise.
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
        """Remove a model from its core; returns whether that is empty, for the caller to close."""
        with self._changed:
            core = model.core
            core.models.remove(model)
            if core.models:
                return False
            self.forget(core)
            return True

    def forget(self, core: Core) -> None:
        """Share a core with no further model."""
        with self._changed:
            self.by_name.pop(core.name, None)
            self._names.discard(core.name)
