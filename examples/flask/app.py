"""A Flask shop: each client may send 100 requests and 5 orders a minute, and 3 wrong passwords an hour.

cd examples/flask && gunicorn --workers 4 app:app
curl -i -X POST http://127.0.0.1:8000/orders      # six times
"""

import os

from flask import Flask, request

from forebay import Store, TokenBucket
from forebay.contrib.flask import Limits
from forebay.web import Rule

app = Flask(__name__)

store = Store(os.environ.get("SHOP_STORE", "flask-shop"), keys=100_000)
limits = Limits(app, [Rule(TokenBucket(store, "everything", "100/minute"))])
orders = TokenBucket(store, "orders", "5/minute")
wrong_passwords = TokenBucket(store, "wrong passwords", "3/hour")


@app.post("/orders")
@limits.limit(orders)
def order():
    return {"ordered": True, "worker": os.getpid()}


@app.post("/login")
@limits.limit(wrong_passwords, charge_on={401})
def login():
    return ({}, 200) if request.form.get("password") == "sesame" else ({}, 401)


@app.get("/health")
@limits.exempt
def health():
    return {}
