"""Removes trees of untrusted files, of any depth and with any permissions."""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path

logger = logging.getLogger(__name__)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content; a path that does not exist is ignored.

    Failures are logged.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            _remove_tree(str(path))
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)


def _remove_tree(root: str) -> None:
    """Remove a folder of any depth.

    Subfolders are moved up before they are emptied, so neither the stack nor a path grows with the
    depth.
    """
    pending = [root]
    while pending:
        folder = pending.pop()
        os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            children = list(entries)
        for child in children:
            if not child.is_dir(follow_symlinks=False):
                os.unlink(child.path)
                continue
            pending.append(child.path)
            if folder != root:
                os.chmod(child.path, 0o700)
                pending[-1] = os.path.join(root, f".{uuid.uuid4().hex}")
                os.rename(child.path, pending[-1])
        if folder != root:
            os.rmdir(folder)
    os.rmdir(root)
