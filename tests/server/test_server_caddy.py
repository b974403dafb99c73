"""Caddy in front of an application, with the configuration of docs/server.md."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from decision_server import DecisionServer
from front import Front, free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server.md"
HEAD = 'version = 1\nclient = { trusted_proxies = ["127.0.0.1"], header = "X-Forwarded-For" }\n'
RULES = """
[limits.api]
algorithm = "fixed-window"
rate = "2/hour"
align = "first"
[limits.form]
algorithm = "fixed-window"
rate = "1/hour"
align = "first"
[[rules]]
name = "api"
limits = ["api"]
path = "/api/*"
[[rules]]
name = "form"
limits = ["form"]
path = "/form"
methods = ["POST"]
response = { status = 503 }
"""


class Caddy(Front):
    """Caddy with the configuration of the page, for these ports. Ends with the block."""

    def __init__(self, directory: Path, server_port: int, app_port: int) -> None:
        port = free_port()
        found = re.search(r"```caddyfile\n(.*?)```", PAGE.read_text(), re.DOTALL)
        assert found is not None
        text = found[1].replace("7464", str(server_port)).replace("8000", str(app_port))
        text = text.replace("example.com", f"http://127.0.0.1:{port}")
        file = directory / "Caddyfile"
        file.write_text(f"{{\nadmin off\npersist_config off\nstorage file_system {directory}\n}}\n{text}")
        command = [f"{sysconfig.get_path('scripts')}/caddy", "run", "--adapter", "caddyfile", "--config", str(file)]
        super().__init__(command, port, directory / "caddy.log", writes_log=False)


@pytest.fixture
def caddy(app: int, tmp_path: Path) -> Iterator[Callable[[DecisionServer], Caddy]]:
    with ExitStack() as running:

        def start(server: DecisionServer) -> Caddy:
            return running.enter_context(Caddy(tmp_path, server.port, app))

        yield start


@pytest.fixture
def server(serve: Callable[..., DecisionServer]) -> DecisionServer:
    return serve(RULES, head=HEAD)


def test_caddy_passes_on_what_is_allowed_and_denies_the_rest(
    server: DecisionServer, caddy: Callable[[DecisionServer], Caddy]
) -> None:
    front = caddy(server)
    # Invented by the client: neither another path nor another address is believed.
    invented = {"X-Forwarded-Uri": "/harmless", "X-Forwarded-Method": "PUT", "X-Forwarded-For": "192.0.2.1"}
    for _ in range(2):
        assert front.get("/api/x?a=1", invented)[::2] == (200, b"/api/x?a=1")
    for path in ("/api/x", "/%61pi/x", "//api/x"):
        status, fields, _ = front.get(path, {"X-Forwarded-For": "192.0.2.2"})
        assert status == 429
        assert int(fields["retry-after"]) > 3000
        assert fields["ratelimit"].startswith('"api";r=0;t=')
        assert fields["ratelimit-policy"] == '"api";q=2;w=3600'
    assert front.get("/other")[0] == 200
    assert front.get("/forbidden")[::2] == (403, b"/forbidden")


def test_caddy_passes_on_the_method(server: DecisionServer, caddy: Callable[[DecisionServer], Caddy]) -> None:
    front = caddy(server)
    assert [front.get("/form")[0] for _ in range(3)] == [200] * 3
    # The application knows no POST: its 501 shows that the request was passed on.
    assert [front.get("/form", method="POST")[0] for _ in range(2)] == [501, 503]


def test_the_site_behind_caddy_is_closed_while_the_server_is_away(
    server: DecisionServer, caddy: Callable[[DecisionServer], Caddy]
) -> None:
    front = caddy(server)
    assert front.get("/api/x")[0] == 200
    server.kill()
    assert front.get("/api/x")[0] == 502
    assert front.get("/other")[0] == 502
