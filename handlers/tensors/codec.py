"""Decodes and encodes tensors in JSON, CSV and NPY, checked against a model's inputs.

Values must fit the datatype: none is truncated, rounded to an integer, or read as NaN.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from common.errors import InvalidRequest, NotAcceptable, UnsupportedMediaType, quoted
from common.json_body import read_text
from common.media_types import JSON

Array = NDArray[Any]
npy: Any = np.lib.format

CSV = "text/csv"
NPY = "application/x-npy"
# In bytes: enough for 32 dimensions. numpy parses a header as Python: 9,000 minus signs take 0.1 s.
MAX_NPY_HEADER = 1024
MEDIA_TYPES = (JSON, CSV, NPY)

# The datatypes of the Open Inference Protocol. BYTES are texts, in arrays of dtype object.
DATATYPES = {
    "BOOL": np.dtype(bool),
    **{f"UINT{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "BYTES": np.dtype(object),
}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
DTYPES = ", ".join(map(str, NAMES))  # for messages


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model. In `shape`, a dimension of any size is a name or None."""

    name: str
    datatype: str
    shape: tuple[int | str | None, ...]
    # Whether the model can also compute a shape that differs from `shape`.
    accepts: Callable[[tuple[int, ...]], bool] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return DATATYPES[self.datatype]

    @property
    def v2_shape(self) -> list[int]:
        """The shape with -1 for dimensions of any size."""
        return [size if isinstance(size, int) else -1 for size in self.shape]

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.datatype} [{sizes}]"

    def check_shape(self, shape: Sequence[int]) -> None:
        """Check a tensor's shape. Raises `InvalidRequest`, which names the right shape."""
        fits = len(shape) == len(self.shape) and all(
            not isinstance(expected, int) or size == expected
            for size, expected in zip(shape, self.shape, strict=True)
        )
        positive = min(shape, default=0) > 0
        if not fits and not (self.accepts and positive and self.accepts(tuple(shape))):
            raise InvalidRequest(f"{self.name} has shape {list(shape)}, must be {self}")


def listed(specs: Sequence[TensorSpec]) -> str:
    """List names and types for messages: `input_ids INT64 [batch, sequence], ...`."""
    return ", ".join(f"{spec.name} {spec}" for spec in specs) or "no inputs"


# From values


def from_values(value: Any, spec: TensorSpec) -> Array:
    """Convert nested lists to an array of the spec's datatype and of any shape."""
    if spec.datatype == "BYTES":
        return _texts(value, spec)
    if _holds_text(value):
        raise InvalidRequest(f"{spec.name} holds values that are no numbers, must be {spec}")
    try:
        array = np.array(value)
    except ValueError:
        raise InvalidRequest(f"{spec.name} has rows of different lengths, must be {spec}") from None
    if array.dtype.kind in "fO" and spec.dtype.kind in "iu":
        return _exact_integers(value, array, spec)
    return cast(array, spec)


def _holds_text(value: Any) -> bool:
    """Return whether nested lists hold a text, since numpy would convert all values to texts."""
    level = [[value]]
    while level:
        kinds = set(map(type, chain.from_iterable(level)))
        if str in kinds:
            return True
        level = [v for row in level for v in row if type(v) is list] if list in kinds else []
    return False


def _exact_integers(value: Any, array: Array, spec: TensorSpec) -> Array:
    """Convert integers exactly; numpy makes floats of a list with integers beyond int64."""
    exact = np.array(value, dtype=object)
    if exact.size == 0 or not all(type(number) is int for number in exact.ravel()):
        return cast(array, spec)
    _check_range(int(exact.min()), int(exact.max()), spec)
    return exact.astype(spec.dtype)


def _texts(value: Any, spec: TensorSpec) -> Array:
    array = np.array(value, dtype=object)
    for text in array.ravel():
        if not isinstance(text, str):
            content = "rows of different lengths" if isinstance(text, list) else quoted(text, 50)
            raise InvalidRequest(f"{spec.name} holds {content}, must be texts: {spec}")
    return array


def cast(array: Array, spec: TensorSpec) -> Array:
    """Convert an array to the spec's datatype. Raises `InvalidRequest` if a value does not fit."""
    dtype, kind = spec.dtype, array.dtype.kind
    if array.dtype == dtype:
        return array
    if array.size == 0 and kind in "iuf":  # an empty list is float64 in numpy
        return array.astype(dtype)
    if spec.datatype == "BOOL" and kind in "iu" and not ((array != 0) & (array != 1)).any():
        return array.astype(bool)
    if kind not in {"f": "iuf", "i": "iu", "u": "iu"}.get(dtype.kind, ""):
        raise InvalidRequest(f"{spec.name} holds {_kind(array)}, must be {spec}")
    if dtype.kind in "iu":
        _check_range(int(array.min()), int(array.max()), spec)
        return array.astype(dtype)
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    overflowed = np.isinf(converted) & np.isfinite(array)
    if overflowed.any():
        raise _out_of_range(array[overflowed][0], spec)
    return converted


def _check_range(low: int, high: int, spec: TensorSpec) -> None:
    limits = np.iinfo(spec.dtype)
    if low < limits.min or high > limits.max:
        raise _out_of_range(low if low < limits.min else high, spec)


def _out_of_range(value: Any, spec: TensorSpec) -> InvalidRequest:
    return InvalidRequest(f"{spec.name} holds {value}, out of range for {spec.datatype}")


def _kind(array: Array) -> str:
    kinds = {"b": "true and false", "i": "integers", "u": "integers", "f": "fractions"}
    return kinds.get(array.dtype.kind, "values that are no numbers")


# From bytes


def parse_json(body: bytes | str) -> Any:
    """Parse a JSON body. Raises `InvalidRequest`, also for NaN and Infinity."""
    try:
        return orjson.loads(read_text(body))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def decode(body: bytes, media_type: str, spec: TensorSpec) -> Array:
    """Decode a body that is one tensor. Raises `InvalidRequest`, `UnsupportedMediaType`."""
    if media_type == JSON:
        array = from_values(parse_json(body), spec)
    elif media_type == CSV:
        array = _from_csv(body, spec)
    elif media_type == NPY:
        array = cast(from_npy(body), spec)
    else:
        raise UnsupportedMediaType(
            f"Content-Type is {media_type}, must be one of {', '.join(MEDIA_TYPES)}"
        )
    spec.check_shape(array.shape)
    return array


def _from_csv(body: bytes, spec: TensorSpec) -> Array:
    """Decode CSV: a line for each row of the tensor, or several lines, such as an image's."""
    try:
        text = body.decode("utf-8-sig")
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True) if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(f"the body is not CSV in UTF-8: {error}") from None
    if not lines:
        raise InvalidRequest(f"the body is empty, must be {spec} as lines of numbers")
    rows = [[_cell(c, i, j, spec) for j, c in enumerate(r, 1)] for i, r in enumerate(lines, 1)]
    fixed = [size for size in spec.shape[1:] if isinstance(size, int)]
    if len(fixed) < len(spec.shape) - 1:
        return from_values(rows, spec)
    values = [value for row in rows for value in row]
    per_row = math.prod(fixed)
    if not per_row or len(values) % per_row:
        raise InvalidRequest(
            f"{spec.name} has {len(values)} values, must be a multiple of {per_row}: {spec}"
        )
    return from_values(values, spec).reshape(-1, *fixed)


def _cell(cell: str, line: int, column: int, spec: TensorSpec) -> int | float | str:
    if spec.datatype == "BYTES":
        return cell
    try:
        value = int(cell) if spec.dtype.kind in "iub" else float(cell)
        if math.isfinite(value) and "_" not in cell:  # Python reads 1_000 as 1000
            return value
    except (ValueError, OverflowError):
        pass
    what = "a number" if spec.dtype.kind == "f" else "an integer"
    raise InvalidRequest(f"line {line}, value {column} is {cell[:50]!r}, must be {what}")


def from_npy(body: bytes) -> Array:
    """Decode NPY of numbers. Never unpickles, nor allocates more bytes than the body has."""
    file = io.BytesIO(body)
    try:
        version = npy.read_magic(file)
        if version in ((1, 0), (2, 0)):
            first = version == (1, 0)
            read = npy.read_array_header_1_0 if first else npy.read_array_header_2_0
            shape, fortran, dtype = read(file, max_header_size=MAX_NPY_HEADER)
    except Exception as error:  # numpy evaluates the header, which raises many kinds of errors
        reason = str(error).split("\n")[0] or type(error).__name__
        raise InvalidRequest(f"the body is not NPY: {reason}") from None
    if version not in ((1, 0), (2, 0)):
        raise InvalidRequest(f"the body is NPY of version {version}, must be 1.0 or 2.0")
    if dtype.kind not in "biuf":
        raise InvalidRequest(f"the body is NPY of {dtype}, must be of numbers")
    count, rest = math.prod(shape), len(body) - file.tell()
    if min(shape, default=0) < 0 or count * dtype.itemsize != rest:
        raise InvalidRequest(
            f"the body announces {list(shape)} of {dtype}, {count * dtype.itemsize} bytes, but"
            f" holds {rest}"
        )
    array = np.frombuffer(body, dtype, count, file.tell())
    try:
        array = array.reshape(shape, order="F" if fortran else "C")
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the body announces a shape that no array has: {error}") from None
    native: Array = array.astype(dtype.newbyteorder("="), order="C", copy=False)
    return native


# To bytes


def encode(outputs: Mapping[str, Array], media_type: str) -> bytes:
    """Encode a single output, or several as a JSON object by name. Raises `NotAcceptable`."""
    if media_type == JSON:
        single = len(outputs) == 1
        return to_json(next(iter(outputs.values())) if single else dict(outputs))
    if len(outputs) != 1:
        raise NotAcceptable(
            f"Accept is {media_type}, which holds one tensor, but the model gives"
            f" {', '.join(outputs)}; {JSON} holds them all"
        )
    (array,) = outputs.values()
    if media_type == NPY:
        if array.dtype == object:
            array = array.astype(str)
        file = io.BytesIO()
        npy.write_array(file, array, allow_pickle=False)
        return file.getvalue()
    text = io.StringIO()
    rows = array.reshape(len(array) if array.ndim else 1, math.prod(array.shape[1:]))
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8")


def to_json(value: Any) -> bytes:
    """Encode a value that may contain arrays as JSON.

    NaN and Infinity, which are not JSON, are written as `NaN` and `Infinity`, as by Python's `json`
    and Triton.
    """
    if _all_finite(value):
        return orjson.dumps(value, default=_to_list, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(value, default=_to_list, ensure_ascii=False).encode("utf-8")


def _all_finite(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    if isinstance(value, Mapping):
        return all(map(_all_finite, value.values()))
    return not isinstance(value, list) or all(map(_all_finite, value))


def _to_list(array: Any) -> Any:
    """Convert an array that orjson cannot write, because it has texts or is not contiguous."""
    return array.tolist()
