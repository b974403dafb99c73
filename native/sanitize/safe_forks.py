"""A pytest plugin: a fork waits until threads that have ended for Python have also ended for the kernel.

At its end a thread gives its memory back under a lock of the address sanitizer. The child of a fork inherits that lock
as it was, and nobody there releases it: the child's next allocation would wait for ever.
"""

import os
import threading
import time

# Threads that Python doesn't know of, and that have not ended in a second.
_others = 0


def wait_for_ended_threads() -> None:
    global _others
    end = time.monotonic() + 1
    while (others := len(os.listdir("/proc/self/task")) - threading.active_count()) > _others:
        if time.monotonic() > end:
            _others = others
        time.sleep(0.001)


os.register_at_fork(before=wait_for_ended_threads)
