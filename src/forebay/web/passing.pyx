"""The usual way of a request through a gate, compiled: it is charged, and its answer has fields that say so.

What is unusual (denials, what is held or given back, bodies) is told to the Python code around it.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.decision cimport Decision, next_after_ns_of, remaining_of
from forebay.web.native_requests cimport ASGIRequest, PeerKey, WSGIRequest

from forebay.errors import CostExceedsLimit, InvalidCost, InvalidKey, StoreUnavailable
from forebay.web.client import UnknownPeer


cdef extern from "Python.h":
    object PyUnicode_New(Py_ssize_t size, Py_UCS4 greatest)
    void* PyUnicode_DATA(object text)


cdef enum:
    NS = 1_000_000_000
    LONGEST_ITEM = 48            # two numbers of 20 digits, and what stands between them


@cython.final
@cython.freelist(16)
cdef class Passage:
    """Leave for one request. `fields` go into its answer.

    If there is something `on_end`, its ``begin`` and ``end`` must be called with the answer's status: ``end`` before
    the last part of the answer is sent, or the client's next request may come before.
    """

    cdef readonly object fields
    cdef readonly object on_end

    def __init__(self, fields, on_end=None):
        self.fields = fields
        self.on_end = on_end


cdef inline char* put_number(char* end, uint64_t number) noexcept:
    """Backwards, from the end."""
    while True:
        end -= 1
        end[0] = <char>(48 + number % 10)
        number //= 10
        if number == 0:
            return end


@cython.final
cdef class RateLimitFields:
    """Of draft-ietf-httpapi-ratelimit-headers-10: ``RateLimit-Policy``, which stays, and ``RateLimit``.

    For each limit what its item begins with (``"name";r=``), and whether it is held: then nobody knows when there is
    more. See `header_writer` for the arguments of a call.
    """

    cdef object policy_field
    cdef object name
    cdef bint encoded
    cdef list prefixes
    cdef list held
    cdef Py_ssize_t longest

    def __cinit__(self, policy_field, name, encoded, prefixes, held):
        self.policy_field = policy_field
        self.name = name
        self.encoded = encoded
        self.prefixes = [(<str?>prefix).encode("ascii") for prefix in prefixes]
        self.held = list(held)
        if len(self.held) != len(self.prefixes):
            raise ValueError(f"{len(self.held)} are held or not, of {len(self.prefixes)} limits")
        self.longest = sum(len(prefix) + 2 + LONGEST_ITEM for prefix in self.prefixes)

    def __call__(self, decisions, partitions):
        return self.fields_of(list(decisions), partitions)

    cdef list fields_of(self, list decisions, object partitions):
        cdef char[512] short_text
        cdef char* text = short_text
        cdef Py_ssize_t i, length = 0
        cdef bytes long_text, partition
        cdef Py_ssize_t room = self.longest
        if not self.prefixes:
            return [self.policy_field]
        if len(decisions) != len(self.prefixes):
            raise ValueError(f"{len(decisions)} decisions for {len(self.prefixes)} limits")
        if partitions:
            if len(partitions) != len(self.prefixes):
                raise ValueError(f"{len(partitions)} partitions for {len(self.prefixes)} limits")
            room += sum(map(len, partitions))
        if room > <Py_ssize_t>sizeof(short_text):
            long_text = PyBytes_FromStringAndSize(NULL, room)
            text = PyBytes_AS_STRING(long_text)
        for i in range(len(decisions)):
            if i:
                text[length] = 44
                text[length + 1] = 32
                length += 2
            length += self.put_item(text + length, i, <Decision?>decisions[i])
            if partitions:
                partition = (<str?>partitions[i]).encode("ascii")
                memcpy(text + length, PyBytes_AS_STRING(partition), PyBytes_GET_SIZE(partition))
                length += PyBytes_GET_SIZE(partition)
        if self.encoded:
            value = PyBytes_FromStringAndSize(text, length)
        else:
            value = PyUnicode_New(length, 127)
            memcpy(PyUnicode_DATA(value), text, length)
        return [self.policy_field, (self.name, value)]

    cdef Py_ssize_t put_item(self, char* text, Py_ssize_t i, Decision decision):
        cdef char[LONGEST_ITEM] digits
        cdef char* end = digits + LONGEST_ITEM
        cdef char* first = end
        cdef bytes prefix = <bytes>self.prefixes[i]
        cdef Py_ssize_t length = PyBytes_GET_SIZE(prefix)
        # Whole seconds until there is more than now.
        cdef uint64_t wait_ns = 0 if self.held[i] else next_after_ns_of(decision)
        memcpy(text, PyBytes_AS_STRING(prefix), length)
        if wait_ns:
            first = put_number(end, (wait_ns - 1) // NS + 1) - 3
            memcpy(first, b";t=", 3)
        first = put_number(first, remaining_of(decision))
        memcpy(text + length, first, end - first)
        return length + (end - first)


@cython.final
cdef class Charging:
    """How the rules of a plan are charged that is neither held nor booked: the usual case, with all at hand.

    `hit` is the limiter's of one rule, or ``AllOf.hit_each`` of several; `key_of` and `cost_of` take a request.
    """

    cdef object hit, key_of, cost_of, cost, write, denial, never, unavailable, unknown, named, partitions
    cdef CellLimiter limiter     # that is asked for one permit, in its own way
    cdef bint is_one, is_by_peer

    def __cinit__(self, plan, hit, key_of, cost_of, cost, is_one):
        self.hit, self.key_of, self.cost_of, self.cost, self.is_one = hit, key_of, cost_of, cost, is_one
        self.is_by_peer = isinstance(key_of, PeerKey) and type(key_of).__call__ is PeerKey.__call__
        self.limiter = None
        if is_one and cost_of is None and type(cost) is int and cost == 1:
            [rule] = plan.charged
            if isinstance(rule.limiter, CellLimiter):
                self.limiter = rule.limiter
        self.write = plan.write
        self.partitions = plan.partitions if plan.secret else None
        self.denial, self.never, self.unavailable = plan.denial, plan.never, plan.unavailable
        self.unknown, self.named = plan.unknown, plan.named

    def __call__(self, request):
        charged = self.charge(request)
        return Passage(charged) if type(charged) is list else charged

    cdef object charge(self, object request):
        """The fields of who may pass, as a list, or a denial."""
        cdef list decisions
        key, cost = "", 1
        try:
            key = (<PeerKey>self.key_of).key_for(request) if self.is_by_peer else self.key_of(request)
            if self.limiter is not None:
                decided = self.limiter.decide_once(key, &self.limiter.unit)
            else:
                cost = self.cost if self.cost_of is None else self.cost_of(request)
                decided = self.hit(key, cost)
        except CostExceedsLimit as error:
            return self.never(error)
        except StoreUnavailable as error:
            return self.unavailable(error)
        except UnknownPeer as error:
            return self.unknown(error)
        except (InvalidKey, InvalidCost) as error:
            if not self.is_one:
                raise
            raise self.named(error, key, cost) from None
        decisions = [decided] if self.is_one else decided
        for decided in decisions:
            if not (<Decision?>decided).allowed:
                return self.denial(request, decisions)
        partitions = () if self.partitions is None else self.partitions(request)
        if type(self.write) is RateLimitFields:
            return (<RateLimitFields>self.write).fields_of(decisions, partitions)
        return list(self.write(decisions, partitions))


cdef class Passing:
    """An application, `app`, that asks a `gate` first."""

    cdef public object app
    cdef object asked, entrance
    cdef bint has_body_limits, has_ends, is_awaited

    @property
    def gate(self):
        return self.asked

    @gate.setter
    def gate(self, gate):
        # All of it is looked up first: what is no gate changes nothing.
        self.has_body_limits, self.has_ends, self.is_awaited, self.entrance, self.asked = (
            bool(gate.body_limits), gate.has_ends, gate.is_awaited, gate.entrance, gate)

    cdef object enter(self, object request):
        """Who may pass gets a list of fields, or a passage; None if nobody is asked."""
        # The gate may be exchanged meanwhile, by a key function or another thread: this name keeps what is called.
        entrance = self.entrance
        if type(entrance) is Charging:
            return (<Charging>entrance).charge(request)
        passage = entrance(request)
        if type(passage) is Passage and (<Passage>passage).on_end is None:
            return list((<Passage>passage).fields)
        return passage


@cython.final
@cython.freelist(16)
@cython.trashcan(True)
cdef class StartWithFields:
    """``start_response`` that adds fields to an answer's."""

    cdef object start_response
    cdef list fields

    def __call__(self, status, headers, exc_info=None):
        cdef list together = list(headers)
        together.extend(self.fields)
        if exc_info is None:
            return self.start_response(status, together)
        return self.start_response(status, together, exc_info)


cdef class WSGIPassing(Passing):
    """A WSGI application that asks first. What is unusual is for ``_bounded`` and ``_otherwise``."""

    def __call__(self, environ, start_response):
        request = WSGIRequest.__new__(WSGIRequest, environ)
        if self.has_body_limits:
            return self._bounded(request, start_response)
        return self.pass_on(self.app, request, start_response)

    def _pass_on(self, app, WSGIRequest request not None, start_response):
        """The answer of `app`, if the gate lets the request in."""
        return self.pass_on(app, request, start_response)

    cdef object pass_on(self, object app, WSGIRequest request, object start_response):
        cdef StartWithFields start
        passage = self.enter(request)
        if passage is None:
            return app(request.native, start_response)
        if type(passage) is not list:
            return self._otherwise(app, request, passage, start_response)
        if not <list>passage:
            return app(request.native, start_response)
        start = StartWithFields.__new__(StartWithFields)
        start.start_response = start_response
        start.fields = <list>passage
        return app(request.native, start)


@cython.final
@cython.freelist(16)
cdef class SendWithFields:
    """An ASGI ``send`` that adds fields to the message that begins an answer."""

    cdef object send
    cdef object fields

    def __init__(self, send, fields):
        self.send = send
        self.fields = fields

    def __call__(self, message):
        kind = message["type"]
        if kind == "http.response.start" or kind == "websocket.accept":
            message = with_fields(message, self.fields)
        return self.send(message)


cdef class ASGIPassing(Passing):
    """An ASGI application that asks first. What is unusual is for ``_in_steps`` and ``_denied``.

    What is called here may never be awaited, if its task is cancelled before it has begun. A charge stays, then; what
    has to be told of a request's end is for ``_in_steps``.
    """

    def __call__(self, scope, receive, send):
        cdef SendWithFields sending
        kind = scope["type"]
        if kind != "http" and kind != "websocket":
            return self.app(scope, receive, send)
        request = ASGIRequest.__new__(ASGIRequest, scope)
        if self.has_ends or self.has_body_limits or self.is_awaited:
            return self._in_steps(request, receive, send)
        passage = self.enter(request)
        if passage is None:
            return self.app(scope, receive, send)
        if type(passage) is not list:
            return self._denied(request, passage, receive, send)
        if not <list>passage:
            return self.app(scope, receive, send)
        sending = SendWithFields.__new__(SendWithFields)
        sending.send = send
        sending.fields = passage
        return self.app(scope, receive, sending)


cpdef dict with_fields(message, fields):
    """A message that begins an answer, with more fields. The one that was given stays as it is."""
    cdef dict changed = (<dict>message).copy() if type(message) is dict else dict(message)
    headers = changed.get("headers", ())
    changed["headers"] = [*headers, *fields]
    return changed
