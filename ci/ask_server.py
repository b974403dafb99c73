"""Ask the decision server that is installed here: the third of three requests is over the limit of two."""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

RULES = """
version = 1
store = "shm://?keys=1000&path=PLACE"
client = { trusted_proxies = ["127.0.0.1"], header = "X-Forwarded-For" }
[limits.api]
algorithm = "fixed-window"
rate = "2/day"
[[rules]]
name = "api"
limits = ["api"]
"""

with tempfile.TemporaryDirectory() as directory:
    rules = Path(directory, "limits.toml")
    rules.write_text(RULES.replace("PLACE", f"{directory}/store"))
    command = [sys.executable, "-m", "forebay", "serve", str(rules), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("listening on ").strip()
        question = json.dumps({"uri": "/", "method": "GET", "client": "192.0.2.7"}).encode()
        replies = [urllib.request.urlopen(f"http://{address}/v1/decide", question, timeout=60) for _ in range(3)]
        allowed = [json.load(reply)["allowed"] for reply in replies]
        server.terminate()
    if (allowed, server.returncode) != ([True, True, False], 0):
        sys.exit(f"the server at {address!r} has allowed {allowed}, and ended with {server.returncode}")
