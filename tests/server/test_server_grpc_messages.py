"""The messages as the server declares them, beside Envoy's own."""

from __future__ import annotations

import re
from pathlib import Path

from envoy.config.core.v3 import address_pb2, base_pb2
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.auth.v3 import attribute_context_pb2, external_auth_pb2
from envoy.service.ratelimit.v3 import rls_pb2
from envoy.type.v3 import http_status_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2

SOURCE = Path(__file__).resolve().parents[2] / "native" / "server" / "src" / "grpc" / "messages.rs"
MODULES = (address_pb2, attribute_context_pb2, base_pb2, external_auth_pb2, health_pb2, http_status_pb2, rls_pb2)
WIRE = {"string": "STRING", "bytes": "BYTES", "bool": "BOOL", "int32": "INT32", "int64": "INT64", "uint32": "UINT32"}
# In Envoy's API since 2025, and in the Go module go-control-plane/envoy 1.40, but not yet in the package.
NEWER = {("RateLimitDescriptor", "is_negative_hits", 4), ("RateLimit", "unit_multiplier", 4)}


def _known() -> tuple[dict[str, Descriptor], dict[str, EnumDescriptor]]:
    messages: dict[str, Descriptor] = {}
    enums: dict[str, EnumDescriptor] = {}

    def add(one: Descriptor) -> None:
        messages[one.name] = one
        enums.update(one.enum_types_by_name)
        for nested in one.nested_types:
            add(nested)

    for module in MODULES:
        for message in module.DESCRIPTOR.message_types_by_name.values():
            add(message)
    for message in (RateLimitDescriptor, Duration, Status):
        add(message.DESCRIPTOR)
    return messages, enums


def _is_same(kind: str, rust: str, field: FieldDescriptor) -> bool:
    name = rust.removeprefix("Vec<").removeprefix("Option<").rstrip(">")
    of = field.message_type
    if kind.startswith("btree_map"):
        return of is not None and of.GetOptions().map_entry
    if kind == "message":
        return of is not None and of.name in (name, {"u64": "UInt64Value"}.get(name))
    if kind.startswith("enumeration"):
        return field.enum_type is not None and field.enum_type.name == kind.split('"')[1]
    # An enumeration is a number.
    return getattr(FieldDescriptor, f"TYPE_{WIRE[kind]}") == field.type or (
        kind == "int32" and field.enum_type is not None
    )


def test_messages_have_names_numbers_and_types_of_envoy() -> None:
    messages, _ = _known()
    text = SOURCE.read_text()
    structs = re.findall(r"pub struct (\w+) \{(.*?)\}\n", text, re.DOTALL)
    compared = 0
    for struct, body in structs:
        message = messages[struct]
        for tags, name, rust in re.findall(r"#\[prost\((.*?)\)\]\s+pub (\w+): ([\w<>, ]+),", body):
            kind, number = re.split(r", (?=repeated|optional|tag|= )", tags)[0], int(tags.split('"')[-2])
            if (struct, name, number) in NEWER:
                assert name not in message.fields_by_name, f"{name} is known now: take it out of NEWER"
                continue
            field = message.fields_by_name[name]
            assert (struct, name, number) == (struct, field.name, field.number)
            assert _is_same(kind.partition(" = ")[0] if "bytes" in kind else kind, rust, field), (struct, name, kind)
            assert ("repeated" in tags or "btree_map" in tags) == field.is_repeated, (struct, name)
            compared += 1
    assert compared == text.count("#[prost(") - len(NEWER)


def test_enumerations_have_names_and_numbers_of_envoy() -> None:
    _, enums = _known()
    found = re.findall(r"pub enum (\w+) \{(.*?)\}", SOURCE.read_text(), re.DOTALL)
    assert len(found) == 3
    for enum, body in found:
        for name, number in re.findall(r"(\w+) = (\d+),", body):
            word = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
            assert enums[enum].values_by_name[word].number == int(number)
