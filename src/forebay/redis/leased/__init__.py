"""A host that borrows permits from Redis in batches, and spends them at the speed of shared memory."""
