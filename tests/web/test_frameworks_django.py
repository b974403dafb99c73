"""Django in one process: messages of `manage.py check`, exempt views, and rates of throttles."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import django
import pytest
from django.conf import settings
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, AsyncRequestFactory, Client, RequestFactory, override_settings
from django.urls import include, path
from django.utils.decorators import method_decorator, sync_and_async_middleware
from django.views import View

import forebay.contrib.django
from forebay import (
    Concurrency,
    CountsPerWorkerWarning,
    InvalidKey,
    InvalidLimiter,
    LimitsDisabledWarning,
    Rate,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.seldom import Seldom
from forebay.testing import ManualClock
from forebay.web import (
    AddressList,
    Answer,
    Ban,
    BodyLimit,
    ClientAddress,
    Denial,
    Deny,
    Request,
    Rule,
    everyone,
    options,
    user,
)

APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
if not settings.configured:
    settings.configure(SECRET_KEY="known to everybody", ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, INSTALLED_APPS=APPS)
django.setup()

from forebay.contrib.django import LimitsMiddleware, exempt, limited  # noqa: E402
from forebay.contrib.django.checks import check_deployment, check_settings  # noqa: E402

LIMITS = "forebay.contrib.django.LimitsMiddleware"
USERS = "django.contrib.auth.middleware.AuthenticationMiddleware"
THROTTLES = {
    "DEFAULT_THROTTLE_CLASSES": ["forebay.contrib.rest_framework.AnonRateThrottle"],
    "DEFAULT_THROTTLE_RATES": {"anon": "2/10s"},
}


class Its:
    """The limits of a test."""

    def __init__(self) -> None:
        self.store = Store.private(keys=100, clock=ManualClock(1000))
        self.bucket = TokenBucket(self.store, "bucket", "3/day")
        self.rules = [Rule(self.bucket, key=everyone)]
        self.of_users = [Rule(self.bucket, key=user(otherwise=everyone))]

    def left(self) -> int:
        return self.bucket.peek("everyone", 0).remaining


@pytest.fixture
def its() -> Iterator[Its]:
    its = Its()
    rules.extend(its.rules)
    with its.store:
        yield its
    rules.clear()


rules: list[Rule] = []


class Stricter(LimitsMiddleware): ...


def checked(FOREBAY: Any = None, MIDDLEWARE: Any = (LIMITS,), **more: Any) -> list[CheckMessage]:  # noqa: N803
    given = {} if FOREBAY is None else {"FOREBAY": FOREBAY}
    with override_settings(MIDDLEWARE=list(MIDDLEWARE), **given, **more):
        return check_settings()


@pytest.mark.parametrize(
    ("forebay", "number", "message", "hint"),
    [
        (["shop.rules"], "E001", r"FOREBAY is a dict such as .*, not \['shop.rules'\]", ""),
        (5, "E001", "FOREBAY is a dict such as .*, not 5", ""),
        ({"RULE": ()}, "E001", "FOREBAY has no 'RULE': there are RULES, CLIENT", 'Is "RULES" meant?'),
        ({"rules": ()}, "E001", "FOREBAY has no 'rules'", 'Is "RULES" meant?'),
        ({5: (), "RULES": ()}, "E001", "FOREBAY has no 5", ""),
        ({"RULES": "shop.rules"}, "E001", r'FOREBAY\["RULES"\] is the dotted path of nothing', "that can be imported"),
        ({"RULES": f"{__name__}.nothing"}, "E001", "does not define a", "a name in it"),
        ({"RULES": "broken_limits.rules"}, "E001", r"can't be imported: InvalidRate: 'often' is not a rate", "shell"),
        ({"STORE": "shop"}, "E001", "is the dotted path of nothing", "a module"),
        ({"STORE": object}, "E001", r"is a Store, a RedisStore or the dotted path of one, not <class", "STORE"),
        ({"CLIENT": "forebay.web.ClientAddress"}, "E001", "ClientAddress'> is a class", "client = ClientAddress"),
        (
            {"CLIENT": 5},
            "E002",
            r'FOREBAY\["CLIENT"\] .*or another key function, not 5',
            '"CLIENT" is a ClientAddress',
        ),
        (
            {"RULES": ["api"]},
            "E002",
            r"RULES.* rules are of Rule, Deny, Shed, BodyLimit and ByteRate, not 'api': write Rule\(limiter\)",
            "RULES",
        ),
        ({"RULES": [BodyLimit(10)]}, "E002", "comes too late here: put WSGIMiddleware", "RULES"),
        ({"HEADERS": "draft-11"}, "E002", r'FOREBAY\["HEADERS"\] .*\'draft-11\'', '"HEADERS" is "draft-10"'),
        ({"PARTITION_KEYS": 1}, "E002", r'FOREBAY\["PARTITION_KEYS"\] .*, not 1', "True or False"),
        ({"ENABLED": "no"}, "E001", r'FOREBAY\["ENABLED"\] is the dotted path of nothing', "a module"),
        ({"ENABLED": 1}, "E002", r'FOREBAY\["ENABLED"\] .*True or False, not 1', "FOREBAY_ENABLED is true or false"),
        ({"ON_DENIED": 5}, "E002", r'FOREBAY\["ON_DENIED"\] .*not 5', "a function of a request and a denial"),
        (
            {"WHEN_UNAVAILABLE": "deny"},
            "E002",
            r'FOREBAY\["WHEN_UNAVAILABLE"\] .*not \'deny\'',
            '"503", "429" or "allow"',
        ),
        ({"RULE": (), "CLEINT": None}, "E001", "FOREBAY has no 'CLEINT'", 'Is "CLIENT" meant?'),
    ],
)
def test_check_reports_invalid_settings(
    forebay: Any, number: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_limits.py").write_text("from forebay import Rate\nrules = [Rate.parse('often')]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    [found] = checked(forebay)
    assert found.id == f"forebay.{number}"
    assert found.is_serious()
    assert pytest.RaisesExc(ImproperlyConfigured, match=message).matches(ImproperlyConfigured(found.msg))
    assert hint in (found.hint or "")


def test_check_accepts_valid_settings(its: Its) -> None:
    assert checked(None) == []
    assert checked(None, MIDDLEWARE=[]) == []
    assert checked({}, MIDDLEWARE=[]) == []
    assert checked({"RULES": f"{__name__}.rules", "CLIENT": ClientAddress(), "STORE": its.store}) == []
    assert checked({"RULES": its.rules}, MIDDLEWARE=["nothing.there", USERS, f"{__name__}.Stricter"]) == []
    assert checked({"RULES": its.of_users}, MIDDLEWARE=[USERS, LIMITS]) == []
    assert checked({"RULES": its.rules}, MIDDLEWARE=[LIMITS, USERS]) == []
    assert checked({"STORE": its.store}, REST_FRAMEWORK=THROTTLES) == []
    ours = THROTTLES | {"DEFAULT_THROTTLE_CLASSES": ["rest_framework.throttling.AnonRateThrottle"]}
    assert checked({}, REST_FRAMEWORK=ours) == []


def test_check_reports_rules_without_the_middleware(its: Its) -> None:
    [found] = checked({"RULES": its.rules}, MIDDLEWARE=[USERS])
    assert found.id == "forebay.E003"
    assert f'"{LIMITS}" isn\'t in MIDDLEWARE' in found.msg


@pytest.mark.parametrize("middleware", [[LIMITS], [LIMITS, USERS]])
def test_check_warns_of_user_rules_without_authentication(its: Its, middleware: list[str]) -> None:
    [found] = checked({"RULES": its.of_users}, MIDDLEWARE=middleware)
    assert found.id == "forebay.W001"
    assert not found.is_serious()
    assert "everybody counts as a stranger" in found.msg


def test_check_reports_throttles_without_a_store_or_a_valid_rate() -> None:
    rates = {"anon": "2/10s", "user": "10/fortnight", "uploads": None}
    found = checked({}, REST_FRAMEWORK=THROTTLES | {"DEFAULT_THROTTLE_RATES": rates})
    assert [message.id for message in found] == ["forebay.E004", "forebay.E005"]
    assert "FOREBAY has none" in found[0].msg
    assert "'10/fortnight'" in found[1].msg
    assert "'user'" in found[1].msg
    [found_one] = checked({}, REST_FRAMEWORK={"DEFAULT_THROTTLE_CLASSES": ["forebay.nothing"]})
    assert found_one.id == "forebay.E004"


def test_deployment_check_warns_of_private_stores(its: Its, store_name: str) -> None:
    with Store(store_name, keys=100) as named:
        shared = [Rule(TokenBucket(named, "bucket", "3/day"))]
        for forebay, count in (
            ({"RULES": its.rules, "STORE": its.store}, 1),
            ({"STORE": its.store}, 1),
            ({"RULES": shared}, 0),
        ):
            with override_settings(FOREBAY=forebay, MIDDLEWARE=[LIMITS]):
                found = check_deployment()
                assert [message.id for message in found] == ["forebay.W002"] * count
    with override_settings(FOREBAY={"RULE": ()}):
        assert check_deployment() == []


@pytest.mark.parametrize("is_right", [True, False])
def test_manage_py_check_runs_the_checks(is_right: bool, tmp_path: Path) -> None:
    """The installed application `forebay.contrib.django` registers the checks."""
    (tmp_path / "site_settings.py").write_text(
        f"""
from forebay import Store, TokenBucket
from forebay.web import Rule
SECRET_KEY = "known to everybody"
INSTALLED_APPS = ["forebay.contrib.django"]
MIDDLEWARE = [{f'"{LIMITS}"' if is_right else ""}]
FOREBAY = {{"RULES": [Rule(TokenBucket(Store.private(keys=10), "bucket", "3/day"))]}}
"""
    )
    command = [sys.executable, "-m", "django", "check", "--settings", "site_settings", "--pythonpath", str(tmp_path)]
    for more in [], ["--tag", "forebay"]:
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        assert done.returncode == (0 if is_right else 1)
        assert "(forebay.E003)" in done.stderr or is_right, done.stderr
    if is_right:
        deployed = subprocess.run([*command, "--deploy", "--tag", "forebay"], capture_output=True, text=True)
        assert "(forebay.W002)" in deployed.stderr


# Exempt views


@exempt
def free(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@exempt
async def free_async(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


def paid(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


class Paid(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


@method_decorator(exempt, name="dispatch")
class Free(Paid): ...


@method_decorator(exempt, name="dispatch")
class FreeAsync(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


urlpatterns = [
    path("free", free),
    path("free/async", free_async),
    path("free/class", Free.as_view()),
    path("free/class/async", FreeAsync.as_view()),
    path("free/as-view", exempt(Paid.as_view())),
    path("paid", paid),
    path("paid/class", Paid.as_view()),
]


@pytest.fixture
def site(its: Its) -> Iterator[Its]:
    with override_settings(ROOT_URLCONF=__name__, FOREBAY={"RULES": its.rules}, MIDDLEWARE=[LIMITS]):
        yield its


def status_of(url: str, *, is_async: bool) -> int:
    return asyncio.run(AsyncClient().get(url)).status_code if is_async else Client().get(url).status_code


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("url", ["/free", "/free/async", "/free/class", "/free/class/async", "/free/as-view"])
def test_exempt_view_is_not_charged(site: Its, url: str, is_async: bool) -> None:
    assert [status_of(url, is_async=is_async) for _ in range(5)] == [200] * 5
    assert site.left() == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_exempt_view_refuses_denied_addresses(site: Its, is_async: bool) -> None:
    for denied, status in (("127.0.0.1", 403), ("192.0.2.1", 200)):
        with override_settings(FOREBAY={"RULES": [*site.rules, Deny(AddressList(denied))]}):
            assert status_of("/free", is_async=is_async) == status
    assert site.left() == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_a_setting_chooses_the_answer_while_a_store_fails(site: Its, is_async: bool) -> None:
    site.store.close()
    for chosen, status in (("503", 503), ("429", 429), ("allow", 200)):
        with override_settings(FOREBAY={"RULES": site.rules, "WHEN_UNAVAILABLE": chosen}):
            assert status_of("/paid", is_async=is_async) == status


@pytest.mark.parametrize("is_async", [False, True])
def test_other_views_are_charged(site: Its, is_async: bool) -> None:
    urls = ["/paid", "/paid/class", "/nowhere", "/paid"]
    assert [status_of(url, is_async=is_async) for url in urls] == [200, 200, 404, 429]
    assert status_of("/free", is_async=is_async) == 200


@pytest.mark.parametrize("is_async", [False, True])
def test_permits_come_back_where_charge_on_fails(site: Its, is_async: bool) -> None:
    held = Concurrency(site.store, "held", 2)
    failing = Rule(site.bucket, key=everyone, charge_on=lambda status: None)  # type: ignore[arg-type, return-value]
    with override_settings(FOREBAY={"RULES": [Rule(held, key=everyone), failing]}):
        with pytest.raises(InvalidLimiter, match="charge_on of the rule of limiter 'bucket' returned None"):
            status_of("/paid", is_async=is_async)
        assert held.peek("everyone", 0).remaining == 2


@sync_and_async_middleware
def known_users(get_response: Any) -> Any:
    async def identify(request: Any) -> Any:
        async def auser() -> Any:
            return SimpleNamespace(pk=7, is_authenticated=True)

        request.auser = auser
        return await get_response(request)

    return identify


def status_of_known_user() -> int:
    with override_settings(MIDDLEWARE=[f"{__name__}.known_users", LIMITS]):
        return status_of("/paid", is_async=True)


def test_shadow_rule_of_users_charges_the_others_once(site: Its) -> None:
    shadow = TokenBucket(site.store, "shadow", "3/day")
    rules = [*site.rules, Rule(shadow, key=user(otherwise=everyone), shadow=True)]
    with override_settings(FOREBAY={"RULES": rules}):
        assert status_of_known_user() == 200
    assert site.left() == 2
    assert shadow.peek(("user", "7"), 0).remaining == 2


def test_functions_that_answer_a_denial_may_read_the_user(site: Its) -> None:
    denied: list[Any] = []
    ban = Ban(site.store, "ban", "2/minute", lasts="1 minute")

    def answer(request: Request, denial: Denial) -> Answer:
        return Answer(429, (), str(request.user).encode())

    rule = Rule(TokenBucket(site.store, "small", "1/day"), key=everyone, ban=ban, answer=answer)
    settings = {"RULES": [rule], "ON_DENIED": lambda request, denial: denied.append((request.user, denial.is_ban))}
    with override_settings(FOREBAY=settings):
        assert [status_of_known_user() for _ in range(4)] == [200, 429, 429, 429]
    # Each denial counts once: the second one bans.
    assert denied == [("7", False), ("7", False), ("7", True)]


@pytest.mark.parametrize("is_exempt_first", [False, True])
def test_exempt_view_is_charged_to_its_own_limits(site: Its, is_exempt_first: bool) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    own = limited(TokenBucket(site.store, "own", "2/day"), key=everyone)
    urlpatterns.append(path("own", own(exempt(view)) if is_exempt_first else exempt(own(view))))
    try:
        assert [status_of("/own", is_async=False) for _ in range(3)] == [200, 200, 429]
        assert site.left() == 3
    finally:
        urlpatterns.pop()


def test_first_request_of_a_worker_can_be_to_an_exempt_view(
    its: Its, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker knows no exempt view before it imports the views."""
    (tmp_path / "late_urls.py").write_text(
        """
from django.http import HttpResponse
from django.urls import include, path
from forebay.contrib.django import exempt
urlpatterns = [path("free", exempt(lambda request: HttpResponse()))]
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forebay.contrib.django, "_has_exempted", False)
    with override_settings(ROOT_URLCONF="late_urls", FOREBAY={"RULES": its.rules}, MIDDLEWARE=[LIMITS]):
        assert status_of("/free", is_async=False) == 200
    assert its.left() == 3


def test_request_with_its_own_urlconf_finds_the_exempt_view(site: Its) -> None:
    other = ModuleType("other_urls")
    other.urlpatterns = [path("paid", free)]  # type: ignore[attr-defined]
    request = RequestFactory().get("/paid")
    request.urlconf = other  # type: ignore[assignment]  # Django takes modules, too
    async_request = AsyncRequestFactory().get("/paid")
    async_request.urlconf = other  # type: ignore[assignment]
    LimitsMiddleware(paid)(request)
    asyncio.run(LimitsMiddleware(free_async)(async_request))
    assert site.left() == 3


@pytest.mark.parametrize("what", [Paid, "shop.views.paid"])
def test_decorators_refuse_objects_that_are_not_views(its: Its, what: Any) -> None:
    with pytest.raises(
        InvalidLimiter, match=r"^exempt is for views, and .* isn't one: .* exempt\(TheView.as_view\(\)\)"
    ):
        exempt(what)
    with pytest.raises(InvalidLimiter, match=r"^limited\(\.\.\.\) is for views, and .* @method_decorator\(limited"):
        limited(its.bucket)(what)


# Throttles' rates


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("100/day", (100, 86400)),
        ("60/d", (60, 86400)),
        ("5/min", (5, 60)),
        ("5/mins", (5, 60)),
        ("5/m", (5, 60)),
        ("7/secs", (7, 1)),
        ("3/hourly", (3, 3600)),
        ("2/10s", (2, 10)),
        ("2 per 10 seconds", (2, 10)),
        ("1/week", (1, 604_800)),
        ("1/500ms", (1, 0.5)),
        ("0/day", (0, 86400)),
        (None, (None, None)),
    ],
)
def test_throttle_parses_its_rate(rate: str | None, expected: tuple[Any, Any]) -> None:
    assert throttle_with(rate).parse_rate(rate) == expected


@pytest.mark.parametrize("rate", ["2/fortnight", "5/month", "0/month", "2/10", "10", "", "/day", "1/2/day", "x/day", 5])
def test_throttle_refuses_an_invalid_rate(rate: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"^the throttle of scope 'sketches': .*; the accepted forms are"):
        throttle_with(rate).parse_rate(rate)


def throttle_with(rate: Any) -> Any:
    with override_settings(REST_FRAMEWORK={}):
        from forebay.contrib.rest_framework import SimpleRateThrottle

    throttle = SimpleRateThrottle.__new__(SimpleRateThrottle)
    throttle.scope = "sketches"
    return throttle


def test_throttle_counts_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(1000)
    with Store.private(keys=100, clock=clock) as store, override_settings(FOREBAY={"STORE": store}, REST_FRAMEWORK={}):
        from forebay.contrib.rest_framework import SimpleRateThrottle

        class Sketches(SimpleRateThrottle):
            rate = "2/10s"
            scope = "sketches"

            def get_cache_key(self, request: Any, view: Any) -> str:
                return "ada"

        request = SimpleNamespace(_request=SimpleNamespace())
        monkeypatch.setattr("forebay.web.workers.worker_count", lambda: 4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [Sketches().allow_request(request, None) for _ in range(3)] == [True, True, False]  # type: ignore[arg-type]
        clock.advance(20)
        assert Sketches().allow_request(request, None)  # type: ignore[arg-type]
        assert [(warning.category, warning.filename) for warning in caught] == [(CountsPerWorkerWarning, __file__)]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000)


@pytest.fixture
def rest(clock: ManualClock) -> Iterator[ModuleType]:
    """The module of the throttles, with a store configured."""
    with Store.private(keys=100, clock=clock) as store, override_settings(FOREBAY={"STORE": store}, REST_FRAMEWORK={}):
        import forebay.contrib.rest_framework

        yield forebay.contrib.rest_framework


def throttled(throttle: type[Any], times: int) -> list[bool]:
    request = SimpleNamespace(_request=SimpleNamespace())
    return [throttle().allow_request(request, None) for _ in range(times)]


def test_throttles_and_rules_can_be_switched_off(rest: ModuleType, its: Its, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_warning", Seldom())
    throttle = type("Switched", (rest.SimpleRateThrottle,), {"rate": "1/day", "get_cache_key": lambda *_: "ada"})
    off = {"STORE": settings.FOREBAY["STORE"], "RULES": its.rules, "ENABLED": False}
    with override_settings(FOREBAY=off, MIDDLEWARE=[LIMITS], ROOT_URLCONF=__name__):
        with pytest.warns(LimitsDisabledWarning, match="enabled=False"):
            assert throttled(throttle, 3) == [True] * 3
        assert [Client().get("/nowhere").status_code for _ in range(4)] == [404] * 4
    assert its.left() == 3
    assert throttled(throttle, 2) == [True, False]


def keyed(base: type[Any], **body: Any) -> type[Any]:
    return type("Sketches", (base,), {"get_cache_key": lambda self, request, view: "ada"} | body)


def test_throttle_can_override_the_hooks_of_rest_framework(rest: ModuleType) -> None:
    calls: list[str] = []

    def succeed(self: Any) -> bool:
        calls.append(f"{self.key} may, {self.decision.remaining} left")
        return True

    def fail(self: Any) -> bool:
        calls.append(f"{self.key} may not")
        return False

    def key(self: Any, request: Any, view: Any) -> str:
        self.num_requests, self.duration = 2, 60
        return "ada"

    throttle = keyed(
        rest.SimpleRateThrottle, rate="1/day", throttle_success=succeed, throttle_failure=fail, get_cache_key=key
    )
    assert throttled(throttle, 3) == [True, True, False]
    assert calls == ["ada may, 1 left", "ada may, 0 left", "ada may not"]
    forgiving = keyed(rest.SimpleRateThrottle, rate="1/day", throttle_failure=lambda self: True)
    assert throttled(forgiving, 2) == [True, True]
    odd = keyed(rest.SimpleRateThrottle, rate="3 in 5 minutes", parse_rate=lambda self, rate: (3, 300))
    assert throttled(odd, 4) == [True, True, True, False]


def test_throttle_that_denies_an_allowed_request_waits_a_second(rest: ModuleType) -> None:
    throttle = keyed(rest.SimpleRateThrottle, rate="1/day", throttle_success=lambda self: False)()
    assert not throttle.allow_request(SimpleNamespace(_request=SimpleNamespace()), None)
    assert throttle.wait() == 1


def test_throttle_answers_503_if_the_store_is_full(rest: ModuleType, clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="deny", clock=clock) as store, override_settings(FOREBAY={"STORE": store}):
        crowd = TokenBucket(store, "crowd", "1/minute")
        crowd.allow_many(range(5000))
        throttle = keyed(rest.SimpleRateThrottle, rate="5/min", limiter_class=TokenBucket)
        throttles = [keyed(throttle, get_cache_key=lambda self, request, view, n=n: f"{n}") for n in range(100)]
        with pytest.raises(rest.LimitsUnavailable, match="no room to count another client") as raised:
            list(map(throttled, throttles, [1] * 100))
        assert raised.value.status_code == 503
        assert 1 <= raised.value.wait <= 60


def test_throttle_answers_503_without_memory_for_its_log(
    rest: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.web.denials._log_turns", Seldom())

    def log(store: Any, name: str, rate: Rate) -> Any:
        return SlidingLog(store, name, rate, keys=4_000_000_000)

    throttle = keyed(rest.SimpleRateThrottle, rate="50/min", limiter_class=staticmethod(log))
    for _ in range(2):
        with pytest.raises(rest.LimitsUnavailable, match="no room to count another client") as raised:
            throttled(throttle, 1)
        assert (raised.value.status_code, raised.value.wait) == (503, 1)
    [message] = [record.message for record in caplog.records if record.name == "forebay.web"]
    assert message.startswith("requests are answered by 503: ")
    assert "4000000000 keys" in message


def test_throttle_admits_requests_if_a_full_store_allows(rest: ModuleType, clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="allow", clock=clock) as store, override_settings(FOREBAY={"STORE": store}):
        TokenBucket(store, "crowd", "1/minute").allow_many(range(5000))
        before = store.stats().total.full
        throttle = keyed(rest.SimpleRateThrottle, rate="5/min", limiter_class=TokenBucket)
        throttles = [keyed(throttle, get_cache_key=lambda self, request, view, n=n: f"{n}") for n in range(100)]
        assert all(passed for [passed] in map(throttled, throttles, [1] * 100))
        assert store.stats().total.full > before


def test_client_that_returns_no_key_is_an_error(rest: ModuleType) -> None:
    async def client(request: Any) -> str:
        return "ada"

    request = SimpleNamespace(_request=RequestFactory().get("/"))
    for wrong in (client, lambda request: None, lambda request: 1.5):
        with (
            override_settings(FOREBAY={"CLIENT": wrong}),
            pytest.raises(InvalidKey, match=r'FOREBAY\["CLIENT"\] returned .*, which is no key'),
        ):
            keyed(rest.SimpleRateThrottle, rate="1/min")().get_ident(request)


def test_throttle_with_a_limit_of_zero_denies_all_requests(rest: ModuleType) -> None:
    throttle = keyed(rest.SimpleRateThrottle, rate="0/min")
    assert throttled(throttle, 2) == [False, False]
    assert throttle().wait() == 60


@pytest.mark.parametrize("name", ["timer", "cache"])
def test_throttle_class_refuses_an_attribute_without_effect(rest: ModuleType, name: str) -> None:
    message = f"Sketches sets {name}, which has no effect on a throttle of forebay"
    with pytest.raises(ImproperlyConfigured, match=message):
        keyed(rest.UserRateThrottle, **{name: lambda self: 0})


@pytest.mark.parametrize("name", ["history", "now"])
def test_throttle_raises_on_an_unsupported_attribute(rest: ModuleType, name: str) -> None:
    throttle = keyed(rest.SimpleRateThrottle, rate="1/day", throttle_success=lambda self: bool(getattr(self, name)))
    with pytest.raises(ImproperlyConfigured, match=f"Sketches reads {name}, .* self.decision has limit, remaining"):
        throttled(throttle, 1)
    assert not hasattr(throttle(), "anything")
    with pytest.raises(AttributeError, match="'Sketches' object has no attribute 'anything'"):
        throttle().anything  # noqa: B018


@pytest.mark.parametrize(
    ("keys", "rate", "kind"),
    [
        (100, "10000/day", SlidingLog),
        (100, "20000/day", SlidingWindow),
        (100_000, "13/min", SlidingLog),
        (100_000, "14/min", SlidingWindow),
        (100_000, "100000000/day", SlidingWindow),
    ],
)
def test_throttle_logs_requests_if_the_log_is_small(keys: int, rate: str, kind: type) -> None:
    with override_settings(REST_FRAMEWORK={}):
        from forebay.contrib.rest_framework import MOST_LOG_BYTES, log_or_window
    with Store.private(keys=keys) as store:
        before = store.stats().bytes
        limiter = log_or_window(store, "throttle", Rate.parse(rate))
        assert type(limiter) is kind
        assert store.stats().bytes - before <= MOST_LOG_BYTES + 4096


def test_small_limit_holds_across_the_edge_of_a_minute(rest: ModuleType, clock: ManualClock) -> None:
    """An estimate, rounded down, would admit the second request."""
    throttle = keyed(rest.SimpleRateThrottle, rate="1/min")
    assert throttled(throttle, 1) == [True]
    for _ in range(59):
        clock.advance(1)
        assert throttled(throttle, 1) == [False]
    clock.advance(1)
    assert throttled(throttle, 2) == [True, False]


def test_throttle_accepts_a_scope_of_any_length(rest: ModuleType) -> None:
    for scope in ("a" * 34, "a" * 35, "é" * 100):
        assert throttled(keyed(rest.SimpleRateThrottle, rate="1/day", scope=scope), 2) == [True, False]


def test_check_reports_scopes_that_are_invalid_limiter_names(its: Its) -> None:
    endless = "a\0b"
    found = checked({"STORE": its.store}, REST_FRAMEWORK=THROTTLES | {"DEFAULT_THROTTLE_RATES": {endless: "1/day"}})
    assert [message.id for message in found] == ["forebay.E005"]
    assert "a limiter's name is text" in found[0].msg
    long = THROTTLES | {"DEFAULT_THROTTLE_RATES": {"a" * 34: "1/day", "none": "0/min"}}
    assert checked({"STORE": its.store}, REST_FRAMEWORK=long) == []


def test_check_includes_throttles_of_views(its: Its) -> None:
    with override_settings(REST_FRAMEWORK={}):
        from rest_framework.views import APIView

        from forebay.contrib.rest_framework import UserRateThrottle

        class Often(UserRateThrottle):
            rate = "often"

        class ByPlan(UserRateThrottle):
            rate = property(lambda self: "5/min")

        class Orders(APIView):
            throttle_classes = (Often, ByPlan)

    urls = ModuleType("urls")
    urls.urlpatterns = [path("shop/", include([path("orders", Orders.as_view())]))]  # type: ignore[attr-defined]
    found = checked({}, ROOT_URLCONF=urls)
    assert [message.id for message in found] == ["forebay.E004", "forebay.E005"]
    assert "Often of forebay counts in a store" in found[0].msg
    assert "'often'" in found[1].msg
    assert checked({}, ROOT_URLCONF="nothing.there") == []
