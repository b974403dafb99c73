"""The C API: native threads decide without the GIL. The contract is forebay.h; here is why it holds.

``functions`` is the table of functions, ``handles`` has the objects behind the handles, ``decisions`` and ``leases``
what a native thread does with them, ``gate`` the end of the interpreter.

Handles
-------
A `forebay_limiter`, a `forebay_thread` and a `forebay_rate` are references to objects. A thread's object has all that
its calls read, and refers to the limiter's. So the limiter, its store and its mapping live as long as any handle, in
whatever order the handles are closed.

The counter line
----------------
A thread counts by plain loads and stores in a line that no other thread and no other process writes. The process owns
the line by a lock on the store's file, which ends when the file is closed.

* *attach* (with the GIL): takes a line that is free, or, with none, the limiter's shared line.
* *detach* (with the GIL): gives the line back.
* *close of the store*, in any thread, at any time: marks the segment as closed, then starts a new generation. The file
  stays open until the last handle is closed (`Attachment.hold`). So a thread that is between its decision and its count
  counts in a line that is still its own. It needs no flag that close would have to wait for, and close waits for none.
* *a decision*: compares the generation. If it has changed, the thread looks whether the process was forked or the
  segment was closed, and only then takes the new generation for checked. It loads the generation first: a close
  after that changes it again.
* *a fork*: the child's copy of a thread's object has the parent's number of forks, so it says FOREBAY_FORKED for ever,
  and writes nothing. `detach` in the child gives back no line, as this process owns none there.
* *the end of a thread* without detach: the line stays locked, and counts nothing.
* *a kill*: the kernel drops the lock, and the next owner continues the line's counts.
"""
