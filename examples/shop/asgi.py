"""The same shop for an ASGI server.

cd examples/shop && gunicorn -k uvicorn_worker.UvicornWorker asgi:app
"""

from app import answer, orders


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    customer = dict(scope["headers"]).get(b"x-customer", b"").decode("latin-1") or scope["client"][0]
    # No await and no thread: a decision takes less time than handing it to one.
    status, headers, body = answer(orders.hit(customer))
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
