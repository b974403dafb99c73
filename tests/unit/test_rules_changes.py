"""What becomes of keys' state when a limit of live rules changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_rules_live import NEVER, TextSource, document
from web_requests import Site

from forebay import FixedWindow, Store
from forebay.rules import LiveRules
from forebay.rules.keys import Functions
from forebay.rules.live.carrying import MARKS, carried
from forebay.rules.live.publication import Board, Publication
from forebay.rules.live.standing import Standing, standings
from forebay.rules.live.version import checked_limits
from forebay.testing import ManualClock
from forebay.web import Ban, ClientAddress, Rule


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=1000, clock=clock) as opened:
        yield opened


class Changing:
    """A site whose limit changes at once."""

    def __init__(self, store: Store, text: str) -> None:
        self.store, self.source = store, TextSource(text)
        self.live = LiveRules(self.source, store=store, interval=NEVER)
        self.site = Site("wsgi", self.live)

    def change(self, text: str) -> None:
        self.source.text = text
        self.live.step()
        assert self.live.status().error is None

    def published(self) -> Publication:
        board = Board(self.store)
        return board.read(board.version)

    def damage(self) -> None:
        """Remove the file of what is published."""
        board = Board(self.store)
        for path in Path(board.note_path).parent.glob(f"{Path(board.note_path).stem}.[0-9]*"):
            path.unlink()

    def allowed(self, client: str = "192.0.2.1") -> int:
        """How many requests are allowed now."""
        return next(n for n in range(10**6) if self.site.request(client=client).status != 200)

    def use(self, count: int, client: str = "192.0.2.1") -> None:
        for _ in range(count):
            assert self.site.request(client=client).status == 200


@pytest.fixture
def changing(store: Store) -> Iterator[Callable[[str], Changing]]:
    made = []

    def make(text: str) -> Changing:
        made.append(Changing(store, text))
        return made[-1]

    yield make
    for one in made:
        one.live.close()


@pytest.mark.parametrize(
    ("algorithm", "left"),
    [
        # The time until the bucket is full, by the new rate: 60 of 100 used at 100 per hour are 36 minutes, all of 50.
        ("token-bucket", 20),
        ("sliding-window", 0),
        ("fixed-window", 0),
    ],
)
def test_by_default_a_key_keeps_its_state(changing: Callable[[str], Changing], algorithm: str, left: int) -> None:
    # Windows count in as many bits as their limit takes: limits of 100 and 120 in as many.
    rates = ("120/hour", "100/hour") if algorithm != "token-bucket" else ("100/hour", "50/hour")
    one = changing(document(rates[0], algorithm=algorithm))
    one.use(100 if algorithm != "token-bucket" else 60)
    one.change(document(rates[1], algorithm=algorithm))
    assert one.allowed() == left
    assert one.allowed("192.0.2.2") == int(rates[1].partition("/")[0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (document("100/hour"), document("50/minute")),
        (document("100/hour", algorithm="fixed-window"), document("50/hour")),
        (document("100/hour", algorithm="token-bucket"), document("50/hour", algorithm="fixed-window")),
        (document("100/hour", algorithm="token-bucket"), document("50/hour", algorithm="token-bucket", initial="50")),
        (
            document("100/hour", algorithm="sliding-log", keys="10"),
            document("50/hour", algorithm="sliding-log", keys="10"),
        ),
    ],
)
def test_a_state_that_the_new_limit_cant_read_is_kept_in_proportion(
    changing: Callable[[str], Changing], before: str, after: str
) -> None:
    one = changing(before)
    one.use(60)
    one.change(after)
    assert one.allowed() == 20
    assert one.allowed("192.0.2.2") == 50


def test_limit_that_is_removed_and_comes_back_goes_on(changing: Callable[[str], Changing]) -> None:
    first, second = document("5/hour", algorithm="fixed-window"), document("5/hour", algorithm="sliding-log", keys="10")
    other = document("5/hour", algorithm="fixed-window").replace("api", "other")
    one = changing(first)
    one.use(5, "192.0.2.1")
    one.use(5, "192.0.2.2")
    one.change(second)
    assert one.allowed("192.0.2.1") == 0
    one.use(5, "192.0.2.3")
    for _ in range(2):
        one.change(other)
        one.change(second)
        # The second client has not been seen since the first change.
        assert [one.allowed(f"192.0.2.{number}") for number in (1, 2, 3)] == [0, 0, 0]


OTHER = document("5/hour", algorithm="fixed-window").replace("api", "other")


@pytest.mark.parametrize("on_change", [{}, {"on_change": '"share"'}, {"on_change": '"reset"'}])
def test_limit_that_is_removed_and_comes_back_as_another_keeps_its_part(
    changing: Callable[[str], Changing], on_change: dict[str, str]
) -> None:
    one = changing(document("100/hour", algorithm="fixed-window"))
    one.use(60)
    for _ in range(2):
        one.change(OTHER)
        one.change(OTHER.replace("5/hour", "6/hour"))
    one.change(document("50/hour", algorithm="token-bucket", **on_change))
    assert one.allowed() == (50 if on_change.get("on_change") == '"reset"' else 20)
    assert one.allowed("192.0.2.2") == 50


def test_limit_that_was_removed_long_ago_comes_back_as_new(
    changing: Callable[[str], Changing], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = changing(document("100/hour", algorithm="fixed-window"))
    one.use(60)
    one.change(OTHER)
    clock.advance(2 * 3600)
    # Also if no document came meanwhile. A key's share costs nothing then.
    monkeypatch.setattr("forebay.rules.live.carrying.Link.bring", crash)
    one.change(document("50/hour", algorithm="token-bucket"))
    assert one.allowed() == 50
    one.change(OTHER)
    assert [*one.published().limits] == ["other", "api"]
    clock.advance(2 * 3600)
    one.change(OTHER.replace("5/hour", "6/hour"))
    assert [*one.published().limits] == ["other"]


def test_a_fixed_window_that_is_removed_matters_for_a_whole_period_by_any_clock(store: Store) -> None:
    for seconds in range(10, 30):
        limits = checked_limits(
            "a.toml", document(f"5/{seconds}s", algorithm="fixed-window").encode(), Functions(None, None)
        )
        removed = standings(standings({}, limits, store, 0), {}, store, 0)
        assert removed["api"].until_ns >= seconds * 10**9


# Processes that can't use what is in force


def with_tiers(text: str) -> str:
    """Of no use for an application without tiers."""
    return text.replace("version = 1\n", 'version = 1\ntiers = ["pro"]\n') + 'tier = ["pro"]\n'


def test_keys_keep_their_state_if_the_next_loader_cant_use_what_is_in_force(
    changing: Callable[[str], Changing], store: Store
) -> None:
    """As one of an application that has no tiers, after a rollback."""
    first, second = document("5/hour", algorithm="fixed-window"), document("5/hour", algorithm="sliding-log", keys="10")
    one = changing(first)
    one.use(5, "192.0.2.1")
    one.change(second)
    one.use(5, "192.0.2.2")
    one.live.close()
    removing = LiveRules(TextSource(with_tiers(OTHER)), store=store, interval=NEVER, tier=lambda request: "pro")
    removing.close()
    # The two limits of before the removal, which the document has again.
    back = changing(second)
    assert back.live.status().version == 4
    assert [back.allowed(f"192.0.2.{number}") for number in (1, 2)] == [0, 0]
    assert back.allowed("192.0.2.3") == 5


def test_a_loader_that_cant_use_what_is_in_force_publishes_what_comes_next(
    changing: Callable[[str], Changing], store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = document("5/hour", algorithm="fixed-window"), document("5/hour", algorithm="sliding-log", keys="10")
    one = changing(first)
    one.use(5)
    source = TextSource(first)
    with LiveRules(source, store=store, interval=NEVER, tier=lambda request: "pro") as other:
        one.live.close()
        for text in (second, with_tiers(second)):
            source.text = text
            other.step()
        assert other.status().published == 3
    # This process becomes the loader, and keeps the rules of before.
    one.source.text = with_tiers(second)
    one.live.step()
    status = one.live.status()
    assert (status.version, status.published, status.error) == (1, 3, None)
    assert "can't be used here" in str(status.process_error)
    one.change(second.replace("5/hour", "6/hour"))
    assert one.live.status().published == 4
    assert one.allowed() == 0


def test_a_loader_goes_on_without_a_version_that_cant_be_read(
    changing: Callable[[str], Changing], caplog: pytest.LogCaptureFixture
) -> None:
    one = changing(document("5/hour"))
    one.live.close()
    one.damage()
    assert changing(document("6/hour")).allowed() == 6
    assert "limits that have changed before count as if they had not" in caplog.text


def test_share_is_the_same_part_of_the_new_limit(
    changing: Callable[[str], Changing], clock: ManualClock, store: Store
) -> None:
    one = changing(document("100/hour", algorithm="token-bucket"))
    one.use(61)
    one.change(document("10/hour", algorithm="token-bucket", on_change='"share"'))
    assert one.allowed() == 3
    # Rounded against the key, and only once.
    clock.advance(360)
    assert one.allowed() == 1
    clock.advance(3600)
    assert one.allowed() == 10
    assert store.stats().limiters[MARKS].allowed == 1


def test_shares_go_through_several_changes(changing: Callable[[str], Changing]) -> None:
    one = changing(document("100/hour"))
    one.use(50)
    one.use(20, "192.0.2.2")
    one.change(document("10/hour", on_change='"share"'))
    one.use(1, "192.0.2.2")
    one.change(document("1000/hour", on_change='"share"'))
    assert one.allowed() == 500
    assert one.allowed("192.0.2.2") == 700
    one.change(document("100/hour", on_change='"share"'))
    assert one.allowed("192.0.2.2") == 0


def test_reset_gives_every_key_the_whole_limit(changing: Callable[[str], Changing]) -> None:
    one = changing(document("100/hour"))
    one.use(60)
    for rate in (90, 80):
        one.change(document(f"{rate}/hour", on_change='"reset"'))
        assert one.allowed() == rate
    # A document that changes something else resets nothing.
    one.change(document("80/hour", on_change='"reset"') + 'path = "/*"\n')
    assert one.allowed() == 0
    one.change(document("80/hour"))
    assert one.allowed() == 0


def test_a_process_that_starts_later_counts_as_the_others(changing: Callable[[str], Changing]) -> None:
    one = changing(document("100/hour"))
    one.use(60)
    one.change(document("10/hour", on_change='"share"'))
    other = changing(document("10/hour", on_change='"share"'))
    assert other.live.status().version == 2
    other.use(3)
    assert one.allowed() == 1


def test_a_limit_goes_on_after_a_version_that_cannot_be_used(changing: Callable[[str], Changing], store: Store) -> None:
    first = document("10/hour", on_change='"reset"')
    one = changing(document("9/hour"))
    one.change(first)
    one.use(10)
    one.live.close()
    tiers = TextSource(first.replace("version = 1\n", 'version = 1\ntiers = ["pro"]\n') + 'tier = ["pro"]\n')
    LiveRules(tiers, store=store, interval=NEVER, tier=lambda request: "pro").close()
    # The application has gone back to a version without tiers.
    other = changing(first)
    assert other.live.status().version == 4
    assert other.allowed() == 0


def test_shares_are_brought_by_the_time_of_the_limits(store: Store, clock: ManualClock) -> None:
    clock.advance(10**6)
    with Store.private(keys=100, clock=ManualClock()) as host:
        source = TextSource(document("100/hour"))
        with LiveRules(source, store=store, host=host, interval=NEVER) as live:
            site = Site("wsgi", live)
            for _ in range(100):
                assert site.request().status == 200
            source.text = document("50/hour", on_change='"share"')
            live.step()
            assert site.request().status == 429


def test_names_of_limiters_in_fields_and_counts_stay(changing: Callable[[str], Changing], store: Store) -> None:
    one = changing(document("100/hour"))
    one.change(document("10/hour", on_change='"reset"'))
    assert one.site.request()["ratelimit-policy"] == '"api";q=10;w=3600'
    assert store.stats().limiters["api"].allowed == 1


def test_concurrency_is_held_under_both_limits(changing: Callable[[str], Changing]) -> None:
    text = document("0/s", algorithm="concurrency").replace('rate = "0/s"', "limit = 2\nkeys = 10")
    one = changing(text)
    one.change(text.replace("limit = 2", 'limit = 3\non_change = "share"'))
    assert one.site.request().status == 200


def test_threads_bring_a_share_once_or_too_often_but_never_too_little(
    changing: Callable[[str], Changing], store: Store
) -> None:
    one = changing(document("1000/hour", algorithm="token-bucket"))
    clients = [f"192.0.2.{number}" for number in range(20)]
    used = {client: random.randrange(1, 900) for client in clients}
    for client, count in used.items():
        one.use(count // 10 * 10, client)
    one.change(document("100/hour", algorithm="token-bucket", on_change='"share"'))

    def ask(client: str) -> int:
        return sum(one.site.request(client=client).status == 200 for _ in range(110))

    with ThreadPoolExecutor(8) as pool:
        allowed = list(pool.map(ask, clients * 4))
    for number, client in enumerate(clients):
        assert sum(allowed[number::20]) <= 100 - used[client] // 10


def crash(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_crash_before_the_mark_charges_once_more(
    changing: Callable[[str], Changing], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = changing(document("100/hour"))
    one.use(40)
    one.change(document("10/hour", on_change='"share"'))
    from forebay.rules.live import carrying

    bring = carrying.Link.bring

    class Marks:
        def __init__(self, marks: Any) -> None:
            self.peek, self.hit = marks.peek, crash

    with monkeypatch.context() as patch:
        patch.setattr(carrying.Link, "bring", lambda link, key, marks: bring(link, key, Marks(marks)))
        with pytest.raises(KeyboardInterrupt):
            one.site.request()
    # 4 twice.
    assert one.allowed() == 2


def test_a_full_store_without_room_for_a_mark_forgets_no_share(clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="deny", clock=clock) as store:
        one = Changing(store, document("2/hour", algorithm="fixed-window"))
        clients = [f"192.0.2.{number}" for number in range(200)]
        for client in clients:
            one.use(2, client)
        one.change(document("1/hour", algorithm="fixed-window", on_change='"share"'))
        others = FixedWindow(store, "others", "1/hour")
        held = [number for number in range(20_000) if others.allow(number)]
        for client in clients:
            # Now and then a cell for a share, and none for its mark.
            others.reset(held.pop())
            assert one.allowed(client) == 0
        assert store.stats().limiters[MARKS].full > 0
        one.live.close()


def test_a_ban_outlasts_a_reset(store: Store) -> None:
    ban = Ban(store, "guessers", "2/hour", lasts="5 hours")
    rule = Rule(FixedWindow(store, "api", "1/hour"), key=ClientAddress(), ban=ban)
    before, after = Site("wsgi", [rule]), Site("wsgi", [carried(rule, {"api": Standing(1)}, store)])
    for first, second, client in ((before, after, "192.0.2.1"), (after, before, "192.0.2.9")):
        # It is banned after some denials, for both, for longer than the limit's window.
        for _ in range(9):
            first.request(client=client)
        assert int(first.request(client=client)["retry-after"]) > 3600
        assert int(second.request(client=client)["retry-after"]) > 3600
