"""Our messages are the protocol's: as `inference.proto` says, and as Triton's client has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc
from tritonclient.grpc import model_config_pb2, service_pb2

from serving.api.grpc import messages
from serving.api.grpc.inference import CALLS, SERVICE

FOLDER = Path(messages.__file__).parent


def test_what_is_compiled_is_what_the_files_say(tmp_path: Path) -> None:
    made = tmp_path / "protocols.binpb"
    files = ["inference.proto", "health.proto"]
    assert protoc.main(["protoc", f"-I{FOLDER}", f"--descriptor_set_out={made}", *files]) == 0
    parse = descriptor_pb2.FileDescriptorSet.FromString
    assert parse(made.read_bytes()) == parse(messages.COMPILED.read_bytes())


def flat(types: Any) -> dict[str, Any]:
    """Messages and those within them, by full name."""
    found = {}
    for each in types:
        found[each.full_name] = each
        found |= flat(each.nested_types)
    return found


OURS = flat(messages.POOL.FindFileByName("inference.proto").message_types_by_name.values())
TRITONS = flat(
    each
    for module in (service_pb2, model_config_pb2)
    for each in module.DESCRIPTOR.message_types_by_name.values()
)


# What KServe's answer, where Triton's say nothing.
KSERVES = {f"inference.RepositoryModel{verb}Response" for verb in ("Load", "Unload")}


def facts(field: Any) -> tuple[Any, ...]:
    other = field.message_type or field.enum_type
    choice = field.containing_oneof and field.containing_oneof.name
    return field.number, field.type, field.is_repeated, other and other.full_name, choice


@pytest.mark.parametrize("name", sorted(set(OURS) - KSERVES))
def test_each_field_is_tritons(name: str) -> None:
    theirs = {field.name: facts(field) for field in TRITONS[name].fields}
    for field in OURS[name].fields:
        assert facts(field) == theirs[field.name]
    # Of these some fields are left out; the others we have whole.
    partial = ("ModelConfig", "ModelInput", "ModelOutput", "ModelStatistics", "ModelVersionPolicy")
    if name.removeprefix("inference.") not in partial:
        assert {field.name for field in OURS[name].fields} == set(theirs)


def test_the_services_methods_are_tritons() -> None:
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    ours = messages.methods(SERVICE)
    for name, method in ours.items():
        for kind in ("input_type", "output_type"):
            assert getattr(method, kind).full_name == getattr(theirs[name], kind).full_name
        assert method.client_streaming == theirs[name].client_streaming
        assert method.server_streaming == theirs[name].server_streaming
    assert set(ours) == {*CALLS, "ModelInfer", "ModelStreamInfer"}
    assert {n for n in theirs if n not in ours} == {
        *(f"{kind}SharedMemory{what}" for kind in ("System", "Cuda") for what in (
            "Status", "Register", "Unregister")),
        "TraceSetting",
        "LogSettings",
    }  # fmt: skip


def test_the_datatypes_are_tritons() -> None:
    ours = messages.POOL.FindEnumTypeByName("inference.DataType").values_by_name
    theirs = model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    assert {n: v.number for n, v in ours.items()} == {n: v.number for n, v in theirs.items()}
