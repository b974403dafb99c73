"""Metrics of stores, without a library: each library's module takes them from here.

`readings` names every metric and makes samples of what was seen. `segments` looks at a store's segment, by its open
file or from outside. `sources` finds what there is to look at behind each kind of store.
"""
