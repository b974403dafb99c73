"""A storage for the ``limits`` library, and so for Flask-Limiter and slowapi: one limit over all workers of a host.

``import penstock.limits`` once, and ``penstock:///shop`` is a storage like ``memory://`` and ``redis://``; with
``async+penstock:///shop`` for asyncio. Options stand in the query (``penstock:///shop?keys=1_000_000``) or are given as
keywords; see ``options``. The strategies are the library's three and ``"gcra"``, which comes with this import.

Needs the extra ``penstock[limits]``.
"""

from penstock.extras import Needs

with Needs("limits", __name__):
    from penstock.limits.storages import AsyncPenstockStorage, PenstockStorage
    from penstock.limits.strategies import AsyncGCRARateLimiter, GCRARateLimiter

__all__ = ["AsyncGCRARateLimiter", "AsyncPenstockStorage", "GCRARateLimiter", "PenstockStorage"]
