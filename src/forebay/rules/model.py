"""The contents of a rule file, as structs. Its JSON schema is made from them, and so are the checks of its words.

The meaning of each word is its `description`, which messages quote: "burst is a whole number of at least 1".
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from forebay.extras import Needs

with Needs("rules", __name__):
    import msgspec
    from msgspec import UNSET, Meta, Struct, UnsetType

__all__ = [
    "AIMDShedder",
    "BanPart",
    "BucketedWindowLimit",
    "BusyWorkersShedder",
    "Canary",
    "ClientPart",
    "ConcurrencyLimit",
    "FileDeny",
    "FileRule",
    "FixedWindowLimit",
    "Gradient2Shedder",
    "LeakyBucketLimit",
    "Limit",
    "MinIntervalLimit",
    "Override",
    "RequestIdPart",
    "ReservedSlotsShedder",
    "Response",
    "RuleFile",
    "Shedder",
    "SlidingLogLimit",
    "SlidingWindowLimit",
    "TokenBucketLimit",
    "json_schema",
]

VERSION: Final = 1

Name: TypeAlias = Annotated[str, Meta(min_length=1, description="a name")]
Count: TypeAlias = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
RateText: TypeAlias = Annotated[str, Meta(description='a rate such as "100/minute"', examples=["100/minute"])]
SizeText: TypeAlias = (
    Annotated[int, Meta(ge=0, description="a number of bytes")]
    | Annotated[str, Meta(description='a size such as "10 MiB"', examples=["10 MiB"])]
)
DurationText: TypeAlias = Annotated[str, Meta(description='a length of time such as "30s"', examples=["30s"])]
Time: TypeAlias = Annotated[
    datetime, Meta(tz=True, description="a time with its offset from UTC, such as 2027-01-31T12:00:00Z")
]
Switch: TypeAlias = Annotated[bool, Meta(description="true or false")]
PathText: TypeAlias = Annotated[str, Meta(description='a path pattern such as "/users/{id}" or "/api/*"')]
MethodText: TypeAlias = Annotated[str, Meta(description='a method such as "POST"')]
AddressText: TypeAlias = Annotated[str, Meta(description='an address or a network such as "10.0.0.0/8"')]
KeyText: TypeAlias = Annotated[
    str,
    Meta(
        description='a part of a key such as "address", "user" or "header:X-API-Key | address"',
        examples=["address", "user | address", "header:X-API-Key | address", "path:id", "tier", "everyone"],
    ),
]
StatusText: TypeAlias = (
    Annotated[int, Meta(ge=100, le=599, description="a status such as 401")]
    | Annotated[str, Meta(pattern="^[1-5][0-9][0-9]-[1-5][0-9][0-9]$", description='statuses such as "400-499"')]
)


class _Part(Struct, forbid_unknown_fields=True):
    """A table of the file."""


class _LimitPart(_Part, kw_only=True):
    """A limit."""

    on_change: (
        Annotated[
            Literal["keep", "share", "reset"],
            Meta(description='what keys have of a changed limit of live rules: "keep", "share" or "reset"'),
        ]
        | UnsetType
    ) = UNSET


class TokenBucketLimit(_LimitPart, tag_field="algorithm", tag="token-bucket"):
    """A ``TokenBucket``: up to `burst` permits at once, refilled at `rate`."""

    rate: RateText
    burst: Count | UnsetType = UNSET
    refill: Literal["continuous", "interval"] | UnsetType = UNSET
    initial: Count | UnsetType = UNSET
    start: Time | UnsetType = UNSET


class LeakyBucketLimit(_LimitPart, tag_field="algorithm", tag="leaky-bucket"):
    """A ``LeakyBucket``: a queue of `capacity` places that empties at `rate`."""

    rate: RateText
    capacity: Count


class MinIntervalLimit(_LimitPart, tag_field="algorithm", tag="min-interval"):
    """A ``MinInterval``: at least `interval` from one request to the next."""

    interval: DurationText


class FixedWindowLimit(_LimitPart, tag_field="algorithm", tag="fixed-window"):
    """A ``FixedWindow``: at most as many permits in each window as `rate` allows per period."""

    rate: RateText
    align: Literal["clock", "first", "stagger", "calendar"] | UnsetType = UNSET
    timezone: Annotated[str, Meta(description='a time zone such as "Europe/Berlin"')] | UnsetType = UNSET


class SlidingWindowLimit(_LimitPart, tag_field="algorithm", tag="sliding-window"):
    """A ``SlidingWindow``: at most as many permits as `rate` allows, in an estimate of the period up to now."""

    rate: RateText
    rounding: Literal["up", "down"] | UnsetType = UNSET


class BucketedWindowLimit(_LimitPart, tag_field="algorithm", tag="bucketed-window"):
    """A ``BucketedWindow``: at most as many permits as `rate` allows, in the newest `buckets` parts of its period."""

    rate: RateText
    buckets: Count | UnsetType = UNSET
    keys: Count | UnsetType = UNSET


class SlidingLogLimit(_LimitPart, tag_field="algorithm", tag="sliding-log"):
    """A ``SlidingLog``: never more permits than `rate` allows in any span as long as its period."""

    rate: RateText
    keys: Count


class ConcurrencyLimit(_LimitPart, tag_field="algorithm", tag="concurrency"):
    """A ``Concurrency``: at most `limit` requests at one time."""

    limit: Count
    lease: DurationText | UnsetType = UNSET
    keys: Count | UnsetType = UNSET


Limit: TypeAlias = (
    TokenBucketLimit
    | LeakyBucketLimit
    | MinIntervalLimit
    | FixedWindowLimit
    | SlidingWindowLimit
    | BucketedWindowLimit
    | SlidingLogLimit
    | ConcurrencyLimit
)


class ClientPart(_Part):
    """The proxies in front of the application, as for a ``ClientAddress``."""

    trusted_proxies: Annotated[list[AddressText | Literal["unix"]], Meta(min_length=1)] | UnsetType = UNSET
    header: (
        Annotated[str, Meta(description='the field that the proxies set, such as "X-Forwarded-For"')] | UnsetType
    ) = UNSET
    ipv4_prefix: Annotated[int, Meta(ge=1, le=32, description="a number of bits from 1 to 32")] | UnsetType = UNSET
    ipv6_prefix: Annotated[int, Meta(ge=1, le=128, description="a number of bits from 1 to 128")] | UnsetType = UNSET


class Response(_Part):
    """Sent to a denied request instead of the problem report."""

    status: Annotated[int, Meta(ge=200, le=599, description="a status such as 429")] | UnsetType = UNSET
    body: Annotated[str, Meta(description="text")] | UnsetType = UNSET
    headers: dict[str, Annotated[str, Meta(description="the text of a header field")]] | UnsetType = UNSET


ResponseTable: TypeAlias = Annotated[Response, Meta(description='a table such as { status = 503, body = "Later." }')]


class _ShedderPart(_Part, kw_only=True):
    """A load shedder, and the requests that it is for."""

    refused: ClassVar = {
        "shadow": "a shedder has no shadow: its denials change the load that it measures, so one that denies nothing "
        "measures another load",
        "priority": "a rule has the priority of its requests",
    }
    """Words that a reader may expect, and why they aren't there."""

    path: PathText | Annotated[list[PathText], Meta(min_length=1)] | UnsetType = UNSET
    methods: MethodText | Annotated[list[MethodText], Meta(min_length=1)] | UnsetType = UNSET
    ignore_case: Switch | UnsetType = UNSET
    response: ResponseTable | UnsetType = UNSET
    retry_after: DurationText | UnsetType = UNSET
    lease: DurationText | UnsetType = UNSET


Priorities: TypeAlias = Annotated[
    list[Name], Meta(min_length=2, description="a list of two priorities or more, the most important first")
]
PerCent: TypeAlias = Annotated[
    str, Meta(pattern="^[0-9]{1,2}%$", description='per cent such as "20%"', examples=["20%"])
]
Part: TypeAlias = Annotated[float, Meta(gt=0, le=1, description="a part above 0, up to 1, such as 0.9")]
Number: TypeAlias = Annotated[float, Meta(ge=0, description="a number of at least 0")]


class ReservedSlotsShedder(_ShedderPart, tag_field="algorithm", tag="reserved-slots"):
    """A ``ReservedSlots``: `slots` for requests in flight, some of them `reserved` for important ones."""

    slots: Count
    priorities: Priorities
    reserved: Annotated[
        dict[Name, Annotated[int, Meta(ge=0, description="a number of slots")] | PerCent],
        Meta(min_length=1, description='the slots that priorities keep, as {critical = "20%"}'),
    ]


class BusyWorkersShedder(_ShedderPart, tag_field="algorithm", tag="busy-workers"):
    """A ``BusyWorkers``: sheds the least important requests while the host's `workers` are busy."""

    workers: Count
    priorities: Priorities
    above: Part | UnsetType = UNSET
    below: Part | UnsetType = UNSET
    step: Part | UnsetType = UNSET
    interval: DurationText | UnsetType = UNSET


class _AdaptivePart(_ShedderPart, kw_only=True):
    """An ``AdaptiveLimit``."""

    initial: Count | UnsetType = UNSET
    least: Count | UnsetType = UNSET
    most: Count | UnsetType = UNSET
    window: DurationText | UnsetType = UNSET
    priorities: Priorities | UnsetType = UNSET
    reserved: (
        Annotated[
            dict[Name, PerCent],
            Meta(min_length=1, description='the part of the limit that priorities keep, as {critical = "20%"}'),
        ]
        | UnsetType
    ) = UNSET


class Gradient2Shedder(_AdaptivePart, tag_field="algorithm", tag="gradient2"):
    """An ``AdaptiveLimit`` by ``Gradient2``: a limit that follows the ratio of the usual latency to that of now."""

    queue: Number | UnsetType = UNSET
    tolerance: Number | UnsetType = UNSET
    smoothing: Part | UnsetType = UNSET
    long_windows: Count | UnsetType = UNSET


class AIMDShedder(_AdaptivePart, tag_field="algorithm", tag="aimd"):
    """An ``AdaptiveLimit`` by ``AIMD``: a limit that grows by one, and shrinks when requests fail or take too long."""

    timeout: DurationText | UnsetType = UNSET
    backoff: Part | UnsetType = UNSET


Shedder: TypeAlias = ReservedSlotsShedder | BusyWorkersShedder | Gradient2Shedder | AIMDShedder


class Override(_Part):
    """Other limits for one key of a rule until a time, or none, or no request at all."""

    key: Annotated[
        dict[str, Annotated[str, Meta(description="the value of a part of the key")]],
        Meta(min_length=1, description='the value of each part of the rule\'s key, as {address = "192.0.2.1"}'),
    ]
    until: Time
    limits: Annotated[list[Name], Meta(min_length=1)] | UnsetType = UNSET
    exempt: Switch = False
    deny: Switch = False


class Canary(_Part):
    """Other limits for a percentage of the keys of a rule."""

    percent: Annotated[float, Meta(gt=0, le=100, description="a number above 0, up to 100")]
    limits: Annotated[list[Name], Meta(min_length=1, description="a list of names of limits")]


class RequestIdPart(_Part):
    """A ``RequestId``: `retries` of a request with the same value of `field` aren't charged again."""

    field: Annotated[str, Meta(description='a header field such as "Idempotency-Key"')] | UnsetType = UNSET
    retries: Annotated[int, Meta(ge=1, le=100, description="a whole number from 1 to 100")] | UnsetType = UNSET
    lasts: DurationText | UnsetType = UNSET


class BanPart(_Part):
    """Denies a key for a while after so many denials."""

    denials: RateText
    lasts: DurationText


class FileDeny(_Part):
    """Addresses whose requests are refused, until a time or for good."""

    name: Name
    address: Annotated[list[AddressText], Meta(min_length=1, description="a list of addresses and networks")]
    path: PathText | Annotated[list[PathText], Meta(min_length=1)] | UnsetType = UNSET
    methods: MethodText | Annotated[list[MethodText], Meta(min_length=1)] | UnsetType = UNSET
    ignore_case: Switch | UnsetType = UNSET
    until: Time | UnsetType = UNSET
    response: ResponseTable | UnsetType = UNSET


class FileRule(_Part):
    """Limits, and the requests that they are for; or a priority of these requests, for shedders."""

    name: Name
    limits: Annotated[list[Name], Meta(min_length=1, description="a list of names of limits")] | UnsetType = UNSET
    priority: Name | UnsetType = UNSET
    path: PathText | Annotated[list[PathText], Meta(min_length=1)] | UnsetType = UNSET
    methods: MethodText | Annotated[list[MethodText], Meta(min_length=1)] | UnsetType = UNSET
    ignore_case: Switch | UnsetType = UNSET
    headers: (
        Annotated[
            dict[str, Annotated[str, Meta(description="the value of a header field, in which * matches anything")]],
            Meta(min_length=1),
        ]
        | UnsetType
    ) = UNSET
    address: Annotated[list[AddressText], Meta(min_length=1)] | UnsetType = UNSET
    except_address: Annotated[list[AddressText], Meta(min_length=1)] | UnsetType = UNSET
    tier: Annotated[list[Name], Meta(min_length=1)] | UnsetType = UNSET
    except_tier: Annotated[list[Name], Meta(min_length=1)] | UnsetType = UNSET
    key: KeyText | Annotated[list[KeyText], Meta(min_length=1)] = "address"
    cost: Count = 1
    charge_on: Annotated[list[StatusText], Meta(min_length=1)] | UnsetType = UNSET
    ban: Name | UnsetType = UNSET
    request_id: (
        Annotated[RequestIdPart, Meta(description='a table such as { field = "Idempotency-Key" }')] | UnsetType
    ) = UNSET
    delay: DurationText | UnsetType = UNSET
    most_delayed: Count | UnsetType = UNSET
    bytes: Literal["responses", "requests"] | UnsetType = UNSET
    after: SizeText | UnsetType = UNSET
    most_wait: DurationText | UnsetType = UNSET
    most_held: Count | UnsetType = UNSET
    response: ResponseTable | UnsetType = UNSET
    shadow: Switch = False
    otherwise: Switch = False
    canary: Annotated[Canary, Meta(description='a table such as { percent = 5, limits = ["new"] }')] | UnsetType = UNSET
    overrides: list[Override] = []


class RuleFile(_Part):
    """Limits by name, and the rules of an application."""

    version: Annotated[Literal[1], Meta(description="1, which is the version of the format")]
    limits: Annotated[dict[Name, Limit], Meta(min_length=1, description="a table of limits by name")]
    rules: Annotated[list[FileRule], Meta(min_length=1, description="a list of rules")]
    store: Annotated[str, Meta(description='a URL such as "shm:///shop?keys=1000000"')] | UnsetType = UNSET
    client: ClientPart | UnsetType = UNSET
    bans: Annotated[dict[Name, BanPart], Meta(min_length=1, description="a table of bans by name")] | UnsetType = UNSET
    deny: Annotated[list[FileDeny], Meta(min_length=1, description="a list of deny lists")] | UnsetType = UNSET
    tiers: Annotated[list[Name], Meta(min_length=1, description="a list of the names of all tiers")] | UnsetType = UNSET
    shedders: (
        Annotated[dict[Name, Shedder], Meta(min_length=1, description="a table of load shedders by name")] | UnsetType
    ) = UNSET


def json_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of a rule file, for editors."""
    schema = msgspec.json.schema(RuleFile)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "forebay rules", **schema}
