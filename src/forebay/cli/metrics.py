"""``forebay metrics``: a store's metrics for Prometheus, once or served from outside."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, cast

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.options import as_json_option, directory_option
from forebay.cli.printing import consoles, print_json, printable, refusals
from forebay.cli.survey import path_of_store
from forebay.metrics.readings import parts_of, samples_of
from forebay.metrics.sources import Sources
from forebay.verification.mapped_segment import MappedSegment

__all__ = ["command", "serving"]

LOOPBACK: Final = "127.0.0.1"
SILENT_S: Final = 10.0
"""A client that sends or takes nothing for so long is disconnected: it would keep a thread and a descriptor."""


@click.command("metrics", short_help="Print or serve the metrics of stores.")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@directory_option
@click.option("--listen", metavar="[HOST:]PORT", help="Serve them until a signal; HOST is 127.0.0.1 by default.")
@as_json_option
def command(names: tuple[str, ...], directory: str | None, listen: str | None, as_json: bool) -> None:
    """Print the metrics of the stores NAME... as Prometheus reads them, or serve them by HTTP.

    Only reads: makes nothing, locks nothing, attaches to nothing. A NAME with a slash is a file's path. With --listen a
    store need not exist yet, and is followed when it is made again. Exits with 0, or with 2 if a store can't be read or
    the address can't be used.
    """
    with refusals():
        if listen is not None and as_json:
            raise click.UsageError("--listen serves text: give it or --json, not both")
        paths = [path_of_store(name, directory) for name in names]
        if listen is not None:
            _serve(paths, *_address(listen))
            return
        for path in paths:
            with MappedSegment(path):
                pass  # one that can't be read is refused
        if as_json:
            print_json(metrics=_documents(paths))
        else:
            with Needs("prometheus", "forebay metrics"):
                from prometheus_client import CollectorRegistry, generate_latest

            from forebay.contrib.prometheus import ForebayCollector

            registry = CollectorRegistry()
            ForebayCollector(*paths, registry=registry)
            # Prometheus reads UTF-8, also where the terminal has another encoding.
            click.echo(generate_latest(registry), nl=False)


def _documents(paths: list[str]) -> list[dict[str, Any]]:
    readings = Sources(paths).readings()
    return [
        {"name": f"{metric.family}_{part}" if part else metric.sample, "labels": labels, "value": value}
        for metric, values in readings.items()
        for part in parts_of(metric)
        for labels, value in samples_of(metric, part, values)
    ]


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{listen!r} is no address such as 9464, 127.0.0.1:9464 or [::1]:9464")
    return host.strip("[]") or LOOPBACK, int(port)


class _Bounded(BaseHTTPRequestHandler):
    """Ends a connection whose client does nothing."""

    timeout = SILENT_S

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):
            super().handle()


@contextmanager
def serving(paths: list[str], host: str, port: int) -> Iterator[int]:
    """Serve the metrics of stores by HTTP, from threads. Yields the port, which is a free one for 0."""
    with Needs("prometheus", "forebay metrics"):
        from prometheus_client import CollectorRegistry, start_http_server

    from forebay.contrib.prometheus import ForebayCollector

    registry = CollectorRegistry()
    ForebayCollector(*paths, registry=registry)
    server, thread = start_http_server(port, host, registry)
    server.RequestHandlerClass = type("_Handler", (_Bounded, cast(type, server.RequestHandlerClass)), {})
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _serve(paths: list[str], host: str, port: int) -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: ended.set())
    with serving(paths, host, port) as port:
        shown = f"[{host}]" if ":" in host else host
        consoles()[1].print(printable(f"serving http://{shown}:{port}/metrics"))
        ended.wait()
