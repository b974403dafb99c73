"""The requests of WSGI and ASGI, and keys of their peers. Compiled, since every limited request needs them."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.dict cimport PyDict_GetItemRef
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF

import contextlib

from forebay.web.paths import odd_readings, with_slash


cdef enum:
    MOST_REMEMBERED = 4096       # keys of peers and fields
    LONGEST_REMEMBERED = 200     # characters of a field
    MOST_MOUNTS = 2              # of Bottle in Bottle


cdef bint is_plain(str path):
    """Whether every router reads it as it is, apart from a slash or a line's end after it."""
    cdef Py_UCS4 character, before = 0
    if not path.startswith("/"):
        return False
    for character in path:
        # Two comparisons rule out the usual character.
        if character < u"&" and (character == u"%" or character == u"\n"):
            return False
        if character > u":" and (character == u";" or character == 0xFFFD):
            return False
        if before == u"/" and (character == u"/" or character == u"." or character == u"@"):
            return False
        before = character
    return True


def readings(*paths):
    """Every path that a router may read in one of these, each once; empty if it may be any path."""
    cdef dict found = {}
    for path in paths:
        if is_plain(path):
            found[path] = None
            continue
        odd = odd_readings(path)
        if not odd:
            return ()
        found.update(dict.fromkeys(odd))
    return tuple(found)


cdef tuple readings_beneath(str root, tuple whole, tuple inside):
    """The readings of whole paths, those inside of an application's root, and these with the root in front."""
    if not whole or not inside:
        return ()
    return tuple(dict.fromkeys([
        *whole, *inside, *[start + path for start in with_slash(root.rstrip("/")) for path in inside]
    ]))


cdef tuple OVERRIDES = (b"x-http-method-override", b"x-http-method", b"x-method-override")


cdef bint is_override(object field):
    """Whether it is the name of one. A WSGI application within reads ``X_HTTP_Method`` as ``X-HTTP-Method``."""
    cdef bytes name = field if type(field) is bytes else bytes(field)
    # Few names begin so, and replacing takes longer.
    return PyBytes_AS_STRING(name)[0] == c"x" and name.replace(b"_", b"-") in OVERRIDES


def methods(method, header):
    """The method of a request, and those in its fields that override it. `header` returns a field's value."""
    values = [header(name.decode()) for name in OVERRIDES]
    return with_overrides(method, [value for value in values if value])


cdef tuple with_overrides(str method, list values):
    if not values:
        return (method,)
    return (method, *[name.strip().upper() for value in values for name in value.split(",")])


cdef object decoded(str path):
    """The text of a path in which each byte is a character."""
    return path if path.isascii() else path.encode("latin-1", "replace").decode("utf-8", "replace")


cdef list texts_of(str path):
    """The text of such a path; some routers read bytes that aren't UTF-8 as Latin-1.

    Bottle omits them, and decodes the path again beneath each of its mounts.
    """
    text = decoded(path)
    if text.isascii():
        return [text]
    texts = [text, path] if "\ufffd" in text else [text]
    with contextlib.suppress(UnicodeEncodeError):
        again = path.encode("latin-1").decode("utf-8", "ignore")
        for _ in range(MOST_MOUNTS):
            again = again.encode("latin-1").decode("utf-8", "ignore")
            texts.append(again)
    return texts


cdef object value_of(object mapping, str name):
    """``mapping.get(name)``. A dict, as servers make it, is read without a call of its method."""
    cdef PyObject* found
    if type(mapping) is not dict:
        return mapping.get(name)
    if not PyDict_GetItemRef(mapping, name, &found):
        return None
    value = <object>found
    Py_DECREF(value)
    return value


cdef str joined(str root, str path):
    return root + path if not root or not path or path.startswith("/") else root + "/" + path


@cython.final
@cython.freelist(16)
cdef class WSGIRequest:
    """The request of a WSGI environment."""

    def __cinit__(self, environ, route=None):
        self.native = environ
        self.route = route

    @property
    def method(self):
        # Some servers report it as it was sent, and frameworks read post as POST.
        return self.native["REQUEST_METHOD"].upper()

    @property
    def methods(self):
        cdef dict environ = self.native if type(self.native) is dict else dict(self.native)
        cdef list values = []
        for name in ("HTTP_X_HTTP_METHOD_OVERRIDE", "HTTP_X_HTTP_METHOD", "HTTP_X_METHOD_OVERRIDE"):
            value = environ.get(name)
            if value:
                values.append(value)
        return with_overrides(self.method, values)

    @property
    def path(self):
        return decoded(joined(self.native.get("SCRIPT_NAME", ""), self.native.get("PATH_INFO", "")))

    @property
    def paths(self):
        cdef str root = self.native.get("SCRIPT_NAME", "")
        cdef str inside = self.native.get("PATH_INFO", "")
        cdef list texts
        if self.route is None and inside.isascii() and is_plain(inside):
            if not root:
                return (inside,)
            if root.isascii() and is_plain(root + inside):
                return root + inside, inside
        texts = texts_of(inside)
        if self.route is not None:
            texts.append(self.route)
        if not root:
            return readings(*texts)
        return readings_beneath(decoded(root), readings(*texts_of(joined(root, inside))), readings(*texts))

    @property
    def peer(self):
        return self.peer_address()

    cdef object peer_address(self):
        return value_of(self.native, "REMOTE_ADDR") or None

    @property
    def user(self):
        return self.native.get("REMOTE_USER") or None

    @property
    def content_length(self):
        return self.native.get("CONTENT_LENGTH") or None

    def header(self, name):
        variable = name.upper().replace("-", "_")
        # CGI: the only two fields without the prefix HTTP_.
        if variable not in ("CONTENT_LENGTH", "CONTENT_TYPE"):
            variable = "HTTP_" + variable
        return self.native.get(variable) or None


@cython.final
@cython.freelist(16)
cdef class ASGIRequest:
    """The request of an ASGI scope."""

    def __cinit__(self, scope):
        self.native = scope

    @property
    def method(self):
        return self.native["method"].upper() if self.native["type"] == "http" else "WEBSOCKET"

    @property
    def methods(self):
        cdef list values = []
        for name, value in self.native["headers"]:
            if is_override(name):
                # Some read it as UTF-8, in which "\u017f" is a small letter of "S".
                values.append(value.decode("utf-8", "replace"))
        return with_overrides(self.method, values)

    @property
    def path(self):
        return self.native["path"]

    @property
    def paths(self):
        cdef str path = self.native["path"]
        cdef object root = self.native.get("root_path")
        cdef object app_root = self.native.get("app_root_path")
        cdef list roots, sent, parts, inside
        cdef str beneath
        cdef tuple found
        if not root and not app_root:
            return (path,) if is_plain(path) else readings(path)
        roots = [root for root in (root, app_root) if root]
        if len(roots) == 1 and is_plain(path) and path.startswith(roots[0]):
            beneath = path[len(roots[0]):]
            if is_plain(beneath) and roots[0] not in beneath:
                return path, beneath
        # Some servers report the root in front of the path, too, others only separately. Routers remove it only from
        # the front; /users/v1 is a user to them.
        found = readings(path, *[joined(root, path) for root in roots if not (path + "/").startswith(root + "/")])
        # Quart removes the host of a whole URL before the root.
        sent = [path] if path.startswith("/") else [path, *with_slash(path)]
        for root in roots:
            parts = [known.partition(root) for known in sent]
            inside = [after if present else before for before, present, after in parts]
            # Litestar removes the root again in a mounted application.
            inside += [known.replace(root, "") for known in sent if known.count(root) > 1]
            found = readings_beneath(root, found, readings(*inside))
        return found

    @property
    def peer(self):
        return self.peer_address()

    cdef object peer_address(self):
        client = value_of(self.native, "client")
        return client[0] if client else None

    @property
    def user(self):
        """The user of Starlette's ``AuthenticationMiddleware``, or text."""
        user = self.native.get("user")
        if user is None or isinstance(user, str):
            return user or None
        if not getattr(user, "is_authenticated", True):
            return None
        for attribute in ("identity", "display_name"):
            # Starlette's own users have a name only; their identity raises NotImplementedError.
            with contextlib.suppress(AttributeError, NotImplementedError):
                if name := getattr(user, attribute):
                    return str(name)
        return None

    @property
    def content_length(self):
        return self.header("content-length")

    def header(self, name):
        wanted = name.lower().encode("latin-1")
        values = [value for key, value in self.native["headers"] if key == wanted]
        return b",".join(values).decode("latin-1") if values else None


cdef bint is_options(object request) except -1:
    """Whether the method is ``OPTIONS``, in capitals or not."""
    if type(request) is WSGIRequest:
        method = value_of((<WSGIRequest>request).native, "REQUEST_METHOD")
    elif type(request) is ASGIRequest:
        method = value_of((<ASGIRequest>request).native, "method")
    else:
        method = request.method
    return type(method) is str and len(<str>method) == 7 and (<str>method).upper() == "OPTIONS"


cdef class PeerKey:
    """A key function of a request's peer and perhaps one of its fields. It caches the keys.

    A subclass computes ``key_of(peer, field)``; ``PeerKey(None)`` reads no field. Thread-safe.
    """

    def __init__(self, field_name):
        self.field_name = field_name
        self.known = {}

    def __call__(self, request):
        return self.key_for(request)

    cdef object key_for(self, object request):
        cdef PyObject* found
        if type(request) is ASGIRequest:
            peer = (<ASGIRequest>request).peer_address()
        elif type(request) is WSGIRequest:
            peer = (<WSGIRequest>request).peer_address()
        else:
            peer = request.peer
        if self.field_name is None:
            cache_key = peer
            field = None
        else:
            field = request.header(self.field_name)
            if field is not None and len(field) > LONGEST_REMEMBERED:
                return self.key_of(peer, field)
            cache_key = peer, field
        # A reference of its own: another thread may clear the dict at this moment.
        if PyDict_GetItemRef(self.known, cache_key, &found):
            key = <object>found
            Py_DECREF(key)
            return key
        key = self.key_of(peer, field)
        if len(self.known) >= MOST_REMEMBERED:
            self.known.clear()
        self.known[cache_key] = key
        return key

    def key_of(self, peer, field):
        """The key of a request's peer and field: a subclass has it."""
        raise NotImplementedError

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self
