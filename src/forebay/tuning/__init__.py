"""``forebay tune``: replay requests of the past through the limiters, on a clock set by hand, and compare them.

Requests pass these stages:

* `readers` read a log, and `traffic` generates requests. Both pass times and keys on, in chunks.
* `columns` numbers the keys (`keys`, `times`, `combined`), sorts what is nearly sorted, and writes 12 bytes per request
  to a temporary file.
* `candidates` are the limits and algorithms to compare; each is a real limiter in a private store.
* `replay` decides every request by one candidate, and judges each decision by what the candidate has admitted before.
* `comparison` runs all of this and has the figures; `document` is their JSON, `report` their page.

Memory is bounded by the number of keys, not of requests.
"""
