"""The responses to denied requests: problem reports (RFC 9457), or the rule's own answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import is_never
from forebay.web.header_fields import allowance
from forebay.web.request import Request
from forebay.web.rules import Answer, Denial, Deny, Shed, check_answer

__all__ = [
    "answer_to",
    "body_too_large",
    "encoded",
    "problem_report",
    "quota_exceeded",
    "reason_of",
    "response_too_large",
    "retry_after",
    "spent",
    "status_line",
    "unavailable",
]

# The types of draft-ietf-httpapi-ratelimit-headers-10.
PROBLEM_TYPES: Final = "https://iana.org/assignments/http-problem-types#"
QUOTA_EXCEEDED: Final = PROBLEM_TYPES + "quota-exceeded"
REDUCED_CAPACITY: Final = PROBLEM_TYPES + "temporary-reduced-capacity"
# Causes of a denial whose limits could not be checked.
UNAVAILABLE: Final = "The limits of this service can't be checked at the moment: {again}."
FULL: Final = "This service has no room to count another client's requests at the moment: {again}."
UNKNOWN: Final = "The limits of this service can't be checked, as its server doesn't report the client's address."


def answer_to(request: Request, denial: Denial) -> Answer:
    """The rule's own answer, or else the problem report."""
    wanted = denial.rule.answer
    if wanted is None:
        return problem_report(denial)
    if not isinstance(wanted, Answer):
        answer = wanted(request, denial)
        if not isinstance(answer, Answer):
            raise InvalidLimiter(f"a rule's answer returned {short_repr(answer)}, not an Answer(status, headers, body)")
        check_answer(answer)
        return answer
    if denial.rule.is_hidden:
        return Answer(wanted.status, (*wanted.headers, *denial.fields), wanted.body)
    return wanted


def problem_report(denial: Denial) -> Answer:
    """``application/problem+json`` with the limit and when to ask again."""
    status, wait_s = denial.rule.denial_status, denial.retry_after_s
    if denial.is_unavailable:
        return unavailable(status, denial.cause, wait_s)
    if isinstance(denial.rule, Deny):
        return _problem(status, "about:blank", "Requests from this address are refused.", wait_s)
    if isinstance(denial.rule, Shed):
        assert wait_s is not None
        detail = f"This service is overloaded: {again(wait_s)}."
        return quota_exceeded(status, detail, wait_s, (), {"violated-policies": list(denial.violated)})
    if denial.is_ban:
        assert wait_s is not None
        detail = f"Too many requests were denied: {again(wait_s)}."
        return quota_exceeded(status, detail, wait_s, denial.fields, {"violated-policies": list(denial.violated)})
    if denial.decision is not None and is_never(denial.decision.retry_after_ns):
        detail = spent(denial.decision.remaining)
    else:
        when = "this request costs more than that, so it is never allowed" if wait_s is None else again(wait_s)
        detail = f"The limit is {allowance(denial.rule.limiter)}: {when}."
    return quota_exceeded(status, detail, wait_s, denial.fields, {"violated-policies": list(denial.violated)})


def unavailable(status: int, cause: str, wait_s: int | None) -> Answer:
    """`cause`: `UNAVAILABLE`, `FULL` or `UNKNOWN`. `wait_s` None: asking again does not help."""
    kind = "about:blank" if wait_s is None else REDUCED_CAPACITY
    return _problem(status, kind, cause.format(again=wait_s and again(wait_s)), wait_s)


def quota_exceeded(
    status: int,
    detail: str,
    wait_s: int | None,
    fields: Iterable[tuple[str, str]] = (),
    members: Mapping[str, Any] | None = None,
) -> Answer:
    """`fields` and `members` are added to those of the report. `wait_s` None: asking again does not help."""
    kind = REDUCED_CAPACITY if status == 503 else QUOTA_EXCEEDED
    return _problem(status, kind, detail, wait_s, fields, members)


def _problem(
    status: int,
    kind: str,
    detail: str,
    wait_s: int | None,
    fields: Iterable[tuple[str, str]] = (),
    members: Mapping[str, Any] | None = None,
) -> Answer:
    report = {"type": kind, "title": reason_of(status), "status": status, "detail": detail, **(members or {})}
    own = ("Content-Type", "application/problem+json"), ("Cache-Control", "no-store")
    return Answer(status, (*own, *fields, *retry_after(wait_s)), json.dumps(report).encode())


def again(wait_s: int) -> str:
    return f"ask again in {wait_s} second{'s' * (wait_s != 1)}"


def spent(left: int) -> str:
    """What a client is told whose prepaid permits don't suffice."""
    return f"{left or 'None'} of the prepaid permits {'is' if left == 1 else 'are'} left, and this request needs more."


def retry_after(wait_s: int | None) -> list[tuple[str, str]]:
    """The field, if asking again may help."""
    return [] if wait_s is None else [("Retry-After", str(wait_s))]


def encoded(fields: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Header fields as ASGI has them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields]


def reason_of(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Refused"


def status_line(status: int) -> str:
    return f"{status} {reason_of(status)}"


def body_too_large(max_bytes: int) -> Answer:
    report = {
        "type": "about:blank",
        "title": "Content Too Large",
        "status": 413,
        "detail": f"The body of a request here has at most {max_bytes} bytes.",
    }
    headers = (("Content-Type", "application/problem+json"),)
    return Answer(413, headers, json.dumps(report).encode())


def response_too_large() -> Answer:
    detail = "The response to this request is larger than this service sends."
    return _problem(500, "about:blank", detail, None)
