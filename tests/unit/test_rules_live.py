"""Live rules in one process: what is published, when it is in force, and what a bad source does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rule_files import FILE, LIMITS
from web_requests import HeldRequests, Kind, Site, call_wsgi, wsgi_environ

from forebay import InvalidLimiter, InvalidRuleFile, Store, TokenBucket
from forebay.contrib.views import AppGates, Visit, rules_of, without_body_limits
from forebay.rules import FileSource, LiveRules, Source
from forebay.rules.live.publication import Board, UnreadableRules
from forebay.testing import ManualClock
from forebay.web import Gate, Rule, WSGIMiddleware
from forebay.web.live_gate import LiveGate, at_start, gate_of
from forebay.web.native_requests import WSGIRequest

NEVER = "10 hours"
TIERS = FILE.replace("version = 1\n", 'version = 1\ntiers = ["pro"]\n') + 'tier = ["pro"]\n'


class TextSource(Source):
    """A document in memory."""

    name = label = "memory.toml"

    def __init__(self, text: str) -> None:
        self.text: str | None = text

    def read(self) -> bytes:
        if self.text is None:
            raise ConnectionError("redis://me:secret@host is away")
        return self.text.encode()


def document(rate: str, **words: str) -> str:
    """One rule with one limit: ``SlidingWindow`` or another `algorithm`."""
    algorithm = words.pop("algorithm", "sliding-window")
    more = "".join(f"{word} = {value}\n" for word, value in words.items())
    return (
        f'version = 1\n[limits.api]\nalgorithm = "{algorithm}"\nrate = "{rate}"\n{more}'
        '[[rules]]\nname = "all"\nlimits = ["api"]\n'
    )


@pytest.fixture(params=["wsgi", "asgi"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.private(keys=1000) as opened:
        yield opened


@pytest.fixture
def live_rules(store: Store) -> Iterator[Callable[..., LiveRules]]:
    """Rules whose thread is never due: the tests call its step."""
    with contextlib.ExitStack() as stack:

        def make(source: Source, **options: Any) -> LiveRules:
            return stack.enter_context(LiveRules(source, **{"store": store, "interval": NEVER, **options}))

        yield make


def policy(site: Site) -> str:
    return site.request()["ratelimit-policy"]


def test_a_request_is_decided_by_the_version_in_force(kind: Kind, live_rules: Callable[..., LiveRules]) -> None:
    source = TextSource(document("5/hour"))
    live = live_rules(source)
    site = Site(kind, live)
    assert policy(site) == '"api";q=5;w=3600'
    source.text = document("7/hour")
    assert policy(site) == '"api";q=5;w=3600'
    live.step()
    assert policy(site) == '"api";q=7;w=3600'
    assert (live.status().version, live.status().published) == (2, 2)


def test_several_gates_follow_one_document(live_rules: Callable[..., LiveRules]) -> None:
    source = TextSource(document("5/hour"))
    live = live_rules(source)
    sites = [Site("wsgi", live), Site("asgi", live), Site("wsgi", live, {"headers": "x-ratelimit"})]
    source.text = document("7/hour")
    live.step()
    assert [policy(site) for site in sites[:2]] == ['"api";q=7;w=3600'] * 2
    assert sites[2].request()["x-ratelimit-limit"] == "7"


def test_a_gate_of_a_framework_follows(live_rules: Callable[..., LiveRules]) -> None:
    source = TextSource(document("5/hour"))
    live = live_rules(source)
    gate: Any = gate_of(live, in_loop=True)
    assert isinstance(gate, LiveGate)
    assert not gate.is_awaited
    assert [rule.limiter.rate.limit for rule in gate.rules] == [5]
    source.text = document("7/hour")
    live.step()
    assert [rule.limiter.rate.limit for rule in gate.rules] == [7]
    assert isinstance(gate.current, Gate)


def test_a_framework_starts_no_thread_before_its_first_request(live_rules: Callable[..., LiveRules]) -> None:
    """A server may fork its workers meanwhile."""
    gate = gate_of(live_rules(TextSource(document("5/hour"))), in_loop=False)
    gates = AppGates(without_body_limits(gate, "", ""), in_loop=False)
    assert at_start(gate).body_limits == ()
    assert threads_of_rules() == 0
    assert gates.decide(WSGIRequest(wsgi_environ()), Visit()) is None
    assert threads_of_rules() == 1


def threads_of_rules() -> int:
    return sum(thread.name == "forebay-rules" for thread in threading.enumerate())


def metered_document(bodies: str) -> str:
    return (
        'version = 1\n[limits.files]\nalgorithm = "token-bucket"\nrate = "1 MiB/second"\n'
        f'[[rules]]\nname = "files"\nlimits = ["files"]\nkey = "everyone"\n{bodies}'
    )


def test_bodies_have_the_rate_of_the_version_in_force(
    kind: Kind, store: Store, live_rules: Callable[..., LiveRules]
) -> None:
    source = TextSource(document("5/hour"))
    live = live_rules(source)
    site = Site(kind, live)
    site.request()
    source.text = metered_document('bytes = "responses"\n')
    live.step()
    assert store.stats().limiters["files"].allowed == 0
    response = site.request()
    assert response.status == 200
    assert store.stats().limiters["files"].allowed > 0
    source.text = document("7/hour")
    live.step()
    charged = store.stats().limiters["files"].allowed
    assert policy(site) == '"api";q=7;w=3600'
    assert store.stats().limiters["files"].allowed == charged


def test_a_framework_keeps_its_rules_if_new_ones_limit_bodies(live_rules: Callable[..., LiveRules]) -> None:
    """It has asked for the limits of bodies at its start, so it would send bodies without a limit."""
    source = TextSource(document("5/hour"))
    live = live_rules(source)
    gate: Any = gate_of(live, in_loop=True)
    source.text = metered_document('bytes = "requests"\n')
    live.step()
    assert [rule.limiter.name for rule in gate.rules] == ["api"]
    assert "comes too late here, as these rules are live: put WSGIMiddleware" in str(live.status().error)


def test_a_framework_refuses_live_rules_that_limit_bodies(live_rules: Callable[..., LiveRules]) -> None:
    live = live_rules(TextSource(metered_document('bytes = "responses"\n')))
    with pytest.raises(InvalidLimiter, match="comes too late here, as these rules are live: put WSGIMiddleware"):
        gate_of(live, in_loop=True)


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_live_rules_in_a_list_are_refused(kind: Kind, live_rules: Callable[..., LiveRules], store: Store) -> None:
    live = live_rules(TextSource(document("5/hour")))
    other = Rule(TokenBucket(store, "other", "5/hour"))
    with pytest.raises(InvalidLimiter, match="LiveRules stand in place of a list of rules, not in it"):
        Site(kind, [live, other])
    with pytest.raises(InvalidLimiter, match="LiveRules stand in place of a list of rules, not in it"):
        gate_of([live, other], in_loop=True)  # type: ignore[list-item]


def test_a_view_refuses_live_rules(live_rules: Callable[..., LiveRules]) -> None:
    live = live_rules(TextSource(document("5/hour")))
    with pytest.raises(InvalidLimiter, match="LiveRules is for an application, not for a view"):
        rules_of([live], {})  # type: ignore[list-item]


def test_a_tier_that_is_awaited_is_awaited_in_every_version(live_rules: Callable[..., LiveRules]) -> None:
    async def tier(request: Any) -> str:
        await asyncio.sleep(0)
        return "pro"

    source = TextSource(FILE)
    live = live_rules(source, tier=tier)
    site = Site("asgi", live)
    assert gate_of(live, in_loop=True).is_awaited
    for text, rate in ((FILE, 5), (TIERS.replace("5/", "6/"), 6), (FILE, 5)):
        source.text = text
        live.step()
        assert site.request()["ratelimit-policy"] == f'"api";q={rate};w=3600'


def test_a_request_keeps_the_rules_that_it_has_begun_with(kind: Kind, live_rules: Callable[..., LiveRules]) -> None:
    text = document("1/hour", algorithm="fixed-window")
    source = TextSource(text + "charge_on = [500]\n")
    live = live_rules(source)

    def handle() -> int:
        source.text = text
        live.step()
        return 200

    site = Site(kind, live, handle=handle)
    # Not charged in the end: the version that it began with doesn't charge for this status.
    assert site.request().status == 200
    assert live.status().version == 2
    assert [site.request().status for _ in range(2)] == [200, 429]


def test_a_file_counts_once_two_readings_are_the_same(tmp_path: Path, live_rules: Callable[..., LiveRules]) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(FILE)
    live = live_rules(FileSource(path))
    site = Site("wsgi", live)
    assert policy(site) == '"api";q=5;w=3600'
    for text in (FILE.replace("5/", "6/"), FILE.replace("5/", "7/")):
        path.write_text(text)
        live.step()
        assert policy(site) == '"api";q=5;w=3600'
    live.step()
    assert policy(site) == '"api";q=7;w=3600'


def test_a_file_that_is_being_written_at_a_start_does_not_count(
    tmp_path: Path, live_rules: Callable[..., LiveRules], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(FILE)
    live_rules(FileSource(path))
    path.write_text(FILE.replace("5/", "6/"))
    with monkeypatch.context() as patch:
        patch.setattr("forebay.rules.live.live_rules.time.sleep", lambda s: path.write_text(FILE.replace("5/", "7/")))
        live = live_rules(FileSource(path))
    assert live.status().published == 1
    live = live_rules(FileSource(path))
    assert policy(Site("wsgi", live)) == '"api";q=7;w=3600'


def test_a_link_is_replaced(tmp_path: Path, live_rules: Callable[..., LiveRules]) -> None:
    # As Kubernetes updates a mounted ConfigMap.
    for folder, rate in (("..1", "5/"), ("..2", "7/")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "limits.toml").write_text(FILE.replace("5/", rate))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "limits.toml").symlink_to("..data/limits.toml")
    live = live_rules(FileSource(tmp_path / "limits.toml"))
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    live.step()
    live.step()
    assert policy(Site("wsgi", live)) == '"api";q=7;w=3600'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "memory.toml:1:1: "),
        ("version = 1\n[limits.", "memory.toml:2:"),
        (LIMITS, "memory.toml:1:1: "),
        (FILE.replace("rate", "rat"), "'rat' is no word"),
        ('store = "shm:///other?keys=5"\n' + FILE, "live rules are for the store of LiveRules"),
        (FILE + 'path = "/a"\ndelay = "1s"\n', "can't delay requests"),
        (None, "ConnectionError: redis://me:***@host is away"),
    ],
)
def test_a_bad_source_leaves_the_last_good_rules(
    live_rules: Callable[..., LiveRules], text: str | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = TextSource(FILE)
    live = live_rules(source)
    site = Site("wsgi", live)
    source.text = text
    for _ in range(3):
        live.step()
        assert policy(site) == '"api";q=5;w=3600'
    assert reason in str(live.status().error)
    assert live.status().version == 1
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert reason in errors[0].getMessage()
    assert "secret" not in caplog.text
    source.text = FILE
    with caplog.at_level(logging.INFO):
        live.step()
    assert live.status().error is None
    assert "readable and valid again" in caplog.text


def test_a_document_that_no_file_could_take_is_published_later(
    live_rules: Callable[..., LiveRules], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = TextSource(FILE)
    live = live_rules(source)
    site = Site("wsgi", live)
    source.text = FILE.replace("5/", "6/")
    with monkeypatch.context() as patch:
        patch.setattr(Board, "publish", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        for _ in range(3):
            live.step()
        assert "memory.toml can't be put in force: OSError: [Errno 28] No space" in str(live.status().error)
        assert policy(site) == '"api";q=5;w=3600'
    live.step()
    assert policy(site) == '"api";q=6;w=3600'
    assert live.status().error is None
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_a_loader_without_room_leaves_no_files_and_says_why(
    live_rules: Callable[..., LiveRules], tmp_path: Path
) -> None:
    source = TextSource(FILE)
    with Store("a", keys=100, path=tmp_path / "shop") as store:
        live = live_rules(source, store=store)
        before = sorted(tmp_path.iterdir())
        source.text = FILE.replace("5/", "6/") + "#" * 300_000
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            for _ in range(3):
                live.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert sorted(tmp_path.iterdir()) == before
        assert "memory.toml can't be put in force: OSError: [Errno 27]" in str(live.status().error)
        live.step()
        assert live.status().error is None
        assert [name.suffix for name in sorted(tmp_path.glob("*.rules-*"))] == [".2", ".loader"]


@pytest.mark.filterwarnings("ignore::forebay.errors.SegmentRemovedWarning")
def test_a_loader_whose_store_was_removed_leaves_no_files_and_says_why(
    live_rules: Callable[..., LiveRules], tmp_path: Path
) -> None:
    source = TextSource(FILE)
    with Store("a", keys=100, path=tmp_path / "shop") as store:
        live = live_rules(source, store=store)
        Store.unlink(path=tmp_path / "shop")
        source.text = FILE.replace("5/", "6/")
        for _ in range(3):
            live.step()
        assert list(tmp_path.iterdir()) == []
        assert "the store was removed: restart its processes" in str(live.status().error)


def test_a_version_that_could_not_be_read_is_read_again(
    store: Store,
    live_rules: Callable[..., LiveRules],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    live = live_rules(TextSource(FILE))
    site = Site("wsgi", live)
    live_rules(TextSource(FILE.replace("5/", "6/")))
    with monkeypatch.context() as patch:
        patch.setattr(Board, "read", Mock(side_effect=UnreadableRules("Too many open files")))
        for _ in range(3):
            assert policy(site) == '"api";q=5;w=3600'
            live.step()
        assert "version 2 of the rules can't be used here: Too many" in str(live.status().process_error)
    live.step()
    assert policy(site) == '"api";q=6;w=3600'
    assert live.status().process_error is None
    assert caplog.text.count("version 2 of the rules can't be used here") == 1


def test_the_status_has_the_reason_of_now(live_rules: Callable[..., LiveRules]) -> None:
    source = TextSource(FILE)
    live = live_rules(source)
    for text, reason in (("nonsense", "holds what can't"), (None, "can't be read"), ("nonsense", "holds what can't")):
        source.text = text
        live.step()
        assert reason in str(live.status().error)


def test_a_process_that_cannot_use_the_version_in_force_leaves_the_loading_to_others(
    live_rules: Callable[..., LiveRules], caplog: pytest.LogCaptureFixture
) -> None:
    old = live_rules(TextSource(FILE))
    site = Site("wsgi", old)
    source = TextSource(TIERS)
    new = live_rules(source, tier=lambda request: "pro")
    old.step()
    assert "version 2 of the rules can't be used here" in str(old.status().process_error)
    source.text = TIERS.replace("5/", "6/")
    new.step()
    assert new.status().published == 3
    old.step()
    assert policy(site) == '"api";q=5;w=3600'
    # A start can go on from what it has itself.
    new.close()
    caplog.clear()
    assert policy(Site("wsgi", live_rules(TextSource(FILE.replace("5/", "8/"))))) == '"api";q=8;w=3600'
    assert "version 3 of the rules can't be used here" in caplog.text
    assert policy(site) == '"api";q=8;w=3600'


def test_an_older_deployment_publishes_nothing_over_a_newer_one(live_rules: Callable[..., LiveRules]) -> None:
    """Each has a file of its own. The last process of the older one becomes the loader."""
    loader = live_rules(TextSource(FILE))
    loader.step()
    source = TextSource(FILE)
    older = live_rules(source)
    loader.close()
    newer = live_rules(TextSource(FILE.replace("5/", "6/")))
    older.step()
    assert policy(Site("wsgi", newer)) == '"api";q=6;w=3600'
    assert "memory.toml holds a document that was in force before that of process" in str(newer.status().error)
    source.text = FILE.replace("5/", "7/")
    older.step()
    assert policy(Site("wsgi", newer)) == '"api";q=7;w=3600'
    assert newer.status().error is None


def test_rules_that_fit_no_gate_are_not_published(live_rules: Callable[..., LiveRules]) -> None:
    source = TextSource(FILE)
    live = live_rules(source)
    site = Site("wsgi", live, {"client": lambda request: "everybody"})
    source.text = FILE.replace('"api"]', '"api"]\nkey = ["path:id"]\npath = "/{id}"').replace("5/", "0/")
    live.step()
    assert live.status().published == 1
    assert policy(site) == '"api";q=5;w=3600'


def test_a_start_without_rules_fails(live_rules: Callable[..., LiveRules], tmp_path: Path) -> None:
    with pytest.raises(InvalidRuleFile, match="the file lacks rules"):
        live_rules(TextSource(LIMITS))
    with pytest.raises(FileNotFoundError):
        live_rules(FileSource(tmp_path / "limits.toml"))
    path = tmp_path / "limits.txt"
    path.write_text(FILE)
    with pytest.raises(InvalidRuleFile, match="ends with one of"):
        live_rules(FileSource(path))


def test_a_start_with_a_bad_source_has_the_last_good_rules(live_rules: Callable[..., LiveRules]) -> None:
    live_rules(TextSource(FILE))
    live = live_rules(TextSource("nonsense"))
    assert policy(Site("wsgi", live)) == '"api";q=5;w=3600'
    assert "nonsense" not in str(live.status().source)
    assert "memory.toml:1:" in str(live.status().error)


def test_a_start_with_other_rules_publishes_them(live_rules: Callable[..., LiveRules]) -> None:
    first = live_rules(TextSource(FILE))
    site = Site("wsgi", first)
    live_rules(TextSource(FILE.replace("5/", "9/")))
    assert policy(site) == '"api";q=9;w=3600'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "limits.toml"}, "source is a FileSource"),
        ({"store": "shm:///x"}, "store is a store"),
        ({"interval": "1 ms"}, "interval is at least 10 ms"),
        ({"interval": "1000 years"}, "at most a day, not '1000 years'"),
        ({"interval": "soon"}, "interval is"),
        ({"tier": 5}, "tier is a callable"),
        ({"host": 5}, "give a Store, host="),
    ],
)
def test_wrong_arguments_are_refused(store: Store, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LiveRules(options.pop("source", TextSource(FILE)), **{"store": store, **options})


def test_a_request_goes_on_without_a_thread(
    live_rules: Callable[..., LiveRules], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live = live_rules(TextSource(FILE))
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("can't start new thread")))
        assert policy(Site("wsgi", live)) == '"api";q=5;w=3600'
    assert "this process has no thread for live rules, and only follows others: can't start new thread" in caplog.text


def test_rules_that_are_let_go_load_no_more(store: Store) -> None:
    live = LiveRules(TextSource(FILE), store=store, interval=NEVER)
    live.step()
    del live
    gc.collect()
    source = TextSource(FILE)
    with LiveRules(source, store=store, interval=NEVER) as live:
        source.text = FILE.replace("5/", "9/")
        live.step()
        assert live.status().published == 2


def test_rules_in_code_are_as_before(store: Store) -> None:
    with pytest.raises(InvalidLimiter, match="rules are of Rule"):
        Gate(5)  # type: ignore[arg-type]
    assert policy(Site("wsgi", [Rule(TokenBucket(store, "one", "5/hour"))])).startswith('"one";q=5')


# Requests that are held back


def delaying_document(most: int, name: str = "spaced") -> str:
    return (
        'version = 1\n[limits.gap]\nalgorithm = "min-interval"\ninterval = "1 hour"\n'
        f'[[rules]]\nname = "{name}"\nlimits = ["gap"]\nkey = "everyone"\ndelay = "9 hours"\nmost_delayed = {most}\n'
    )


def test_requests_that_wait_count_for_the_next_version(live_rules: Callable[..., LiveRules]) -> None:
    async def ask() -> None:
        source = TextSource(delaying_document(1))
        live = live_rules(source)
        held = HeldRequests(live)
        assert [await held.ask() for _ in range(3)] == [200, None, 429]
        for most, statuses in ((2, [None, 429]), (1, [429]), (3, [None, 429])):
            source.text = delaying_document(most)
            live.step()
            assert [await held.ask() for _ in statuses] == statuses
        # Those of the first two versions leave their places to the last one.
        await held.cancel(3)
        assert [await held.ask() for _ in range(4)] == [None, None, None, 429]
        await held.cancel(3)

    asyncio.run(ask())


def slowed_document(rate: str, most: int) -> str:
    return (
        f'version = 1\n[limits.files]\nalgorithm = "token-bucket"\nrate = "{rate}"\n'
        f'[[rules]]\nname = "files"\nlimits = ["files"]\nkey = "everyone"\nbytes = "responses"\nmost_held = {most}\n'
    )


def test_bodies_that_were_slowed_down_count_for_the_next_version() -> None:
    with Store.private(keys=100, clock=ManualClock()) as store:
        source = TextSource(slowed_document("10 B/second", 1))

        def app(environ: Any, start_response: Any) -> Iterator[bytes]:
            start_response("200 OK", [])
            return iter([b"x" * 20])

        with LiveRules(source, store=store, interval=NEVER) as live:
            site = WSGIMiddleware(app, live)
            slowed: Any = site(wsgi_environ(), lambda *_: print)
            assert b"".join(slowed) == b"x" * 20
            source.text = slowed_document("20 B/second", 1)
            live.step()
            assert call_wsgi(site).status == 503
            slowed.close()
            assert call_wsgi(site).status == 200
