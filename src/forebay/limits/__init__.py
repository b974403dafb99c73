"""A storage for the ``limits`` library, and so for Flask-Limiter and slowapi: one limit for all workers of a host.

After ``import forebay.limits``, ``forebay:///shop`` is a storage like ``memory://`` and ``redis://``, and
``async+forebay:///shop`` is one for asyncio. Options are in the query (``forebay:///shop?keys=1_000_000``) or keywords;
see ``options``. The strategies are the library's three and ``"gcra"``, which this import registers.

Needs the extra ``forebay[limits]``.
"""

from forebay.extras import Needs

with Needs("limits", __name__):
    from forebay.limits.storages import AsyncForebayStorage, ForebayStorage
    from forebay.limits.strategies import AsyncGCRARateLimiter, GCRARateLimiter

__all__ = ["AsyncForebayStorage", "AsyncGCRARateLimiter", "ForebayStorage", "GCRARateLimiter"]
