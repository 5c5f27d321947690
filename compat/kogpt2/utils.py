"""Finds in the model's own folder the files that the original package downloads."""

from __future__ import annotations

import os
from pathlib import Path

tokenizer = {
    "url": "",
    "fname": "kogpt2_news_wiki_ko_cased_818bfa919d.spiece",
    "chksum": "818bfa919d",
}


def get_tokenizer(cachedir: str = "~/kogpt2/") -> str:
    """Return the path of the model's `*.spiece` file. Raises `FileNotFoundError`."""
    return str(find(tokenizer["fname"], "*.spiece", cachedir))


def download(url: str, filename: str, chksum: str = "", cachedir: str = "~/kogpt2/") -> str:
    """Find the model's file `filename` without a download. Raises `FileNotFoundError`."""
    return str(find(filename, filename, cachedir))


def find(name: str, pattern: str, cachedir: str) -> Path:
    """Find the file `name` in the model's folder or `cachedir`, or the only match of `pattern`."""
    model = Path(os.environ.get("SM_MODEL_DIR", "."))
    folders = [model, Path(cachedir).expanduser()]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
        matches = (folder.glob(pattern), folder.rglob(pattern))
        # macOS's `._NAME` is no model.
        visible = (sorted(p for p in paths if not p.name.startswith(".")) for paths in matches)
        paths = next(filter(None, visible), [])
        if len(paths) == 1:
            return paths[0]
        if paths:
            names = ", ".join(path.name for path in paths)
            raise FileNotFoundError(f"{folder} holds several {pattern}: {names}; must be one")
    raise FileNotFoundError(
        f"there is no {pattern} in {model}; this server downloads none: put it into the artifact"
    )
