"""Limits for web applications: the WSGI and ASGI middlewares, and what the frameworks' extensions share."""

from forebay.web.addresses import AddressList
from forebay.web.answers import problem_report
from forebay.web.asgi import ASGIMiddleware
from forebay.web.bans import Ban
from forebay.web.byte_rates import ByteRate
from forebay.web.canaries import canary
from forebay.web.client import ClientAddress
from forebay.web.gate import Gate, Passage
from forebay.web.keys import everyone, header, user
from forebay.web.refusals import refusal
from forebay.web.request import Request
from forebay.web.request_ids import RequestId
from forebay.web.rules import DISCONNECTED, Answer, BodyLimit, Denial, Deny, Rule, Shed
from forebay.web.wsgi import WSGIMiddleware

__all__ = [
    "DISCONNECTED",
    "ASGIMiddleware",
    "AddressList",
    "Answer",
    "Ban",
    "BodyLimit",
    "ByteRate",
    "ClientAddress",
    "Denial",
    "Deny",
    "Gate",
    "Passage",
    "Request",
    "RequestId",
    "Rule",
    "Shed",
    "WSGIMiddleware",
    "canary",
    "everyone",
    "header",
    "problem_report",
    "refusal",
    "user",
]
