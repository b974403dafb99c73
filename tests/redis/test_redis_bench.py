"""``forebay bench --redis``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import redis
from redis_server import RedisServer

COMMAND = Path(sys.executable).parent / "forebay"
QUICK = ("bench", "--quick", "--keys", "1000")


def test_every_mode_is_measured_and_no_key_is_left(server: RedisServer, client: redis.Redis, tmp_path: Path) -> None:
    client.set("forebay-bench", "of somebody else")
    subprocess.run([COMMAND, *QUICK, "--redis", server.url, "--json", tmp_path / "run.json"], check=True)
    document = json.loads((tmp_path / "run.json").read_text())
    measured = {one["name"]: one["median_ns"] for one in document["figures"] if one["group"] == "over Redis"}
    left_out = {one["name"]: one["reason"] for one in document["left_out"]}
    assert left_out == {}
    assert {"RedisStore: allow", "LeasedStore: allow", "SyncedStore: allow", "PING by redis-py"} <= measured.keys()
    assert document["machine"]["Redis"].endswith(client.info("server")["redis_version"])
    assert client.keys() == [b"forebay-bench"]


def test_an_interrupted_run_leaves_no_key(server: RedisServer, client: redis.Redis) -> None:
    with subprocess.Popen(
        [COMMAND, *QUICK, "--redis", server.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        while not client.dbsize():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert client.dbsize() == 0
