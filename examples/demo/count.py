"""Makes the load of count.lua without wrk: python count.py PORT CONNECTIONS SECONDS CUSTOMER prints the same JSON."""

import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress


async def main(port: int, connections: int, seconds: float, customer: str) -> None:
    statuses: Counter[str] = Counter()
    admitted_by: Counter[str] = Counter()
    request = f"GET / HTTP/1.1\r\nHost: shop\r\nX-Customer: {customer}\r\nConnection: close\r\n\r\n".encode()
    deadline = time.monotonic() + seconds

    async def customer_asks() -> None:
        while time.monotonic() < deadline:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            answer = (await reader.read()).decode()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            status = answer.split(maxsplit=2)[1]
            statuses[status] += 1
            if status == "200":
                admitted_by[answer.partition("X-Worker: ")[2].split("\r\n")[0]] += 1

    await asyncio.gather(*(customer_asks() for _ in range(connections)))
    print(json.dumps({"statuses": statuses, "admitted_by": admitted_by}))


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
