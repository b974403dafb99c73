"""A pytest plugin: what Hypothesis tries is little where every access is checked; the other tests have the rest.

``-p few_examples --hypothesis-profile=few``
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "few",
    deadline=None,
    database=None,
    max_examples=2,
    stateful_step_count=10,
    suppress_health_check=[HealthCheck.too_slow],
)
