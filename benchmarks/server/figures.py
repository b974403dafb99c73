"""Figures of the decision server, as ratios of one run: `python benchmarks/server/figures.py --help`.

Each round measures all servers one after the other, and a figure is the median of the rounds. h2load is the client (8
connections with 16 requests at once each), on the same processors as the servers. The floor is a bare server of hyper,
`native/server/examples/constant.rs`, which answers the same requests with a constant. The peers are built by Go:
`go install github.com/envoyproxy/ratelimit/src/service_cmd@latest` and
`go install github.com/gubernator-io/gubernator/v2/cmd/gubernator@v2.13.0`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from processes import Server, free_port, gubernator, ratelimit, running

from forebay import Store, TokenBucket

CRATE = Path(__file__).resolve().parents[2] / "native" / "server"
SHOULD_RATE_LIMIT = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
GET_RATE_LIMITS = "/pb.gubernator.V1/GetRateLimits"
GRPC = ["-H", "content-type: application/grpc", "-H", "te: trailers", "-d"]
RULES = """
version = 1
store = "shm:///{name}?keys=100000"
client = {{ trusted_proxies = ["127.0.0.1"], header = "X-Forwarded-For" }}
[limits.user]
algorithm = "token-bucket"
rate = "100000000/second"
[[rules]]
name = "path"
limits = ["user"]
path = "/api/*"
[[rules]]
name = "user"
limits = ["user"]
key = "header:user | address"
"""
NGINX = """
daemon off; master_process on; worker_processes 1; pid {directory}/nginx.pid; error_log {directory}/error.log;
events {{ }}
http {{
    access_log off; client_body_temp_path {directory}; proxy_temp_path {directory}; fastcgi_temp_path {directory};
    uwsgi_temp_path {directory}; scgi_temp_path {directory};
    upstream asked {{ server 127.0.0.1:{asked}; keepalive 32; }}
    upstream app {{ server 127.0.0.1:{app}; keepalive 32; }}
    server {{
        listen 127.0.0.1:{port}; keepalive_requests 100000000;
        proxy_http_version 1.1; proxy_set_header Connection "";
        location / {{ auth_request /_forebay; proxy_pass http://app; }}
        location = /_forebay {{
            internal; proxy_pass http://asked/auth/nginx; proxy_pass_request_body off;
            proxy_set_header Connection ""; proxy_set_header Content-Length "";
            proxy_set_header X-Original-URI $request_uri; proxy_set_header X-Original-Method $request_method;
            proxy_set_header X-Forwarded-For $remote_addr;
        }}
    }}
}}
"""


def text(number: int, value: bytes) -> bytes:
    """A field of a protobuf message, with less than 128 bytes."""
    return bytes([number << 3 | 2, len(value)]) + value


def number(number: int, value: int) -> bytes:
    """A field of a protobuf message."""
    field = bytearray([number << 3])
    while value >= 128:
        field.append(value % 128 | 128)
        value //= 128
    return bytes([*field, value])


def message(data: bytes) -> bytes:
    """As gRPC sends it."""
    return b"\0" + len(data).to_bytes(4, "big") + data


def rate_limit_request() -> bytes:
    """A `RateLimitRequest` of one descriptor."""
    entry = text(1, b"user") + text(2, b"someone")
    return message(text(1, b"figures") + text(2, text(1, entry)))


def get_rate_limits_request() -> bytes:
    """A `GetRateLimitsReq` of gubernator about one key, which it answers without waiting for a batch of others."""
    limit = number(3, 1) + number(4, 100_000_000) + number(5, 1000) + number(7, 1)
    return message(text(1, text(1, b"user") + text(2, b"someone") + limit))


def asked(server: Server, path: str, count: int, *options: str) -> tuple[float, float]:
    """Requests per second, and the process's CPU time for each in microseconds, if it serves without others."""
    before = server.cpu_s()
    command = ["h2load", "-c8", "-m16", f"-n{count}", *options, f"http://127.0.0.1:{server.port}{path}"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"([\d.]+) req/s", printed)
    if found is None or f"{count} 2xx" not in printed:
        raise SystemExit(f"requests have failed: {printed}")
    return float(found[1]), (server.cpu_s() - before) / count * 1e6


def report(title: str, names: Sequence[str], rounds: Sequence[Sequence[tuple[float, float]]]) -> None:
    """The medians, and their ratios to the last one, the floor."""
    print(f"\n{title}")
    for number, name in enumerate(names):
        rate, cpu_us = (statistics.median(one[number][part] for one in rounds) for part in (0, 1))
        ratio = statistics.median(one[number][0] / one[-1][0] for one in rounds)
        cpu = f"  {cpu_us:6.1f} us of the server's CPU" if cpu_us else ""
        print(f"  {name:28} {rate:10,.0f} requests/s  {ratio:6.2f} of the floor{cpu}")


def p99_us(server: Server, rate: int, log: Path, *options: str) -> int:
    """The 99th percentile of the latency at so many requests per second, for two seconds, in microseconds."""
    log.unlink(missing_ok=True)
    per_connection = str(rate // 8)
    command = ["h2load", "-c8", "-m16", f"-n{rate * 2}", "--rps", per_connection, f"--log-file={log}", *options]
    subprocess.run(
        [*command, f"http://127.0.0.1:{server.port}{SHOULD_RATE_LIMIT}"], check=True, stdout=subprocess.DEVNULL
    )
    return int(statistics.quantiles((int(line.split()[2]) for line in log.read_text().splitlines()), n=100)[98])


def decisions_per_s(limiter: TokenBucket, count: int) -> float:
    """Decisions per second of a worker that does nothing else."""
    allow = limiter.allow
    began_s = time.perf_counter()
    for _ in range(count):
        allow("someone")
    return count / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=100_000, help="of a round, to each server")
    parser.add_argument("--ratelimit", type=Path, help="the program of Envoy's ratelimit, to measure it, too")
    parser.add_argument("--gubernator", type=Path, help="the program of gubernator, to measure it, too")
    options = parser.parse_args()
    target = Path(os.environ.get("CARGO_TARGET_DIR", CRATE / "target")) / "release"
    build = ["cargo", "build", "--release", "--quiet", "--locked", "--lib", "--example", "constant"]
    subprocess.run(build, cwd=CRATE, check=True, env={**os.environ, "PYO3_PYTHON": sys.executable})
    threads = str(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        directory = Path(folder)
        (directory / "module").mkdir()
        shutil.copy(target / "libforebay_server.so", directory / "module" / "forebay_server.so")
        name = f"forebay-figures-{os.getpid()}"
        (directory / "figures.toml").write_text(RULES.format(name=name))
        (directory / "asked").write_bytes(rate_limit_request())
        (directory / "asked-gubernator").write_bytes(get_rate_limits_request())
        ours_port, floor_port = free_port(), free_port()
        command = [sys.executable, "-m", "forebay", "serve", directory / "figures.toml", "--threads", threads]
        command += ["--listen", f"127.0.0.1:{ours_port}"]
        module = {"PYTHONPATH": str(directory / "module")}
        stack.callback(Path(f"/dev/shm/{name}").unlink, missing_ok=True)

        with Store(name, keys=100_000) as store:
            limiter = TokenBucket(store, "worker", "1000000000/second")
            loss = []
            for _ in range(options.rounds):
                alone = decisions_per_s(limiter, 1_000_000)
                with running(ours_port, *command, **module):
                    loss.append(1 - decisions_per_s(limiter, 1_000_000) / alone)
        print(f"A worker's decisions while the server waits for requests: {statistics.median(loss):.1%} fewer")

        ours = stack.enter_context(running(ours_port, *command, **module))
        floor = stack.enter_context(running(floor_port, target / "examples" / "constant", str(floor_port), threads))
        measured = [("forebay", ours, SHOULD_RATE_LIMIT, "asked", 1)]
        if options.ratelimit:
            peer = stack.enter_context(ratelimit(options.ratelimit, directory))
            measured.append(("Envoy's ratelimit with Redis", peer, SHOULD_RATE_LIMIT, "asked", 10))
        if options.gubernator:
            peer = stack.enter_context(gubernator(options.gubernator))
            measured.append(("gubernator", peer, GET_RATE_LIMITS, "asked-gubernator", 10))
        measured.append(("bare hyper", floor, SHOULD_RATE_LIMIT, "asked", 1))
        grpc = [
            [
                asked(server, path, options.requests // part, *GRPC, str(directory / body))
                for _, server, path, body, part in measured
            ]
            for _ in range(options.rounds)
        ]
        report("gRPC: ShouldRateLimit, one descriptor", [one[0] for one in measured], grpc)
        half = int(statistics.median(one[0][0] for one in grpc)) // 2
        latencies = [
            [p99_us(one, half, directory / "log", *GRPC, str(directory / "asked")) for one in (ours, floor)]
            for _ in grpc
        ]
        ours_us, floor_us = map(statistics.median, zip(*latencies, strict=True))
        print(f"  99th percentile at {half:,} requests/s: {ours_us:.0f} us, of bare hyper {floor_us:.0f} us")

        question = ["--h1", "-H", "X-Original-URI: /api/x", "-H", "X-Original-Method: GET"]
        question += ["-H", "X-Forwarded-For: 192.0.2.7"]
        http = [[asked(one, "/auth/nginx", options.requests, *question) for one in (ours, floor)] for _ in grpc]
        report("HTTP/1.1: /auth/nginx", ["forebay", "bare hyper"], http)

        fronts = []
        for number, server in enumerate((ours, floor)):
            port = free_port()
            (directory / str(number)).mkdir()
            file = directory / str(number) / "nginx.conf"
            file.write_text(NGINX.format(directory=file.parent, asked=server.port, app=floor.port, port=port))
            fronts.append(stack.enter_context(running(port, "nginx", "-c", file, "-e", file.parent / "error.log")))
        count = options.requests // 5
        # The last of an option counts. nginx takes one request of a connection after the other.
        nginx = [[asked(front, "/api/x", count, "--h1", "-c32", "-m1") for front in fronts] for _ in grpc]
        report("nginx with auth_request", ["to forebay", "to bare hyper"], nginx)


if __name__ == "__main__":
    main()
