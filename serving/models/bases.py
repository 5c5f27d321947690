"""Locates the base models of adapters, by the names in the adapters' files."""

from __future__ import annotations

import asyncio
import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from common.model_files import ADAPTER, is_adapter
from common.settings import comma_separated
from serving.errors import BadRequest, ModelNotInStore, NotAModel, StartError, UrlNotAllowed
from serving.models.model_settings import FILE, ModelSettings, read_object
from serving.store import Lookups, StoredModel

MAX_CONFIG_BYTES = 1 << 20


class Bases:
    """Maps adapters to base models of the store."""

    def __init__(self, lookups: Lookups, known: str) -> None:
        """`known` is `ADAPTER_BASES`. Raises `StartError`."""
        self._lookups, self._known = lookups, parse(known)

    async def find(self, folder: Path, settings: ModelSettings) -> StoredModel | None:
        """The base of the adapter in `folder`; None if it has a whole model.

        It is the model that the adapter's own `base` setting names; else what ADAPTER_BASES has for
        the base that the adapter was trained on; else the model of that name in the store, or of
        the last part of it: of `skt/kogpt2-base-v2` and of `/home/me/kogpt2-base-v2` that is
        `kogpt2-base-v2`. Raises `BadRequest`, and errors of the store.
        """
        name = await asyncio.to_thread(base_name, folder)
        if name is None:
            if settings.base is not None:
                raise BadRequest(
                    f"base is {settings.base!r}, but the model is no adapter (it has no {ADAPTER})"
                )
            return None
        candidates = self._candidates(name, settings)
        for candidate in candidates:
            try:
                return await self._lookups.locate(candidate)
            except (ModelNotInStore, UrlNotAllowed):
                continue
            except NotAModel as error:
                raise BadRequest(f"the base of the adapter is no model: {error.message}") from None
        tried = ", ".join(candidates) or "nothing, because it gives no name"
        raise BadRequest(
            f"the model is an adapter of {name!r}, which is not in the store (looked for: {tried});"
            f" put its base there under that name, or name the one that is: by base in {FILE} or in"
            " the load request, or for all adapters by ADAPTER_BASES"
        )

    def _candidates(self, name: str, settings: ModelSettings) -> list[str]:
        """Names or addresses of the base `name`, in order of preference."""
        if settings.base is not None:
            return [settings.base]
        for pattern, known in self._known.items():
            if fnmatch.fnmatchcase(name, pattern):
                return [known]
        if "://" in name:
            return []
        last = PurePosixPath(name.replace("\\", "/")).name
        whole = [] if name.startswith(("/", ".", "~")) or "\\" in name else [name]
        return [candidate for candidate in dict.fromkeys((*whole, last)) if candidate]


def parse(text: str) -> Mapping[str, str]:
    """`skt/kogpt2-base-v2=kogpt2,/home/*=other` -> by pattern, in order. Raises `StartError`."""
    known = {}
    for entry in comma_separated(text):
        pattern, separator, name = (part.strip() for part in entry.partition("="))
        if not (pattern and separator and name):
            raise StartError(
                f"ADAPTER_BASES has {entry!r}; entries are NAME=MODEL, separated by commas"
            )
        known[pattern] = name
    return known


def base_name(folder: Path) -> str | None:
    """The base's name in the file of the adapter, perhaps empty; None if there is no adapter.

    Raises `BadRequest` for an invalid file.
    """
    try:
        with os.scandir(folder) as entries:
            names = {entry.name for entry in entries if entry.is_file()}
    except OSError:  # its load fails with this error
        return None
    if not is_adapter(names):
        return None
    name = read_object(folder / ADAPTER, MAX_CONFIG_BYTES).get("base_model_name_or_path")
    return name if isinstance(name, str) else ""
