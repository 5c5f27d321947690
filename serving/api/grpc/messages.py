"""The protocols' messages and services, from `inference.proto` and `health.proto` as compiled.

They are in a descriptor pool of their own, so that a process can have Triton's client, too, which
defines the same names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

COMPILED = Path(__file__).with_name("protocols.binpb")


def _pool() -> Any:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file:
        pool.Add(file)
    return pool


POOL = _pool()


def message(name: str) -> Any:
    """Return the class of a message, by its full name."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


def methods(service: str) -> dict[str, Any]:
    """Return a service's methods by name, with their types and which of their sides stream."""
    methods: dict[str, Any] = POOL.FindServiceByName(service).methods_by_name
    return methods
