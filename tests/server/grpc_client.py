"""A gRPC client of the decision server, made of Envoy's own messages (the package xds-protos)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from decision_server import DecisionServer
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.auth.v3.external_auth_pb2 import CheckRequest, CheckResponse
from envoy.service.auth.v3.external_auth_pb2_grpc import AuthorizationStub
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from envoy.service.ratelimit.v3.rls_pb2_grpc import RateLimitServiceStub
from grpc_health.v1.health_pb2_grpc import HealthStub

Entries = Sequence[tuple[str, str]]

OK, OVER_LIMIT = RateLimitResponse.Code.OK, RateLimitResponse.Code.OVER_LIMIT


class Client:
    """A connection to a server, or to an address of one. Ends with the block."""

    def __init__(self, server: DecisionServer | str) -> None:
        target = server if isinstance(server, str) else f"127.0.0.1:{server.port}"
        # The authority would be the path of a Unix socket, which is none.
        options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(target, options)
        self.rate_limits: Any = RateLimitServiceStub(self.channel)
        self.authorization: Any = AuthorizationStub(self.channel)
        self.health: Any = HealthStub(self.channel)

    def should_rate_limit(
        self, *descriptors: Entries | RateLimitDescriptor, domain: str = "limits", hits: int = 0
    ) -> RateLimitResponse:
        request = RateLimitRequest(domain=domain, hits_addend=hits)
        for one in descriptors:
            request.descriptors.append(one if isinstance(one, RateLimitDescriptor) else descriptor(one))
        response: RateLimitResponse = self.rate_limits.ShouldRateLimit(request, timeout=60)
        return response

    def codes(self, count: int, *descriptors: Entries, **request: Any) -> list[str]:
        """The overall codes of so many requests."""
        names = []
        for _ in range(count):
            response = self.should_rate_limit(*descriptors, **request)
            names.append(RateLimitResponse.Code.Name(response.overall_code))
        return names

    def check(
        self, path: str, method: str = "GET", fields: Mapping[str, str] | None = None, source: str = "192.0.2.7"
    ) -> CheckResponse:
        request = CheckRequest()
        attributes = request.attributes
        attributes.source.address.socket_address.address = source
        attributes.request.http.method = method
        attributes.request.http.path = path
        for name, value in {":path": path, ":method": method, ":authority": "shop", **(fields or {})}.items():
            attributes.request.http.headers[name] = value
        response: CheckResponse = self.authorization.Check(request, timeout=60)
        return response

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()


def descriptor(entries: Entries, **more: Any) -> RateLimitDescriptor:
    pairs = [RateLimitDescriptor.Entry(key=key, value=value) for key, value in entries]
    return RateLimitDescriptor(entries=pairs, **more)


def fields_of(values: Iterable[Any]) -> dict[str, str]:
    """The fields of a response, by their names in small letters."""
    return {one.key.lower(): one.value for one in values}
