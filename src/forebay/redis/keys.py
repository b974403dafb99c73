"""From a limiter's key to what stands for it in Redis: the same for keys that are the same over shared memory."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from forebay.core.table.keys import Key
from forebay.errors import InvalidKey, short_repr

__all__ = ["KeySpace", "digest", "fingerprint", "plain"]

FINGERPRINT_BYTES = 16
# Besides letters and digits. Not the braces, which begin and end what a cluster's slot is found by, nor the comma.
_LEFT_AS_THEY_ARE = "-._~:/@"


class KeySpace:
    """Where the states of a store's limiters are: on which server, and under which names."""

    def __init__(self, server_identity: tuple[Any, ...], namespace: str, *, is_plain: bool) -> None:
        self.server_identity, self.is_plain = server_identity, is_plain
        self.encode: Callable[[Key], bytes] = plain if is_plain else fingerprint
        self._namespace = namespace.encode()

    def affixes(self, name: str, suffix: bytes) -> tuple[bytes, bytes]:
        """The text before and after an encoded key of the limiter `name`.

        All states of one key are in one slot of a cluster, as that is found by what is in braces. The suffix has no
        colon, so that no two limiters have one key.
        """
        return self._namespace + b":{", b"}:" + name.encode("utf-8", "surrogatepass") + b":" + suffix


def fingerprint(key: Key) -> bytes:
    """128 bits, in hexadecimal: too many for two keys to share them, even if an attacker chooses the keys."""
    # The usual one by the shortest way.
    data = b"s" + key.encode("utf-8", "surrogatepass") if type(key) is str else b"".join(_encoded(key))
    return blake2b(data, digest_size=FINGERPRINT_BYTES).hexdigest().encode()


def plain(key: Key) -> bytes:
    """The key itself, for people to read."""
    if isinstance(key, tuple):
        return b"t:" + b",".join(map(_plain_part, tuple.__iter__(key)))
    _encoded(key)
    return _plain_part(key)


def digest(*parts: object) -> str:
    """A short hash of parameters: long enough to separate the parameters used with one limiter name."""
    return blake2b(repr(parts).encode(), digest_size=4).hexdigest()


def _encoded(key: Any) -> tuple[bytes, ...]:
    """Its type and value, so that no two have one encoding. Subclasses count as what they derive from."""
    if isinstance(key, tuple):
        return (b"t", *(encoded for part in tuple.__iter__(key) for encoded in _encoded_part(part)))
    if isinstance(key, (str, bytes, int)) and not isinstance(key, bool):
        return _bytes_of(key)
    raise InvalidKey(f"a key is str, bytes, int or a tuple of them, not {type(key).__name__}: {short_repr(key)}")


def _encoded_part(part: Any) -> tuple[bytes, ...]:
    if not isinstance(part, (str, bytes, int)) or isinstance(part, bool):
        raise InvalidKey(
            f"a tuple that is a key holds str, bytes and int, not {type(part).__name__}: {short_repr(part)}"
        )
    kind, data = _bytes_of(part)
    return kind, len(data).to_bytes(8, "little"), data


def _bytes_of(part: str | bytes | int) -> tuple[bytes, bytes]:
    if isinstance(part, str):
        return b"s", str.encode(part, "utf-8", "surrogatepass")
    if isinstance(part, bytes):
        return b"b", bytes.join(b"", (part,))
    return b"i", int.to_bytes(part, int.bit_length(part) // 8 + 1, "little", signed=True)


def _plain_part(part: str | bytes | int) -> bytes:
    _encoded_part(part)
    kind, data = _bytes_of(part)
    # A number as people write it, if it isn't one that takes seconds to write.
    text = int.__repr__(part) if isinstance(part, int) and len(data) <= 64 else quote(data, _LEFT_AS_THEY_ARE)
    return b"%b:%b" % (kind, text.encode())
