"""What a request is told that was denied: a problem report (RFC 9457), or what the rule says instead."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from forebay.core.decision import Decision
from forebay.web.policies import allowance
from forebay.web.rules import Answer, Rule

__all__ = ["Denial", "problem_report", "reason_of"]

NS: Final = 1_000_000_000
# The types of draft-ietf-httpapi-ratelimit-headers-10.
PROBLEM_TYPES: Final = "https://iana.org/assignments/http-problem-types#"
QUOTA_EXCEEDED: Final = PROBLEM_TYPES + "quota-exceeded"
REDUCED_CAPACITY: Final = PROBLEM_TYPES + "temporary-reduced-capacity"
# What a request is told whose limits decide nothing.
AWAY: Final = "The limits of this service can't be checked at the moment: {again}."
FULL: Final = "This service has no room to count another client's requests at the moment: {again}."
UNKNOWN: Final = "The limits of this service can't be checked, as its server doesn't tell who is asking."


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a request is not handled.

    ``rule`` is the one that bound it: of those that denied, the one with the longest wait. ``violated`` are the names
    of all that denied. ``retry_after_s`` is in whole seconds, after which the same request is allowed if nothing else
    happens; None if it never will be, because it costs more than the limit. ``decision`` is the limiter's, None then.
    ``fields`` are the header fields that tell of it.
    """

    rule: Rule
    violated: tuple[str, ...]
    decision: Decision | None
    retry_after_s: int | None
    fields: tuple[tuple[str, str], ...]
    cause: str = ""
    """Why nobody knows whether the request is within its limit: `AWAY`, `FULL` or `UNKNOWN`; empty if it isn't."""

    @property
    def is_unavailable(self) -> bool:
        """Whether nobody knows whether the request is within its limit."""
        return bool(self.cause)


def seconds_up(duration_ns: int) -> int:
    """Whole seconds, never fewer: who comes back then is not too early."""
    return -(-duration_ns // NS)


def problem_report(denial: Denial) -> Answer:
    """``application/problem+json`` that says what is allowed, and when to ask again."""
    status = denial.rule.denial_status
    wait_s = denial.retry_after_s
    if denial.cause:
        return report_of(denial)
    when = "this request costs more than that, so it is never allowed" if wait_s is None else again(wait_s)
    report = {
        "type": REDUCED_CAPACITY if status == 503 else QUOTA_EXCEEDED,
        "title": reason_of(status),
        "status": status,
        "detail": f"The limit is {allowance(denial.rule.limiter)}: {when}.",
        "violated-policies": list(denial.violated),
    }
    headers = [("Content-Type", "application/problem+json"), ("Cache-Control", "no-store"), *denial.fields]
    return Answer(status, (*headers, *retry_after(denial)), json.dumps(report).encode())


def report_of(denial: Denial) -> Answer:
    """That nobody knows whether the request is within its limit, and why."""
    status, wait_s = denial.rule.denial_status, denial.retry_after_s
    report = {
        "type": "about:blank" if wait_s is None else REDUCED_CAPACITY,
        "title": reason_of(status),
        "status": status,
        "detail": denial.cause.format(again=wait_s and again(wait_s)),
    }
    headers = (("Content-Type", "application/problem+json"), ("Cache-Control", "no-store"), *retry_after(denial))
    return Answer(status, headers, json.dumps(report).encode())


def again(wait_s: int) -> str:
    return f"ask again in {wait_s} second{'s' * (wait_s != 1)}"


def retry_after(denial: Denial) -> list[tuple[str, str]]:
    """The field, if asking again may help."""
    return [] if denial.retry_after_s is None else [("Retry-After", str(denial.retry_after_s))]


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
