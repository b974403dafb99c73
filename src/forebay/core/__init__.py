"""The compiled core: decisions over a table that all processes of a host share.

A call of ``TokenBucket.allow(key)`` passes these stages, in this order. All of them are inlined into ``allow``, up to
the CAS; only an uncommon case calls a function.

| stage | function | file |
| --- | --- | --- |
| entry: each limiter's own, with its decision function as a constant | ``allow`` | ``algorithms/token_bucket.pyx`` |
| hash the key and add the kind: the tag | ``tag_of`` | ``cell_limiter.pxd`` |
| | ``hash_key_of`` | ``table/keys.pxd`` |
| after a fork: attach to this process; after a close: raise ``StoreClosed`` | ``ensure_attached`` | ``limiter.pxd`` |
| fetch the key's home line, read the clock | ``home_line``, ``table_now`` | ``table/table.pxd`` |
| find the tag in the home line | ``table_try_line`` | ``table/table.pxd`` |
| decide: from state, time and request to the next state | ``gcra_take`` | ``algorithms/gcra.pxd`` |
| one CAS if allowed, one 16-byte load if denied | ``table_try_cell`` | ``table/table.pxd`` |
| uncommon: another line, a new key, a lost race | ``table_decide`` | ``table/table.pyx`` |
| a new key: claim, scan, promote | ``insert``, ``scan`` | ``table/table.pyx`` |
| count the outcome | ``count_in``, ``count_events`` | ``native/include/forebay/counting.h``, ``limiter.pyx`` |

``allow_by`` in ``cell_limiter.pxd`` makes the tag, and ``decide_by`` calls the other stages one after the other.
``table`` knows no limiter; ``algorithms``, ``leased`` and ``synced`` give it decision functions. ``batch`` decides many
keys in one call, ``all_of`` many limits. ``kinds`` lists the public classes; its constructor lets a store elsewhere, as
in Redis, make limiters of its own, which have the types in ``stores``. ``c_api`` decides for native threads without the
GIL; its capsule is ``_C_API`` here.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "_C_API":
        # Here, because few programs need it.
        from forebay.core.c_api.functions import capsule

        return capsule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
