"""Limits around a web application: what WSGI and ASGI servers, and the frameworks' extensions, have in common."""

from penstock.web.answers import Denial, problem_report
from penstock.web.asgi import ASGIMiddleware
from penstock.web.client import ClientAddress
from penstock.web.gate import Gate, Passage
from penstock.web.keys import everyone, header, user
from penstock.web.request import Request
from penstock.web.rules import DISCONNECTED, Answer, BodyLimit, Rule
from penstock.web.wsgi import WSGIMiddleware

__all__ = [
    "DISCONNECTED",
    "ASGIMiddleware",
    "Answer",
    "BodyLimit",
    "ClientAddress",
    "Denial",
    "Gate",
    "Passage",
    "Request",
    "Rule",
    "WSGIMiddleware",
    "everyone",
    "header",
    "problem_report",
    "user",
]
