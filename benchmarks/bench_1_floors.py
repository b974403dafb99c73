"""Floors: the cheapest calls from Python, and costs that a decision should stay below."""

from __future__ import annotations

import time

import forebay_floor
from baselines import DictBucket
from conftest import GENEROUS, Measure, statement

KEY = "user:42:abcdefg"
SECTION = "Floors"


def bench_empty_loop(measure: Measure) -> None:
    measure("one turn of an empty loop, part of every figure", statement("pass"), section=SECTION)


def bench_empty_method(measure: Measure) -> None:
    method = forebay_floor.Empty().method
    assert method(KEY)
    measure("an empty method of the same kind of class", statement("f(k)", f=method, k=KEY), section=SECTION)


def bench_monotonic_ns(measure: Measure) -> None:
    measure("`time.monotonic_ns()`", statement("f()", f=time.monotonic_ns), section=SECTION)


def bench_dict_bucket(measure: Measure) -> None:
    bucket = DictBucket(1000, GENEROUS["burst"])
    assert bucket.allow(KEY)
    measure("token bucket in a dict: no lock, not shared", statement("f(k)", f=bucket.allow, k=KEY), section=SECTION)
