"""`kogpt2 package`: checks a model's folder and packs it."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command.blas import single_threaded_blas
from command.options import argument, option


@dataclass(kw_only=True)
class Package:
    folder: Path = argument("the model's folder, or an archive of it")
    out: Path | None = option(None, "the archive to write (FOLDER.tar.gz)")
    base: Path | None = option(None, "pack the model as a delta of this one, without its weights")
    check: bool = option(False, "check only, write nothing")
    text: Path | None = option(
        None, "lines on which int8 is compared with fp32 (the model's own greedy texts)"
    )
    compare: bool = option(True, "compare int8 with fp32", "--compare/--no-compare")


def run(options: Package) -> None:
    """Check a model's folder as the server would, and pack it as NAME.tar.gz.

    Shows what int8 changes in a model that is served in it. The same files give the same bytes.
    Hidden files and the state of transformers' Trainer, such as optimizer.pt, are left out.

    Examples:
    kogpt2 package my-model                            writes my-model.tar.gz beside the folder
    kogpt2 package my-model --out store/poem.tar.gz
    kogpt2 package my-model --text lines.txt           compares int8 with fp32 on these lines
    kogpt2 package my-model --base kogpt2              packs what it adds to its base
    kogpt2 package my-model --check                    checks it and writes nothing
    """
    single_threaded_blas()
    from tqdm import tqdm

    from command.documents import read_text
    from command.errors import Problem
    from common.misnamed import misnamed
    from scripts.artifacts.archive import SUFFIX, check, check_target, write_archive
    from scripts.artifacts.comparison import report
    from scripts.artifacts.folder import model_folder

    texts = read_text(options.text).splitlines() if options.text else []
    given = options.folder.resolve()
    target = options.out or given.with_name(given.name + SUFFIX)
    if given.is_file() and not (options.check or options.out):
        raise Problem(f"{options.folder} is a file: give --out NAME{SUFFIX}, or --check")
    if not options.check:
        check_target(target)
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(model_folder(given))
        for warning in misnamed(folder):
            print(f"{options.folder}: {warning}", file=sys.stderr)
        checked = check(folder)
        if options.base is not None:
            checked = check(_delta(options, folder, texts, opened))
        print(f"{options.folder}: {checked.summary}")
        if options.compare and checked.in_int8:
            print(f"{options.folder}: {report(options.folder, checked.in_int8, texts)}")
        if options.check:
            return
        with tqdm(
            total=checked.num_bytes,
            desc="packing",
            unit="B",
            unit_scale=True,
            disable=None,
            leave=False,
        ) as packing:
            write_archive(checked, target, packing.update)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def _delta(
    options: Package, folder: Path, texts: Sequence[str], opened: contextlib.ExitStack
) -> Path:
    """Make a model's delta in a folder that lasts as long as `opened`; prints what it changes."""
    from scripts.artifacts import comparison, conversion
    from scripts.artifacts.folder import model_folder

    assert options.base is not None
    whole = conversion.open_source(folder, classifies=True)
    base = conversion.open_source(opened.enter_context(model_folder(options.base.resolve())))
    cache, made = (
        Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="package-"))) for _ in "12"
    )
    print(conversion.to_delta(whole, base, made, cache))
    if options.compare and whole.classifier is None:
        for line in comparison.report_delta(options.folder, made, whole, base, texts, cache):
            print(line)
    return made
