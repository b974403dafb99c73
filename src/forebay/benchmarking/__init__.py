"""``forebay bench``: what decisions cost on this machine, by this interpreter.

* `subjects` are what is measured: loops of one process (`limiters`, `key_sets`), several processes or threads
  (`crowds`, by `workers`), and modes over Redis (`over_redis`).
* `measurement` measures all of them in several passes, so that the spread of the passes shows the run's noise.
* `run` is the result, and its JSON; `comparison` compares two of them, `advice` is derived from one, `report` its page.
* `timing` times loops, and `machine` describes where it was.

pytest-benchmark is not used here: it measures each function once and for all within a session of pytest, but noise that
lasts for seconds shows only if all subjects are measured in turn, several times. The benchmarks of this repository,
which it runs, use the same loops, limiters and workers.
"""
