"""A storage for the ``limits`` library, and so for Flask-Limiter and slowapi: one limit over all workers of a host.

``import forebay.limits`` once, and ``forebay:///shop`` is a storage like ``memory://`` and ``redis://``; with
``async+forebay:///shop`` for asyncio. Options stand in the query (``forebay:///shop?keys=1_000_000``) or are given as
keywords; see ``options``. The strategies are the library's three and ``"gcra"``, which comes with this import.

Needs the extra ``forebay[limits]``.
"""

from forebay.extras import Needs

with Needs("limits", __name__):
    from forebay.limits.storages import AsyncForebayStorage, ForebayStorage
    from forebay.limits.strategies import AsyncGCRARateLimiter, GCRARateLimiter

__all__ = ["AsyncForebayStorage", "AsyncGCRARateLimiter", "ForebayStorage", "GCRARateLimiter"]
