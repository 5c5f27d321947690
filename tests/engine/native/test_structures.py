"""engine.native.library has the structures of pass.h: the same fields, in the same order."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from engine.native import library

HEADER = Path(library.__file__).with_name("pass.h").read_text("utf-8")
STRUCT = re.compile(r"typedef struct \{([^}]*)\} (\w+);")
MEMBER = re.compile(r"(?:const )?(\w+) (\**\w+(?:, \**\w+)*)")
NUMBERS = {"int32_t": ctypes.c_int32, "float": ctypes.c_float, "double": ctypes.c_double,
           "size_t": ctypes.c_size_t}  # fmt: skip


def declared(header: str) -> dict[str, list[tuple[str, str]]]:
    """The structures of a header: each field's name and type, in order; `*` ends a pointer's."""
    plain = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    structures = {}
    for body, name in STRUCT.findall(plain):
        fields = []
        for member in filter(None, map(str.strip, body.split(";"))):
            match = MEMBER.fullmatch(member)
            assert match is not None, f"{name}: this test cannot parse {member!r}"
            for field in match[2].split(", "):
                fields.append((field.lstrip("*"), match[1] + "*" * field.count("*")))
        structures[name] = fields
    assert len(structures) == plain.count("struct {"), "a structure is written in another way"
    return structures


def faults(header: str) -> list[str]:
    """The fields in which `library` differs from a header."""
    structures = declared(header)
    ours = {
        name: made
        for name, made in vars(library).items()
        if isinstance(made, type) and issubclass(made, ctypes.Structure)
        if made is not ctypes.Structure
    }
    found = [f"{name} is in one of the two only" for name in structures.keys() ^ ours.keys()]
    for name in structures.keys() & ours.keys():
        names = [field[0] for field in ours[name]._fields_]
        if names != [field for field, _ in structures[name]]:
            found.append(f"{name} has the fields {names} in library.py, others in pass.h")
            continue
        for (field, kind), (_, used, *_) in zip(structures[name], ours[name]._fields_, strict=True):
            target = getattr(used, "_type_", None)  # what a typed pointer points to
            if kind.endswith("*"):
                same = used is ctypes.c_void_p or target is ours.get(kind[:-1], 0)
            else:
                same = used is NUMBERS.get(kind, ours.get(kind))
            if not same:
                found.append(f"{name}.{field} is {kind} in pass.h, {used.__name__} in library.py")
    return found


def test_ctypes_has_the_structures_of_the_header() -> None:
    assert faults(HEADER) == []


@pytest.mark.parametrize(
    ("text", "changed", "named"),
    [
        ("  float attention_scale;", "", "Layer has"),
        ("  const float *gamma, *beta;", "  const float *beta, *gamma;", "Norm has"),
        ("  int32_t rank, bits;", "  int32_t rank, bits, more;", "Change has"),
        ("  float epsilon;", "  double epsilon;", "Model.epsilon is double in pass.h, c_float"),
        ("  const Layer *layers;", "  Layer layers;", "Model.layers is Layer in pass.h, LP_Layer"),
        ("  const void *weight;", "  uint64_t weight;", "Matrix.weight is uint64_t in pass.h, c_v"),
        ("} Truncation;", "} Truncated;", "Trunca"),
    ],
)
def test_another_structure_is_named(text: str, changed: str, named: str) -> None:
    assert text in HEADER
    found = faults(HEADER.replace(text, changed))
    assert found
    assert all(fault.startswith(named) for fault in found)
