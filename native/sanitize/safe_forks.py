"""A pytest plugin: a fork waits until the threads that Python doesn't know of sleep or have ended.

A thread takes locks of the address sanitizer at its start and at its end, when Python does not count it as its own:
pytest's watchdog, which starts with each test, and threads whose Python code has returned. The child of a fork inherits
such a lock as it was, and nobody there releases it: the child's next allocation would wait for ever. A thread that
sleeps holds none.
"""

import os
import threading
import time

LONGEST_WAIT_S = 10
_always_running = set()


def wait_for_other_threads() -> None:
    end_s = time.monotonic() + LONGEST_WAIT_S
    while others := running_threads() - _always_running:
        if time.monotonic() > end_s:
            _always_running.update(others)
        time.sleep(0.001)


def running_threads() -> set[int]:
    """The threads that Python doesn't know of, and that don't sleep."""
    running = set()
    known = {thread.native_id for thread in threading.enumerate()} | {threading.get_native_id()}
    for number in set(map(int, os.listdir("/proc/self/task"))) - known:
        try:
            with open(f"/proc/self/task/{number}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if state != b"S":
            running.add(number)
    return running


os.register_at_fork(before=wait_for_other_threads)
