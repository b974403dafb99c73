"""Each test runs at every place where limits can be kept, or at the places of its ``@pytest.mark.places``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from places import EVERYWHERE, Clock, Place, opened
from redis_server import RedisServer, redis_server
from scripts_clock import moved_by_tests


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "places(*kinds): where a test's limits are kept, if not everywhere")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place_kind" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("places")
        metafunc.parametrize("place_kind", marker.args if marker else EVERYWHERE)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def scripts_with_a_clock_of_the_tests() -> Iterator[None]:
    with moved_by_tests():
        yield


@pytest.fixture
def place(place_kind: str, shared_server: RedisServer) -> Iterator[Place]:
    with opened(place_kind, shared_server) as opened_place:
        yield opened_place


@pytest.fixture
def store(place: Place) -> object:
    return place.store


@pytest.fixture
def clock(place: Place) -> Clock:
    return place.clock
