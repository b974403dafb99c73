"""nginx in front of an application, with the configuration of docs/server.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from decision_server import DecisionServer
from front import Front, free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server.md"
RULES = """
[limits.api]
algorithm = "fixed-window"
rate = "2/hour"
align = "first"
[limits.busy]
algorithm = "fixed-window"
rate = "1/hour"
align = "first"
[[rules]]
name = "api"
limits = ["api"]
path = "/api/*"
[[rules]]
name = "busy"
limits = ["busy"]
path = "/busy"
response = { status = 503 }
"""


class Nginx(Front):
    """nginx with the configuration of the page, for these ports. Ends with the block."""

    def __init__(self, directory: Path, server_port: int, app_port: int, *, opens: bool) -> None:
        directory.mkdir()
        port = free_port()
        found = re.search(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
        assert found is not None
        text = found[1].replace("7464", str(server_port)).replace("8000", str(app_port))
        text = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
        if opens:
            text = text.replace("# error_page 502", "error_page 502")
        paths = "".join(
            f"{kind}_temp_path {directory};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        file = directory / "nginx.conf"
        file.write_text(
            f"daemon off;\nmaster_process off;\npid {directory}/pid;\nerror_log {directory}/error.log;\n"
            f"events {{}}\nhttp {{\naccess_log off;\n{paths}{text}}}\n"
        )
        log = directory / "error.log"
        super().__init__(["nginx", "-c", str(file), "-e", str(log)], port, log, writes_log=True)


@pytest.fixture
def nginx(app: int, tmp_path: Path) -> Iterator[Callable[..., Nginx]]:
    with ExitStack() as running:

        def start(server: DecisionServer, *, opens: bool = False) -> Nginx:
            return running.enter_context(Nginx(tmp_path / f"nginx-{opens}", server.port, app, opens=opens))

        yield start


@pytest.fixture
def server(serve: Callable[..., DecisionServer]) -> DecisionServer:
    client = 'client = { trusted_proxies = ["127.0.0.1"], header = "X-Real-IP" }'
    return serve(RULES, head=f"version = 1\n{client}\n")


def test_nginx_passes_on_what_is_allowed_and_denies_the_rest(
    server: DecisionServer, nginx: Callable[..., Nginx]
) -> None:
    front = nginx(server)
    for left in (1, 0):
        status, fields, body = front.get("/api/x?a=1", {"X-Original-URI": "/harmless", "X-Forwarded-For": "192.0.2.1"})
        assert (status, body) == (200, b"/api/x?a=1")
        assert fields["ratelimit"].startswith(f'"api";r={left};t=')
        assert fields["ratelimit-policy"] == '"api";q=2;w=3600'
    for path in ("/api/x", "/%61pi/x", "//api/x"):
        status, fields, _ = front.get(path)
        assert status == 429
        assert int(fields["retry-after"]) > 3000
        assert fields["ratelimit"].startswith('"api";r=0;t=')
    assert front.get("/other")[0] == 200
    assert front.get("/forbidden")[::2] == (403, b"/forbidden")
    assert [front.get("/busy")[0] for _ in range(2)] == [200, 503]
    # Only nginx itself may ask there.
    assert front.get("/_forebay")[0] == 404


@pytest.mark.parametrize(("opens", "expected"), [(False, 500), (True, 200)])
def test_the_site_is_closed_or_open_while_the_server_is_away(
    server: DecisionServer, nginx: Callable[..., Nginx], opens: bool, expected: int
) -> None:
    front = nginx(server, opens=opens)
    assert front.get("/api/x")[0] == 200
    server.kill()
    assert front.get("/api/x")[0] == expected
    assert front.get("/api/x")[0] == expected
