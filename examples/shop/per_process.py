"""The mistake: the same shop with a store per worker, so four workers admit four times the limit.

For the comparison in ci/demo. (A private store made before the fork, with --preload, is shared and limits well.)
"""

import app as shop

from forebay import Store, TokenBucket

shop.orders = TokenBucket(Store.private(keys=100_000), "orders", shop.RATE, burst=shop.BURST)
app = shop.app
