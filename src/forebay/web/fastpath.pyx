"""The usual path of a request, compiled: its rules are charged, and its response gets header fields.

Python code handles denials, requests with a cleanup, and body limits: the methods named in `WSGIFastPath` and
`ASGIFastPath`.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.decision cimport Decision, next_after_ns_of, remaining_of
from forebay.core.table.native cimport load_acquire, load_relaxed, monotonic_ns, store_relaxed, store_release
from forebay.core.table.segment_view cimport Segment
from forebay.web.native_requests cimport ASGIRequest, PeerKey, WSGIRequest, is_options

from forebay.errors import InvalidCost, InvalidKey
from forebay.web.store_errors import DENYING_ERRORS


cdef extern from "Python.h":
    object PyUnicode_New(Py_ssize_t size, Py_UCS4 greatest)
    void* PyUnicode_DATA(object text)


cdef enum:
    NS = 1_000_000_000
    LONGEST_ITEM = 48            # two numbers of 20 digits, and the text between them
    DECISIONS_PER_SAMPLE = 128   # a power of two

cdef uint64_t NO_VERSION = 0xFFFF_FFFF_FFFF_FFFF


@cython.final
@cython.freelist(16)
cdef class Passage:
    """Permission for one request. `fields` are header fields for its response.

    If there is a `cleanup`, call its ``begin`` and ``end`` with the response's status: ``end`` before the last part of
    the response is sent, or the client's next request may come before the permits are back.
    """

    cdef readonly object fields
    cdef readonly object cleanup

    def __init__(self, fields, cleanup=None):
        self.fields = fields
        self.cleanup = cleanup


cdef inline char* put_number(char* end, uint64_t number) noexcept:
    """Write decimal digits backwards from `end`; the address of the first one."""
    while True:
        end -= 1
        end[0] = <char>(48 + number % 10)
        number //= 10
        if number == 0:
            return end


@cython.final
cdef class RateLimitFields:
    """The fields of draft-ietf-httpapi-ratelimit-headers-10: a fixed ``RateLimit-Policy``, and ``RateLimit``.

    `prefixes`: for each limit the beginning of its item (``"name";r=``). `held`: whether its permits are held, so that
    the time of the next one is unknown. See `header_writer` for the arguments of a call.
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
        # Whole seconds until more remains than now.
        cdef uint64_t wait_ns = 0 if self.held[i] else next_after_ns_of(decision)
        memcpy(text, PyBytes_AS_STRING(prefix), length)
        if wait_ns:
            first = put_number(end, (wait_ns - 1) // NS + 1) - 3
            memcpy(first, b";t=", 3)
        first = put_number(first, remaining_of(decision))
        memcpy(text + length, first, end - first)
        return length + (end - first)


@cython.final
cdef class Sampling:
    """Times one of 128 decisions of this process, for the host's histogram in `segment`; with None, no decision.

    ``begin`` before a decision, and ``end`` with its result once it is made. *Threads*: safe; of several that decide at
    once, some may not be counted as one of the 128. *Fork*: safe.
    """

    cdef Segment segment

    def __cinit__(self, Segment segment):
        self.segment = segment

    cdef inline uint64_t begun_ns(self) noexcept:
        cdef uint64_t turn
        if self.segment is None:
            return 0
        turn = load_relaxed(&self.segment.decision_turn) + 1
        store_relaxed(&self.segment.decision_turn, turn)
        return 0 if turn % DECISIONS_PER_SAMPLE != 0 else monotonic_ns()

    def begin(self):
        """The time; 0 if it isn't the turn of this decision."""
        return self.begun_ns()

    cdef inline int ended(self, uint64_t begun_ns) except -1:
        if begun_ns != 0:
            self.segment.note_decision_latency(monotonic_ns() - begun_ns)
        return 0

    def end(self, uint64_t begun_ns):
        """The decision is made that has begun at that time, or has no turn."""
        self.ended(begun_ns)


@cython.final
cdef class FastCharge:
    """Charges the rules of a plan without reserved or held permits: the usual case.

    `hit`: the limiter's method for one rule, or ``AllOf.hit_each`` for several. `key_of` and `cost_of` take a request.
    `admit_any` takes one that may be a CORS preflight.
    """

    cdef object hit, admit_any, key_of, cost_of, cost, write, denial, denial_for, explained, partitions
    cdef CellLimiter limiter     # called directly, where the cost is 1; or None
    cdef Sampling sampling
    cdef bint is_one, is_by_peer

    def __cinit__(self, plan, hit, admit_any, key_of, cost_of, cost, is_one):
        self.hit, self.admit_any, self.key_of = hit, admit_any, key_of
        self.cost_of, self.cost, self.is_one = cost_of, cost, is_one
        self.is_by_peer = isinstance(key_of, PeerKey) and type(key_of).__call__ is PeerKey.__call__
        self.limiter = None
        if is_one and cost_of is None and type(cost) is int and cost == 1:
            [rule] = plan.charged
            if isinstance(rule.limiter, CellLimiter):
                self.limiter = rule.limiter
        self.sampling = plan.sampling
        self.write = plan.write
        self.partitions = plan.partitions if plan.secret else None
        self.denial, self.denial_for, self.explained = plan.denial, plan.denials.for_error, plan.explained

    def __call__(self, request):
        charged = self.charge(request)
        return Passage(charged) if type(charged) is list else charged

    cdef object charge(self, object request):
        """A list of header fields for an admitted request, or a denial."""
        cdef list decisions
        cdef uint64_t begun_ns
        key, cost = "", 1
        if is_options(request):
            passage = self.admit_any(request)
            return list((<Passage>passage).fields) if type(passage) is Passage else passage
        begun_ns = self.sampling.begun_ns()
        try:
            key = (<PeerKey>self.key_of).key_for(request) if self.is_by_peer else self.key_of(request)
            if self.limiter is not None:
                decided = self.limiter.decide_once(key, &self.limiter.unit)
            else:
                cost = self.cost if self.cost_of is None else self.cost_of(request)
                decided = self.hit(key, cost)
        except DENYING_ERRORS as error:
            denial = self.denial_for(error, request)
            return [] if denial is None else denial
        except (InvalidKey, InvalidCost) as error:
            if not self.is_one:
                raise
            raise self.explained(error, key, cost) from None
        decisions = [decided] if self.is_one else decided
        for decided in decisions:
            if not (<Decision?>decided).allowed:
                denial = self.denial(request, decisions)
                self.sampling.ended(begun_ns)
                return denial
        partitions = () if self.partitions is None else self.partitions(request)
        if type(self.write) is RateLimitFields:
            fields = (<RateLimitFields>self.write).fields_of(decisions, partitions)
        else:
            fields = list(self.write(decisions, partitions))
        self.sampling.ended(begun_ns)
        return fields


@cython.final
cdef class RulesWatch:
    """Tells whether a segment has other live rules than those that the holder of this object follows.

    *Threads*: safe. *Fork*: safe. One load of the segment, and a comparison.
    """

    cdef Segment segment
    cdef const uint64_t* version
    cdef uint64_t followed

    def __cinit__(self, Segment segment not None):
        self.segment = segment
        self.version = segment.rules_word()
        self.forget()

    cdef inline bint is_behind(self) noexcept:
        return load_acquire(self.version) != load_acquire(&self.followed)

    def has_news(self):
        """Whether the version in force isn't the one that is followed."""
        return self.is_behind()

    def follow(self, uint64_t version):
        """The rules of that version are in use."""
        store_release(&self.followed, version)

    def forget(self):
        """No version is followed, so there is news."""
        store_release(&self.followed, NO_VERSION)


cdef class FastPath:
    """An application, `app`, behind a `gate`.

    Where the rules are live, `live` is the ``LiveGate``, which sets the gate of each version: ``follow_rules`` begins
    that.
    """

    cdef public object app
    cdef readonly object live
    cdef object current_gate, admit
    cdef RulesWatch watch
    cdef bint has_body_limits, has_cleanups, is_awaited
    cdef bint is_unusual         # of requests: none takes the shortest way

    def follow_rules(self, live):
        """Take the gates of `live` from now on."""
        self.live = live
        self.watch = live.watch
        live.attach(self)

    @property
    def gate(self):
        with cython.critical_section(self):
            return self.current_gate

    @gate.setter
    def gate(self, gate):
        # All attributes are read first: an object that is no gate changes nothing.
        cdef bint has_body_limits = bool(gate.body_limits)
        cdef bint has_cleanups = gate.has_cleanups
        cdef bint is_awaited = gate.is_awaited
        admit = gate.admit
        with cython.critical_section(self):
            # The objects that are replaced end after the section, as that may run Python code.
            admit, self.admit = self.admit, admit
            gate, self.current_gate = self.current_gate, gate
            self.has_body_limits, self.has_cleanups, self.is_awaited = has_body_limits, has_cleanups, is_awaited
            self.is_unusual = has_body_limits or self.watch is not None

    cdef int follow_news(self) except -1:
        """Take the gate of the version in force, where rules are live."""
        if self.watch is not None and self.watch.is_behind():
            self.live.lead()
        return 0

    cdef object enter(self, object admit, object request):
        """A list of fields, a passage with a cleanup, a denial, or None if no rule matches.

        `admit` is the gate's, read together with the flags: another thread, or a key function, may replace the gate.
        """
        if type(admit) is FastCharge:
            return (<FastCharge>admit).charge(request)
        passage = admit(request)
        if type(passage) is Passage and (<Passage>passage).cleanup is None:
            return list((<Passage>passage).fields)
        return passage


@cython.final
@cython.freelist(16)
@cython.trashcan(True)
cdef class StartWithFields:
    """A ``start_response`` that adds header fields."""

    cdef object start_response
    cdef list fields

    def __call__(self, status, headers, exc_info=None):
        cdef list together = list(headers)
        together.extend(self.fields)
        if exc_info is None:
            return self.start_response(status, together)
        return self.start_response(status, together, exc_info)


cdef class WSGIFastPath(FastPath):
    """A limited WSGI application. A subclass has ``_respond_bounded`` and ``_respond_unusual``."""

    def __call__(self, environ, start_response):
        request = WSGIRequest.__new__(WSGIRequest, environ)
        if self.is_unusual:
            return self.respond_unusually(request, start_response)
        with cython.critical_section(self):
            admit = self.admit
        return self.respond(admit, self.app, request, start_response)

    cdef object respond_unusually(self, WSGIRequest request, object start_response):
        cdef bint has_body_limits
        self.follow_news()
        with cython.critical_section(self):
            admit = self.admit
            has_body_limits = self.has_body_limits
        if has_body_limits:
            return self._respond_bounded(request, start_response)
        return self.respond(admit, self.app, request, start_response)

    def _respond(self, gate, app, WSGIRequest request not None, start_response):
        """The response of `app`, if `gate` admits the request."""
        return self.respond(gate.admit, app, request, start_response)

    cdef object respond(self, object admit, object app, WSGIRequest request, object start_response):
        cdef StartWithFields start
        passage = self.enter(admit, request)
        if passage is None:
            return app(request.native, start_response)
        if type(passage) is not list:
            return self._respond_unusual(app, request, passage, start_response)
        if not <list>passage:
            return app(request.native, start_response)
        start = StartWithFields.__new__(StartWithFields)
        start.start_response = start_response
        start.fields = <list>passage
        return app(request.native, start)


@cython.final
@cython.freelist(16)
cdef class SendWithFields:
    """An ASGI ``send`` that adds header fields to the message that starts a response."""

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


cdef class ASGIFastPath(FastPath):
    """A limited ASGI application. A subclass has ``_respond_unusual`` and ``_deny``.

    The coroutine returned here is never awaited if its task is cancelled before it starts. The charge stays, then.
    Requests with a cleanup go to ``_respond_unusual``, which charges only once it runs.
    """

    def __call__(self, scope, receive, send):
        cdef SendWithFields sending
        cdef bint is_unusual
        kind = scope["type"]
        if kind != "http" and kind != "websocket":
            return self.app(scope, receive, send)
        request = ASGIRequest.__new__(ASGIRequest, scope)
        with cython.critical_section(self):
            admit = self.admit
            is_unusual = self.has_cleanups or self.is_unusual or self.is_awaited
        if is_unusual and self.watch is not None:
            self.follow_news()
            with cython.critical_section(self):
                admit = self.admit
                is_unusual = self.has_cleanups or self.has_body_limits or self.is_awaited
        if is_unusual:
            return self._respond_unusual(request, receive, send)
        passage = self.enter(admit, request)
        if passage is None:
            return self.app(scope, receive, send)
        if type(passage) is not list:
            return self._deny(request, passage, receive, send)
        if not <list>passage:
            return self.app(scope, receive, send)
        sending = SendWithFields.__new__(SendWithFields)
        sending.send = send
        sending.fields = passage
        return self.app(scope, receive, sending)


cpdef dict with_fields(message, fields):
    """A copy of a message that starts a response, with more header fields."""
    cdef dict changed = (<dict>message).copy() if type(message) is dict else dict(message)
    headers = changed.get("headers", ())
    changed["headers"] = [*headers, *fields]
    return changed
