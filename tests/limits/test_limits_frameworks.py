"""Flask-Limiter and slowapi, each with four workers: together they admit exactly the limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from limits_servers import WORKERS, free_port, reach_all_workers, served, statuses

LIMIT = 50
STRATEGIES = ("fixed-window", "moving-window", "sliding-window-counter", "gcra")
GUNICORN = ["gunicorn", "--workers", str(WORKERS), "--bind", "127.0.0.1:0", "--graceful-timeout", "5"]


def check_exact(example: str, command: list[str], strategy: str, store_name: str, tmp_path: Path) -> None:
    # A year: no permit refills during the test.
    environment = {
        "SHOP_LIMIT": f"{LIMIT}/year",
        "SHOP_STRATEGY": strategy,
        "SHOP_STORAGE": f"forebay:///{store_name}?keys=1000&moving_window_keys=100",
    }
    with served(example, command, tmp_path / "server.log", **environment) as port:
        answers = reach_all_workers(port)
    assert statuses(answers) == {200: LIMIT, 429: len(answers) - LIMIT}
    admitted = [answer for answer in answers if answer.status == 200]
    # The remaining permits are read after the decision, so concurrent workers can report the same number.
    assert min(int(answer.headers["x-ratelimit-remaining"]) for answer in admitted) == 0
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers if answer.status == 429)


# Each strategy runs under one kind of worker: the kind's effect on the store does not depend on the strategy.
@pytest.mark.parametrize(
    ("options", "strategy"),
    list(zip(2 * [["--preload"], ["--worker-class", "gthread", "--threads", "4"]], STRATEGIES, strict=True)),
)
def test_flask_limiter_admits_exactly_the_limit(
    options: list[str], strategy: str, store_name: str, tmp_path: Path
) -> None:
    check_exact("flask_limiter", [*GUNICORN, *options, "app:app"], strategy, store_name, tmp_path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slowapi_under_gunicorn_admits_exactly_the_limit(strategy: str, store_name: str, tmp_path: Path) -> None:
    command = [*GUNICORN, "--preload", "--worker-class", "uvicorn_worker.UvicornWorker", "app:app"]
    check_exact("slowapi", command, strategy, store_name, tmp_path)


def test_slowapi_under_uvicorn_admits_exactly_the_limit(store_name: str, tmp_path: Path) -> None:
    """uvicorn spawns its workers instead of forking them: each worker opens the store by name."""
    command = ["uvicorn", "--workers", str(WORKERS), "--port", str(free_port()), "app:app"]
    check_exact("slowapi", command, "fixed-window", store_name, tmp_path)
