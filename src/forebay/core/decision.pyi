from typing import Literal, final

@final
class Decision:
    """A limiter's decision about one request. True if the request was allowed.

    * ``allowed``
    * ``limiter``: the name of the limiter whose limit bound the request
    * ``limit``: the most permits that can be allowed at once (a bucket's burst)
    * ``remaining``: the permits that would still be allowed right after this decision; more than the limit if ``add``
      gave a key more
    * ``retry_after``: seconds after which the same request is allowed if nothing else happens; 0.0 when allowed, and
      infinity if no time brings the permits (``Credits``)
    * ``reset_after``: seconds after which the key is as if it had never been seen
    * ``next_after``: seconds after which more than now is allowed. That is ``retry_after`` for a denial, the time to
      the next permit for a bucket, else ``reset_after``
    * ``retry_after_ns``, ``reset_after_ns``, ``next_after_ns``: the same in exact nanoseconds
    * ``degraded``: Redis was unavailable, and the store's ``when_unavailable`` policy decided
    * ``full``: the store had no room for the key, and its ``on_full`` decided
    * ``reason``: why the request was denied: ``"limit"``, or ``"no room"`` (then ``full`` is true, and it is not the
      client's fault); None if it was allowed

    Immutable, so safe to share between threads. Only limiters make decisions.
    """
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def allowed(self) -> bool: ...
    @property
    def degraded(self) -> bool: ...
    @property
    def full(self) -> bool: ...
    @property
    def reason(self) -> Literal["limit", "no room"] | None: ...
    @property
    def limiter(self) -> str: ...
    @property
    def limit(self) -> int: ...
    @property
    def remaining(self) -> int: ...
    @property
    def retry_after(self) -> float: ...
    @property
    def retry_after_ns(self) -> int: ...
    @property
    def reset_after(self) -> float: ...
    @property
    def reset_after_ns(self) -> int: ...
    @property
    def next_after(self) -> float: ...
    @property
    def next_after_ns(self) -> int: ...
    def __bool__(self) -> bool: ...

def _decision(
    limiter: str,
    allowed: bool,
    limit: int,
    available: int,
    rate_limit: int,
    rate_period_ns: int,
    retry_after_ns: int,
    reset_after_ns: int,
    degraded: bool = False,
    full: bool = False,
) -> Decision: ...
def seconds_from_ns(duration_ns: int) -> float:
    """`seconds_up`, for Python."""
