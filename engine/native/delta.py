"""Deltas: whole fine-tunes as what they add to a base, so that they share its weights and steps.

For each matrix of the base in int8, a delta has the largest directions of its difference from the
fine-tune's, as an adapter has them (`engine.native.adapter`), and a few bits a number of the rest.
Biases, the final LayerNorm and the rows of tokens that the base does not have are the fine-tune's
own. The difference is that from the base as it is quantized, so that a delta takes back the base's
rounding, too.

BitDelta: https://arxiv.org/abs/2402.10193. Delta-CoMe, of low rank and few bits:
https://arxiv.org/abs/2406.08903.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.cpus import cpu_count
from common.errors import ArtifactError
from common.memory import MIB
from engine.artifacts import artifact as names
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.native import library, prepared, rotation
from engine.native.adapter import NativeAdapter, fp16, grouped, padded
from engine.native.prepared import PreparedFile, Sources, Stored, open_prepared, write_arrays
from engine.native.rotation import Floats
from engine.prepared import manifest as manifests
from engine.prepared.manifest import Run, directly
from engine.sandbox import Limits

FORMAT = 1  # raise it when what a delta is changes
VERSION = f"{FORMAT} on {prepared.FORMAT}"  # of a delta on its base in int8
RANKS, BITS = (8, 16, 32), (1, 2, 3)
# The rule by which a matrix gets rank and bits: in at most so many of its columns, what they leave
# of the difference is more than so many times the error of int8 in the fine-tune's own column, in
# sums of squares. All columns together say too little: of the embedding's rows, few moved, and they
# are in use. Fine-tunes had 0.4 to 1.4 times the KL of int8 (docs/develop/benchmark.md).
WORSE_COLUMNS, MORE_THAN_INT8 = 0.1, 1.2
LEFT_BY_BITS = {1: 0.571, 2: 0.133, 3: 0.0358}  # of the squares of what the rank leaves
MOST_BYTES = 60_000_000  # of a delta, which has fewer bytes than the whole model, too
ROWS_AT_ONCE = 4096  # of a matrix; whole groups
OVERSAMPLING, ITERATIONS = 8, 2  # of the randomized search for the largest directions
BUILD_MIB, BUILD_TIMES_FP32, BUILD_CPU_S = 512, 6, 120

Choices = Mapping[str, tuple[int, int]]  # rank and bits by a matrix's name


class NoDelta(ArtifactError):
    """A model cannot be served as a delta of its base; the message is the reason."""


@dataclass(frozen=True)
class Delta:
    """A fine-tune, its base, and the mapped file of what the fine-tune adds."""

    whole: Artifact
    base: Artifact
    file: PreparedFile

    @property
    def num_bytes(self) -> int:
        return self.file.num_bytes

    @property
    def more(self) -> int:
        """How many tokens it has that its base does not have."""
        return self.whole.config.vocab_size - self.base.config.vocab_size

    @property
    def summary(self) -> str:
        """What was chosen for its matrices, for people."""
        counts = Counter(choices_of(self.file.metadata).values())
        kinds = [f"{n} of rank {rank}, {bits} bits" for (rank, bits), n in sorted(counts.items())]
        return f"{self.num_bytes / 1e6:.1f} MB; matrices: {'; '.join(kinds)}"

    def described(self, base: Artifact) -> Artifact:
        """Return the artifact with the tokenizer and the generation settings."""
        return self.whole

    def close(self) -> None:
        self.file.close()

    def load(self) -> NativeAdapter:
        """Return it as an adapter of the base, which closes the file."""
        config, choices, more = self.whole.config, choices_of(self.file.metadata), self.more
        tensors = {
            entry.name: (self.file.addresses[entry.name], entry.shape)
            for entry in layout(config, choices, more)
        }
        bits = {name: bits for name, (_, bits) in choices.items()}
        if config.tie_word_embeddings:
            bits["head"] = bits["embedding"]
            for part in ("up", "rest"):
                if (name := f"embedding.{part}") in tensors:
                    tensors[f"head.{part}"] = tensors[name]
            if more:
                tensors["adapter.more_head"] = tensors["adapter.more_embedding"]
        file = self.file
        return NativeAdapter(config, tensors, self.num_bytes, file.close, file, bits, more)


def open_delta(
    whole: Artifact,
    base: Artifact,
    cache_dir: Path | None = None,
    run: Run = directly,
    progress: Callable[[], object] | None = None,
) -> Delta:
    """Map the prepared file of a fine-tune's delta, which `run` builds if needed.

    Raises `NoDelta`, and as `engine.native.prepared.prepared`, which also prepares the base.

    progress: called after each matrix, on any thread, where `run` builds in this process
    """
    check_shape(whole.config, base)
    more = whole.config.vocab_size - base.config.vocab_size
    largest = dict.fromkeys(matrices(whole.config, more), (RANKS[-1], BITS[-1]))
    base_model = prepared.prepared(base, "int8", cache_dir, run)
    if not base_model.file.path.exists():
        base_model.close()
        raise NoDelta("no folder can hold the base's prepared file")
    try:
        whole = replace(whole, content=whole.content or manifests.content_of(whole))
        base = replace(base, content=base.content or manifests.content_of(base))
        content = f"{whole.content} {base.content}"
        limits = Limits(
            memory_mib=BUILD_MIB + BUILD_TIMES_FP32 * whole.fp32_bytes // MIB,
            cpu_s=BUILD_CPU_S + whole.fp32_bytes // prepared.BUILD_BYTES_PER_CPU_S,
            niceness=manifests.NICENESS,
        )
        file = open_prepared(
            whole.path,
            ["delta", FORMAT, content, prepared.non_defaults(whole.config)],
            lambda metadata: layout(whole.config, choices_of(metadata), more),
            list(layout(whole.config, largest, more)),
            content,
            cache_dir,
            functools.partial(
                run,
                build if progress is None else functools.partial(build, progress=progress),
                prepared.sources_of(whole),
                prepared.sources_of(base),
                str(base_model.file.path),
                content,
                what=whole.path.name,
                limits=limits,
            ),
        )
    finally:
        base_model.close()
    if reason := file.metadata.get("whole"):
        file.close()
        raise NoDelta(reason)
    return Delta(whole, base, file)


def check_shape(config: GPT2Config, base: Artifact) -> None:
    """Raise `NoDelta` unless a model has the shape of a base.

    Its head may be its own, and its vocabulary may have more tokens.
    """
    of_base = asdict(base.config)
    of_base["tie_word_embeddings"] &= config.tie_word_embeddings
    of_base["vocab_size"] = max(of_base["vocab_size"], config.vocab_size)
    for name, value in asdict(config).items():
        if value != of_base[name]:
            raise NoDelta(f"its {name} is {value}, that of its base {of_base[name]}")


def choices_of(metadata: Mapping[str, str]) -> Choices:
    """Return ranks and bits from a file's metadata, none if it has a reason for a whole model.

    Raises `ArtifactError`.
    """
    try:
        values = json.loads(metadata.get("choices", "{}"))
        choices = {name: (int(rank), int(bits)) for name, (rank, bits) in values.items()}
    except (ArithmeticError, AttributeError, TypeError, ValueError, RecursionError):
        raise ArtifactError("the delta's ranks and bits are damaged") from None
    for rank, bits in choices.values():
        if not 0 <= rank <= library.MAX_RANK or bits not in BITS:
            raise ArtifactError(f"a matrix of the delta has rank {rank} and {bits} bits")
    return choices


def matrices(config: GPT2Config, more: int = 0) -> dict[str, tuple[int, int]]:
    """Return the shapes (n, k) of the matrices that change, by the library's names.

    config: of the fine-tune, which has `more` tokens than its base
    """
    shapes = dict(names.shapes(replace(config, vocab_size=config.vocab_size - more)))
    sources = {
        f"{layer}.{product}": f"{pattern.format(layer)}.weight"
        for layer in range(config.num_layers)
        for product, pattern in names.PRODUCTS.items()
    }
    sources |= {"embedding": names.EMBEDDING, "head": names.OUTPUT}
    # A tied head has no matrix of its own.
    own = {name: shapes[source] for name, source in sources.items() if source in shapes}
    return {name: (n, k) for name, (n, k) in own.items()}


def layout(config: GPT2Config, choices: Choices, more: int) -> Iterator[Stored]:
    """Yield the tensors of a delta's prepared file, in order, named after `Adapter` in pass.h."""
    line = library.LINE

    def thin(name: str, n: int, k: int) -> Stored:
        return Stored(name, (-(-n // line), k, line), "F16")

    if not choices:  # the fine-tune is no delta
        return
    for name, (n, k) in matrices(config, more).items():
        rank, bits = choices.get(name, (0, 0))
        if rank:
            yield thin(f"{name}.down", *((k, rank) if name == "embedding" else (rank, k)))
            yield thin(f"{name}.up", n, rank)
            if name == "embedding" and config.tie_word_embeddings:
                yield thin("head.down", rank, k)
        if bits:
            yield Stored(f"{name}.rest", (-(-n // line), library.rest_bytes(line, k, bits)), "U8")
        if name not in ("embedding", "head"):
            yield Stored(f"{name}.bias", (_whole_lines(n),), "F32")
        elif more:
            yield thin(f"adapter.more_{name}", more, k)
    yield Stored("adapter.positions", (config.max_length, _whole_lines(config.units)), "F16")
    for part in ("gamma", "beta"):
        yield Stored(f"final_norm.{part}", (_whole_lines(config.units),), "F32")


def _whole_lines(count: int) -> int:
    return -(-count // library.LINE) * library.LINE


# In the sandbox


def build(
    sources: Sources,
    base_sources: Sources,
    path: str,
    content: str,
    file: int,
    progress: Callable[[], object] = lambda: None,
) -> int:
    """Write a delta's prepared file, or why the fine-tune is no delta; returns its bytes.

    sources, base_sources: of the fine-tune and of its base
    path: the base's prepared file
    """
    whole, of_base = prepared.artifact_of(sources), prepared.artifact_of(base_sources)
    config, layout_of_base = whole.config, prepared.layout(of_base.config, "int8")
    more = config.vocab_size - of_base.config.vocab_size
    base = PreparedFile(Path(path), lambda _: layout_of_base, of_base.content)
    factors = [rotation.head_factors(of_base.weights, i) for i in range(config.num_layers)]
    changes, reason = dict[str, Change](), ""
    with ThreadPoolExecutor(cpu_count()) as pool:  # the largest first
        tasks = {
            name: pool.submit(_change, whole, base, factors, name, shape[0])
            for name, shape in reversed(matrices(config, more).items())
        }
        for task in tasks.values():
            task.add_done_callback(lambda _: progress())
        try:
            changes = {name: task.result() for name, task in tasks.items()}
        except NoDelta as error:
            pool.shutdown(cancel_futures=True)
            reason = error.message
    if base.is_lost():
        raise ArtifactError("the base's prepared file was overwritten while it was read")
    if reason:
        return write_arrays(file, [], {"source": content, "whole": reason}, {})
    arrays = {name: array for change in changes.values() for name, array in change.arrays.items()}
    positions = rotation.floats(whole.weights[names.POSITIONS])
    rotation.rotate_rows(positions, config.units)
    positions = np.pad(positions, ((0, 0), (0, -config.units % library.LINE)))
    arrays["adapter.positions"] = fp16("the positions", positions)
    for part in ("gamma", "beta"):
        vector = np.asarray(whole.weights[f"{names.FINAL_NORM}.{part}"], np.float32)
        arrays[f"final_norm.{part}"] = padded(vector)
    choices = {name: change.choice for name, change in changes.items()}
    entries = list(layout(config, choices, more))
    size = sum(e.num_bytes for e in entries)
    most = min(MOST_BYTES, prepared.num_bytes(config, "int8"))
    if size > most:
        reason = f"it is too far from its base: a delta would have {size} bytes of at most {most}"
        return write_arrays(file, [], {"source": content, "whole": reason}, {})

    metadata = {"source": content, "choices": json.dumps(choices)}
    # where it is an artifact
    about = {"format": VERSION, "config": json.dumps(asdict(config)), "more": str(more)}
    return write_arrays(file, entries, {**metadata, **about}, arrays)


@dataclass(frozen=True)
class Change:
    """The packed difference of a matrix, by its tensors' names."""

    choice: tuple[int, int]  # rank and bits
    arrays: dict[str, NDArray[Any]]


def _change(
    whole: Artifact, base: PreparedFile, factors: Sequence[Floats], name: str, rows: int
) -> Change:
    """Return a matrix's difference from the base's. Raises `NoDelta` if it is too large.

    factors: of the base's heads, by layers
    rows: of the base's matrix; the fine-tune's may have more
    """
    config, arrays = whole.config, dict[str, NDArray[Any]]()
    layer, _, product = name.rpartition(".")
    if layer:
        weight, bias = prepared.rotated_product(whole, int(layer), product, factors[int(layer)])
        bias -= _numbers(base.addresses[f"layers.{name}.bias"], len(bias))
        arrays[f"{name}.bias"] = padded(bias)
        address = base.addresses[f"layers.{name}.weight"]
    else:
        source = names.OUTPUT if name == "head" else names.EMBEDDING
        weight = rotation.floats(whole.weights[source])
        rotation.rotate_rows(weight, config.units)
        weight, more = weight[:rows], weight[rows:]
        if len(more):
            arrays[f"adapter.more_{name}"] = grouped(
                f"the further rows of {name}", more, np.float16
            )
        address = base.addresses.get(f"{name}.weight", base.addresses["embedding.weight"])
    errors = _int8_errors(weight)
    for part in _chunks(len(weight)):
        of_base = np.empty_like(weight[part])
        groups = part.start // library.LINE
        at = address + groups * library.packed_bytes(library.LINE, weight.shape[1], True)
        library.unpack_int8(at, *of_base.shape, of_base.ctypes.data)
        weight[part] -= of_base
    up, down = largest_directions(weight, RANKS[-1])
    rank, bits = _choose(name, weight, up, errors)
    up, down = _in_fp16(name, up[:, :rank], down[:rank])
    for part in _chunks(len(weight)):
        weight[part] -= up[part] @ down
    rest = np.empty(library.rest_bytes(*weight.shape, bits), np.uint8)
    library.pack_rest(weight.ctypes.data, *weight.shape, bits, rest.ctypes.data)
    arrays[f"{name}.rest"] = rest
    if product == "ffn_out":  # multiplied with what comes out of GELU before that is rotated
        rotation.rotate_rows(down, down.shape[1] // library.LINE, library.LINE)
        down = down[:, : config.hidden_size]
    arrays[f"{name}.up"] = grouped(name, up, np.float16)
    arrays[f"{name}.down"] = grouped(name, down.T if name == "embedding" else down, np.float16)
    if name == "embedding" and config.tie_word_embeddings:
        arrays["head.down"] = grouped(name, down, np.float16)
    return Change((rank, bits), arrays)


def _chunks(count: int) -> Iterator[slice]:
    """Yield ranges of rows, few enough that what is computed for them takes little memory."""
    for first in range(0, count, ROWS_AT_ONCE):
        yield slice(first, min(first + ROWS_AT_ONCE, count))


def largest_directions(matrix: Floats, rank: int) -> tuple[Floats, Floats]:
    """Return up (n, rank) and down (rank, k), whose product is nearest to a matrix (n, k), about.

    The rows of `down` are orthogonal and of length 1, the largest direction first. By randomized
    subspace iteration on the side of the inputs, which are fewer than the embedding's rows: Halko,
    Martinsson, Tropp 2011, https://arxiv.org/abs/0909.4061, algorithm 4.4. The same matrix has the
    same result.
    """
    shape = (matrix.shape[1], min(rank + OVERSAMPLING, *matrix.shape))
    basis = np.random.default_rng(0).standard_normal(shape, np.float32)
    for _ in range(ITERATIONS):
        basis = np.linalg.qr(matrix.T @ (matrix @ basis))[0]
    outputs = matrix @ basis
    wide = outputs.astype(np.float64)  # its squares take more digits than fp32 has
    largest = np.linalg.eigh(wide.T @ wide)[1][:, : -rank - 1 : -1].astype(np.float32)
    return outputs @ largest, np.ascontiguousarray((basis @ largest).T)


def _choose(name: str, difference: Floats, up: Floats, errors: Floats) -> tuple[int, int]:
    """Return the rank and bits of the fewest bytes for a matrix (n, k). Raises `NoDelta`.

    up: of `largest_directions`
    errors: of int8 in each column (n,)
    """
    n, k = difference.shape
    squares = np.einsum("ij,ij->i", difference, difference)
    choices = []
    for rank in sorted({min(rank, up.shape[1]) for rank in RANKS}):
        left = squares - np.einsum("ij,ij->i", up[:, :rank], up[:, :rank])
        choices += [
            (2 * rank * (n + k) + n * k * bits / 8, rank, bits)
            for bits in BITS
            if np.mean(left * LEFT_BY_BITS[bits] > MORE_THAN_INT8 * errors) <= WORSE_COLUMNS
        ]
    if not choices:
        raise NoDelta(f"it is too far from its base, above all in {name}")
    _, rank, bits = min(choices)
    return rank, bits


def _in_fp16(name: str, up: Floats, down: Floats) -> tuple[Floats, Floats]:
    """Return numbers of fp16 with the same product; both factors get a part of its size."""
    sizes = np.linalg.norm(up, axis=0)
    roots = np.sqrt(np.where(sizes > 0, sizes, 1))
    factors = (up / roots, down * roots[:, None])
    up, down = (fp16(name, x).astype(np.float32) for x in factors)
    return up, down


def _int8_errors(weight: Floats) -> Floats:
    """Return the sum of the squares of int8's errors in each column, (n,), of a matrix (n, k)."""
    lowest, highest = weight.min(axis=1, initial=0), weight.max(axis=1, initial=0)
    scales = (highest - lowest) / 254
    errors: Floats = np.square(scales) * (weight.shape[1] / 12)
    return errors


def _numbers(address: int, count: int) -> Floats:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
