"""The public classes of limiters, and the constructor that all of them share.

``TokenBucket(store, ...)`` makes a ``TokenBucket`` if the store is in shared memory. Every other store has a method
``make_limiter``, and the constructor returns what that method returns. ``stores`` has the types of both.
"""

from cpython.object cimport PyObject, PyTypeObject, newfunc
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from cpython.type cimport PyType_Modified

from forebay.core.algorithms.bucketed_window import BucketedWindow
from forebay.core.algorithms.concurrency import Concurrency
from forebay.core.algorithms.credits import Credits
from forebay.core.algorithms.leaky_bucket import LeakyBucket
from forebay.core.algorithms.min_interval import MinInterval
from forebay.core.algorithms.sliding_log import SlidingLog
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.all_of import AllOf
from forebay.core.limiter_arguments import signature_of


# By class, the address of the constructor that makes objects of the class itself.
cdef dict own_constructors = {}


cdef object make(type kind, PyObject* args, PyObject* kwargs):
    """The `tp_new` of the public classes. If the first argument has ``make_limiter``, that makes the object: a store,
    or for ``AllOf`` a limiter. The object isn't an instance of this class then, so Python calls no ``__init__``.

    A leased limiter joins limits of several stores, so it makes an ``AllOf`` wherever it stands.
    """
    cdef object first = None
    if args != NULL and PyTuple_GET_SIZE(<object>args) != 0:
        first = <object>PyTuple_GET_ITEM(<object>args, 0)
        if kind is AllOf:
            first = next((limiter for limiter in <object>args if getattr(type(limiter), "joins_stores", False)), first)
    elif kwargs != NULL:
        first = (<dict>kwargs).get("store")
    make_limiter = getattr(type(first), "make_limiter", None)
    if make_limiter is not None:
        return make_limiter(first, kind, <object>args, {} if kwargs == NULL else <object>kwargs)
    return (<newfunc><void*><size_t>own_constructors[kind])(kind, args, kwargs)


cdef int share_constructor(tuple kinds) except -1:
    """Only for final classes: a derived class would inherit `make`, which would not find it."""
    for kind in kinds:
        own_constructors[kind] = <size_t><void*>(<PyTypeObject*>kind).tp_new
        (<PyTypeObject*>kind).tp_new = <newfunc>make
        # inspect and help() find no other signature of a compiled class.
        (<dict>(<PyTypeObject*>kind).tp_dict)["__signature__"] = signature_of(kind)
        PyType_Modified(kind)
    return 0


share_constructor((
    AllOf, BucketedWindow, Concurrency, Credits, FixedWindow, LeakyBucket, MinInterval, SlidingLog, SlidingWindow,
    TokenBucket,
))
