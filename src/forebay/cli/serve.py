"""``forebay serve``: the decision server for programs that aren't Python."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, Final, NoReturn

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.printing import consoles, print_error, printable
from forebay.errors import ForebayError, InvalidRuleFile, LimitsDisabledWarning, short_repr
from forebay.store import Store
from forebay.web.patterns import TOKEN

__all__ = ["command"]

_OTHER_FILES: Final = 64
"""Files that the process has open beside its connections: the store's, and those that Python reads meanwhile."""
_FILES_OF_THREAD: Final = 16
"""Of its event loop, and its copies of the listeners."""
_CLOSING_S: Final = 1.0
"""For a store over Redis, whatever else has taken the time of --drain."""


class _Seconds(click.FloatRange):
    """A range without "nan", which is below and above nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


@click.command("serve")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--listen",
    metavar="ADDRESS",
    multiple=True,
    default=["127.0.0.1:7464"],
    show_default=True,
    help="HOST:PORT or unix:PATH; repeatable. A client that reaches it can use up limits.",
)
@click.option("--threads", type=click.IntRange(1, 256), help="By default as many as there are processors.")
@click.option(
    "--connections", type=click.IntRange(1), default=1024, show_default=True, help="Connections at once; others wait."
)
@click.option(
    "--idle",
    type=_Seconds(0.1, 86_400),
    default=75.0,
    show_default=True,
    help="Close a connection after so many seconds without a whole request.",
)
@click.option(
    "--drain",
    type=_Seconds(0, 86_400),
    default=10.0,
    show_default=True,
    help="At the end, wait so many seconds for requests that are under way.",
)
@click.option("--reuse-port", is_flag=True, help="Let several servers listen to one port (SO_REUSEPORT).")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Only those who send its token may change state by the JSON API. By default peers of this host may.",
)
@click.option("--store", metavar="URL", help="The store of a file that names none, such as shm:///shop?keys=1000000.")
@click.option("--live", is_flag=True, help="Follow changes of the file, with all processes that have it as LiveRules.")
@click.option("--tier-header", metavar="NAME", help="The field in which the proxy or the service names the tier.")
@click.option(
    "--no-proxies", is_flag=True, help="Answer the JSON API only, which can hold permits until a request ends."
)
@click.option(
    "--tls-certificate",
    type=click.Path(path_type=Path),
    help="TLS over TCP: a certificate and its chain, in PEM.",
)
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its private key, in PEM. SIGHUP reads both again.")
def command(
    file: Path,
    listen: tuple[str, ...],
    threads: int | None,
    connections: int,
    idle: float,
    drain: float,
    reuse_port: bool,
    token_file: Path | None,
    store: str | None,
    live: bool,
    tier_header: str | None,
    no_proxies: bool,
    tls_certificate: Path | None,
    tls_key: Path | None,
) -> None:
    """Answer proxies and services by the rules of FILE, over the host's memory: nginx auth_request, Traefik
    ForwardAuth, Caddy forward_auth, Envoy ext_authz and rate limits by gRPC, and JSON. Limits over Redis are charged by
    Python.

    Runs until SIGTERM or SIGINT. Exits with 0 then, with 1 if the file has problems, with 2 if it can't serve.
    """
    if tls_certificate is not None or not os.isatty(0):
        # Only the end of a terminal ends the server. With TLS, it acts on the signal once it runs.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    console, errors = consoles()
    threads = threads or len(os.sched_getaffinity(0))
    _need_files(connections + threads * _FILES_OF_THREAD + _OTHER_FILES)
    token = None if token_file is None else _token_in(token_file)
    if (tls_certificate is None) != (tls_key is None):
        raise click.UsageError("TLS needs a certificate and its key: give --tls-certificate and --tls-key")
    if tier_header is not None and not TOKEN.fullmatch(tier_header):
        raise click.UsageError(f"a header field has a name such as X-Tier, not {short_repr(tier_header)}")
    # Live rules may be in the store already.
    if not live and not file.is_file():
        raise click.UsageError(f"there is no rule file {printable(str(file))}: write the path of one, and no pipe")
    try:
        # A distribution of its own, in Rust.
        forebay_server: Any = importlib.import_module("forebay_server")
    except ModuleNotFoundError:
        errors.print('forebay serve needs the decision server: pip install "forebay[server]"')
        sys.exit(2)
    # The log says it.
    warnings.simplefilter("ignore", LimitsDisabledWarning)

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        # A standard error that takes nothing is no reason not to start.
        with contextlib.suppress(OSError):
            errors.print(f"forebay: {printable(str(message))}")

    warnings.showwarning = show
    try:
        plan, plans = _plan_of(file, store, tier_header, live=live, holds_permits=no_proxies)
        if not no_proxies and not plan.trusts_unix and any(address.startswith("unix:") for address in listen):
            raise click.UsageError(
                'a peer behind a unix: socket names the client, so write "unix" among the trusted_proxies of the file'
            )
        server = forebay_server.Server(
            plan.compiled(forebay_server),
            listen,
            threads=threads,
            connections=connections,
            idle_s=idle,
            drain_s=drain,
            reuse_port=reuse_port,
            token=token,
            proxies=not no_proxies,
            live=None if plans is None else _live(plans, forebay_server),
            tls=None if tls_certificate is None else (tls_certificate, tls_key),
        )
    except InvalidRuleFile as error:
        print_error(error)
        sys.exit(1)
    except (ForebayError, ImportError, OSError, ValueError) as error:
        print_error(error)
        sys.exit(2)
    # The server ends by it, not by an exception of Python.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def ready() -> None:
        for address in server.addresses:
            console.print(f"listening on {printable(address)}", soft_wrap=True)
        sys.stdout.flush()

    status, left_s = 0, 0.0
    try:
        left_s = server.run(ready)
    except OSError as error:
        errors.print(printable(str(error)))
        status = 2
    if not isinstance(plan.store, Store):
        _end(plan.store, left_s, status)
    sys.exit(status)


def _plan_of(
    file: Path, store: str | None, tier_field: str | None, *, live: bool, holds_permits: bool
) -> tuple[Any, Any]:
    """The plan, and those of live rules or None."""
    if not live:
        from forebay.serving.plan import plan_of

        return plan_of(file, store, tier_field=tier_field, holds_permits=holds_permits), None
    if store is None:
        raise click.UsageError(
            "live rules are kept in a store beside the file: leave its store out, and write --store "
            "shm:///NAME?keys=1000000"
        )
    if holds_permits:
        raise click.UsageError("permits are held by a limit of one version: leave --live or --no-proxies out")
    from forebay.serving.live import LivePlans

    plans = LivePlans(file, store, tier_field=tier_field)
    return plans.plan, plans


def _end(store: Any, left_s: float, status: int) -> NoReturn:
    """Close a store over Redis, and end the process. It gives leases back, if Redis answers soon."""
    closing = threading.Thread(target=store.close, name="forebay-closing", daemon=True)
    closing.start()
    closing.join(max(left_s, _CLOSING_S))
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that waits for Redis all the same would go on while the interpreter ends.
    os._exit(status)


def _live(plans: Any, forebay_server: Any) -> tuple[Any, int, int, Any]:
    """What the server follows live rules by."""

    def latest() -> tuple[int, Any]:
        number, plan = plans.latest()
        if plan is None:
            return number, None
        try:
            return number, plan.compiled(forebay_server)
        except ValueError as error:
            plans.refuse(number, error)
            return number, None

    return plans.memory, plans.place, plans.number, latest


def _need_files(count: int) -> None:
    """Let this process open so many files. Without a file for its connection, a client would wait unanswered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise click.UsageError(
            f"so many connections and threads need {count} open files, and this process may have {hard}: "
            "allow fewer by --connections, or raise the limit (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _token_in(file: Path) -> str:
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        raise click.UsageError(f"the token can't be read: {error}. Write the path of a file with one") from None
    if not re.fullmatch(rb"[!-~]{16,1024}", token):
        raise click.UsageError(
            f"{printable(str(file))} has no token: write 16 to 1024 characters of ASCII without spaces, such as "
            "`openssl rand -hex 32` prints"
        )
    return token.decode()
