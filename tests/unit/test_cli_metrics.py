"""``forebay metrics``: printed, and served from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from process_helpers import DEADLINE_S
from prometheus_client.parser import text_string_to_metric_families
from scrapes import scraped

from forebay import Store, TokenBucket
from forebay.cli import metrics
from forebay.cli.commands import forebay

COMMAND = str(Path(sys.executable).parent / "forebay")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(forebay, ["metrics", *map(str, arguments)], prog_name="forebay")


def test_metrics_prints_what_a_collector_shows(store_name: str) -> None:
    with Store(store_name, keys=1000) as store:
        TokenBucket(store, "api", "5/hour").allow("key")
        result = run(store_name)
        assert (result.exit_code, result.stderr) == (0, "")
        families = list(text_string_to_metric_families(result.stdout))
        printed = {(sample.name, sample.value) for family in families for sample in family.samples}
        assert printed == {(name, value) for (name, *_), value in scraped(store).items()}
        listed = json.loads(run(store_name, "--json").stdout)
        assert listed["version"] == 1
        one = {"store": store_name, "limiter": "api", "algorithm": "TokenBucket"}
        assert {"name": "forebay_allowed_total", "labels": one, "value": 1} in listed["metrics"]
        assert len(listed["metrics"]) == len(printed) or len(listed["metrics"]) == len(scraped(store))


def test_metrics_of_a_missing_store_are_refused_and_nothing_is_made(store_name: str) -> None:
    result = run(store_name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no such file" in result.stderr
    assert not Path(f"/dev/shm/forebay-{store_name}").exists()


@pytest.mark.parametrize("listen", ["", "port", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "²"])
def test_addresses_that_cannot_be_are_refused(store_name: str, listen: str) -> None:
    result = run(store_name, "--listen", listen)
    assert result.exit_code == 2
    assert "is no address such as 9464" in result.stderr


def test_an_address_in_use_is_refused(store_name: str) -> None:
    with serving(store_name) as (_, url):
        result = subprocess.run(
            [COMMAND, "metrics", store_name, "--listen", url.split("/")[2]], capture_output=True, text=True
        )
    assert result.returncode == 2
    assert "in use" in result.stderr
    assert "Traceback" not in result.stderr


@contextmanager
def serving(*arguments: str, host: str = "127.0.0.1:") -> Iterator[tuple[subprocess.Popen[str], str]]:
    program = [COMMAND, "metrics", *arguments, "--listen", f"{host}0"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.fullmatch(r"serving (http://.*/metrics)\n", line)
            assert found, line
            yield process, found[1]
        finally:
            process.kill()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return str(response.read().decode())


@pytest.mark.parametrize("host", ["", "127.0.0.1:", "localhost:"])
def test_listen_follows_a_store_that_comes_and_goes(store_name: str, host: str) -> None:
    up, counter = f'forebay_store_up{{store="{store_name}"}}', f'limiter="api",store="{store_name}"}}'
    with serving(store_name, host=host) as (process, url):
        assert f"{up} 0.0" in get(url)
        for decisions in (3, 1):
            with Store(store_name, keys=1000) as store:
                bucket = TokenBucket(store, "api", "5/hour")
                assert all(bucket.allow("key") for _ in range(decisions))
                text = get(url)
                assert f"{up} 1.0" in text
                assert f'forebay_allowed_total{{algorithm="TokenBucket",{counter} {decisions}.0' in text
            Store.unlink(store_name)
            assert f"{up} 0.0" in get(url)
        assert not Path(f"/dev/shm/forebay-{store_name}").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def test_listen_ends_with_sigint(store_name: str) -> None:
    with serving(store_name) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_listen_and_json_go_not_together(store_name: str) -> None:
    result = run(store_name, "--json", "--listen", "9464")
    assert result.exit_code == 2
    assert "not both" in result.stderr


def test_a_silent_client_is_disconnected(store_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would keep a thread and a descriptor, and with enough of them nobody could scrape.
    monkeypatch.setattr(metrics, "SILENT_S", 0.05)
    with metrics.serving([f"/dev/shm/forebay-{store_name}"], "127.0.0.1", 0) as port:
        for sent in (b"", b"GET /metrics HTTP/1.1\r\nHos"):
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
                client.sendall(sent)
                assert client.recv(1) == b""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as response:
            assert b"forebay_store_up" in response.read()


def test_metrics_are_utf_8_in_every_locale(store_name: str) -> None:
    with Store(store_name, keys=1000) as store:
        TokenBucket(store, "日本", "5/hour").allow("key")
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        result = subprocess.run([COMMAND, "metrics", store_name], capture_output=True, check=True, env=environment)
    assert '"日本"'.encode() in result.stdout
