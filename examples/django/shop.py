"""A Django shop in one file: each client may send 100 requests and order 5 times a minute; the API has throttles.

cd examples/django && gunicorn --workers 4 shop:application
cd examples/django && gunicorn --workers 4 --worker-class uvicorn_worker.UvicornWorker shop:asgi_application
curl -i -X POST http://127.0.0.1:8000/orders      # six times
curl -i http://127.0.0.1:8000/api                 # eleven times
"""

import os

import django
from django.conf import settings

from forebay import Store, TokenBucket
from forebay.web import Rule

store = Store(os.environ.get("SHOP_STORE", "django-shop"), keys=100_000)
rules = [Rule(TokenBucket(store, "everything", "100/minute"))]
orders = TokenBucket(store, "orders", "5/minute")

settings.configure(
    SECRET_KEY="an example's",
    ALLOWED_HOSTS=["127.0.0.1"],
    ROOT_URLCONF=__name__,
    MIDDLEWARE=["forebay.contrib.django.LimitsMiddleware"],
    FOREBAY={"RULES": "shop.rules", "STORE": "shop.store"},
    REST_FRAMEWORK={
        "DEFAULT_AUTHENTICATION_CLASSES": [],
        "UNAUTHENTICATED_USER": None,
        "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
        "DEFAULT_THROTTLE_CLASSES": ["forebay.contrib.rest_framework.AnonRateThrottle"],
        "DEFAULT_THROTTLE_RATES": {"anon": "10/min"},
    },
)
django.setup()

from django.core.asgi import get_asgi_application  # noqa: E402
from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.http import JsonResponse  # noqa: E402
from django.urls import path  # noqa: E402
from rest_framework.response import Response  # noqa: E402
from rest_framework.views import APIView  # noqa: E402

from forebay.contrib.django import limited  # noqa: E402


@limited(orders)
def order(request):
    return JsonResponse({"ordered": True, "worker": os.getpid()})


@limited(orders)
async def order_later(request):
    return JsonResponse({"ordered": True, "worker": os.getpid()})


class Api(APIView):
    def get(self, request):
        return Response({"worker": os.getpid()})


urlpatterns = [path("orders", order), path("orders/later", order_later), path("api", Api.as_view())]
application = get_wsgi_application()
asgi_application = get_asgi_application()
