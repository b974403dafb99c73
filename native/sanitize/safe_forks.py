"""A pytest plugin: a fork waits until threads that have ended for Python have also ended for the kernel.

At its end a thread gives its memory back under a lock of the address sanitizer. That lock is not freed in the child of
a fork (before version 19 of its runtime), so the child would wait for it for ever.
"""

import os
import threading
import time


def wait_for_ended_threads() -> None:
    end = time.monotonic() + 1
    while len(os.listdir("/proc/self/task")) > threading.active_count() and time.monotonic() < end:
        time.sleep(0.001)


os.register_at_fork(before=wait_for_ended_threads)
