"""The names of Redis keys. Two limiter keys have one name if they are equal over shared memory.

A name consists of the store's namespace, the encoded key, the limiter's name and a suffix for the kind of state.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from forebay.core.table.keys import Key
from forebay.errors import InvalidKey, short_repr

__all__ = ["KeySpace", "digest", "fingerprint", "plain"]

FINGERPRINT_BYTES = 16
# Besides letters and digits, the characters of plain keys that aren't quoted. Braces and commas are quoted: a cluster
# hashes the text between the braces, and commas separate the parts of a tuple.
_LEFT_AS_THEY_ARE = "-._~:/@"


class KeySpace:
    """The server and the key names of a store's states."""

    def __init__(self, server_identity: tuple[Any, ...], namespace: str, *, is_plain: bool) -> None:
        self.server_identity, self.is_plain = server_identity, is_plain
        self.encode: Callable[[Key], bytes] = plain if is_plain else fingerprint
        self._namespace = namespace.encode()

    def affixes(self, name: str, suffix: bytes) -> tuple[bytes, bytes]:
        """The text before and after an encoded key of the limiter `name`.

        A cluster finds the slot by the text in braces, which is the encoded key alone. So all states of one key are in
        one slot. The suffix has no colon, so the names of two limiters never lead to one Redis key.

        Synced limiters have other names: see `shard_prefix`.
        """
        return self._namespace + b":{", b"}:" + name.encode("utf-8", "surrogatepass") + b":" + suffix

    def shard_prefix(self, name: str, shard: int) -> bytes:
        """The text before the keys of one shard of the limiter `name`. A cluster has all of them in one slot."""
        return self._namespace + b":{%x:" % shard + name.encode("utf-8", "surrogatepass") + b"}:"


def fingerprint(key: Key) -> bytes:
    """128 bits, in hexadecimal: too many for two keys to share them, even if an attacker chooses the keys."""
    # The usual kind of key takes the fastest way.
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
    """A key's type and value, so that no two keys have one encoding. A subclass counts as its base type."""
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
    # In decimal, except for a number so long that the conversion would take seconds.
    text = int.__repr__(part) if isinstance(part, int) and len(data) <= 64 else quote(data, _LEFT_AS_THEY_ARE)
    return b"%b:%b" % (kind, text.encode())
