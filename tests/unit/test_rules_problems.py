"""Rule files with mistakes: each is found with its place, what is allowed, and the nearest match."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rule_files import FILE, LIMITS, RULE, functions, problems

from forebay import InvalidRuleFile, Store
from forebay.rules import RuleFileProblem, load_rules

ALGORITHMS = (
    "allowed: bucketed-window, concurrency, fixed-window, leaky-bucket, min-interval, sliding-log, sliding-window, "
    "token-bucket"
)
RULE_WORDS = (
    "allowed: address, after, ban, bytes, canary, charge_on, cost, delay, except_address, except_tier, headers, "
    "ignore_case, key, limits, methods, most_delayed, most_held, most_wait, name, otherwise, overrides, path, "
    "priority, request_id, response, shadow, tier"
)
DURATIONS = (
    'the accepted forms are "2s", "500 ms", "1.5 minutes", a number of seconds and a timedelta, with the units ms, '
    "second, minute, hour, day, week and year"
)
LATER = "until = 2027-01-01T00:00:00Z\n"


def limit(body: str) -> str:
    """A file with this limit; its body begins in line 3."""
    return f"version = 1\n[limits.api]\n{body}\n{RULE}"


def rule(body: str) -> str:
    """A file with these words of its rule, from line 8 on."""
    return f"{FILE}{body}\n"


def override(body: str) -> str:
    """A file with this override, from line 9 on."""
    return rule(f"[[rules.overrides]]\n{body}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The file
        (FILE.replace("1", "2", 1), "1:11: version is 1, which is the version of the format, not 2"),
        (FILE.replace("version = 1\n", ""), "1:1: the file lacks version: 1, which is the version of the format"),
        (LIMITS, "1:1: the file lacks rules: a list of rules"),
        ("rules = []\n" + LIMITS, "1:9: rules is an empty list: fill it, or leave the word out"),
        (LIMITS + '[rules]\nname = "a"\n', "5:1: rules is a list of rules, not a table"),
        (
            "stores = 5\n" + FILE,
            "1:1: 'stores' is no word of the file: did you mean 'store'? allowed: bans, client, deny, "
            "limits, rules, shedders, store, tiers, version",
        ),
        ("store = 5\n" + FILE, '1:9: store is a URL such as "shm:///shop?keys=1000000", not 5'),
        # Limits
        ("version = 1\nlimits = []\n" + RULE, "2:10: limits is a table of limits by name, not a list"),
        ("version = 1\n[limits]\napi = 5\n" + RULE, "3:7: limits.api is a table with algorithm, not 5"),
        ("version = 1\n[limits]\n" + RULE, "2:1: limits is an empty table: fill it, or leave the word out"),
        (
            FILE.replace("[limits.api]", LIMITS.replace("version = 1\n", "").replace("api", '""') + "[limits.api]"),
            "2:9: limits has an empty name",
        ),
        (
            limit('algorithm = "token-buckt"\nrate = "5/hour"'),
            "3:13: limits.api.algorithm is none of the algorithms: 'token-buckt': did you mean 'token-bucket'? "
            f"{ALGORITHMS}",
        ),
        (limit("algorithm = 5"), f"3:13: limits.api.algorithm is none of the algorithms: 5: {ALGORITHMS}"),
        (limit('rate = "5/hour"'), f"2:9: limits.api lacks algorithm: {ALGORITHMS}"),
        (
            limit('algorithm = "token-bucket"'),
            '2:9: limits.api (token-bucket) lacks rate: a rate such as "100/minute"',
        ),
        (
            limit('algorithm = "token-bucket"\nrate = "5/hour"\nburts = 3'),
            "5:1: 'burts' is no word of limits.api (token-bucket): did you mean 'burst'? allowed: burst, initial, "
            "on_change, rate, refill, start",
        ),
        (
            limit('algorithm = "fixed-window"\nrate = "5/hour"\nburst = 3'),
            "5:1: 'burst' is no word of limits.api (fixed-window): allowed: align, on_change, rate, timezone",
        ),
        (
            limit('algorithm = "token-bucket"\nrate = "5/hour"\nburst = 0'),
            "5:9: limits.api.burst is a whole number of at least 1, not 0",
        ),
        (
            limit('algorithm = "fixed-window"\nrate = "5/fortnight"'),
            "4:8: limits.api.rate: '5/fortnight' is not a rate: there is no unit 'fortnight'; the accepted forms are "
            '"100/minute", "5 per 10 seconds", "5/10s" and Rate(5, 10), with the units ms, second, minute, hour, day, '
            "week and year",
        ),
        (
            limit('algorithm = "fixed-window"\nrate = 5'),
            '4:8: limits.api.rate is a rate such as "100/minute", not 5',
        ),
        (
            limit('algorithm = "fixed-window"\nrate = "5/hour"\nalign = "frist"'),
            "5:9: limits.api.align is 'calendar' or 'clock' or 'first' or 'stagger', not 'frist': did you mean "
            "'first'?",
        ),
        (
            limit('algorithm = "fixed-window"\nrate = "5/month"\nalign = "calendar"'),
            '2:9: limits.api: a window by the calendar needs a time zone: timezone="Europe/Berlin", or "UTC"',
        ),
        (
            limit('algorithm = "min-interval"\ninterval = "soon"'),
            f"4:12: limits.api.interval: 'soon' is not a length of time; {DURATIONS}",
        ),
        (
            limit('algorithm = "concurrency"\nlimit = 5\nlease = "x"'),
            f"5:9: limits.api.lease: 'x' is not a length of time; {DURATIONS}",
        ),
        (
            limit('algorithm = "token-bucket"\nrate = "5/hour"\nrefill = "interval"\nstart = 2026-01-01T00:00:00'),
            "6:9: limits.api.start is a time with its offset from UTC, such as 2027-01-31T12:00:00Z, not "
            "2026-01-01T00:00:00, which has no offset",
        ),
        (
            LIMITS + '[limits.b]\nalgorithm = "min-interval"\ninterval = "1s"\n' + RULE,
            "5:9: limits.b: no rule names the limit 'b': name it, or leave it out",
        ),
        (
            "version = 1\n[client]\ntrusted_proxies = ['10.0.0.0/8']\n" + FILE.replace("version = 1\n", ""),
            "2:2: client: the proxies ['10.0.0.0/8'] are trusted, but no field is named: write "
            'header="X-Forwarded-For", or the field that they set',
        ),
        # Rules
        (rule("weight = 3"), f"8:1: 'weight' is no word of rules[0]: {RULE_WORDS}"),
        (
            rule('exept_tier = ["a"]'),
            f"8:1: 'exept_tier' is no word of rules[0]: did you mean 'except_tier'? {RULE_WORDS}",
        ),
        (FILE.replace('"api"\n', '""\n'), "6:8: rules[0].name is a name, not ''"),
        (FILE.replace('["api"]', '"api"'), "7:10: rules[0].limits is a list of names of limits, not 'api'"),
        (FILE.replace('["api"]', "[]"), "7:10: rules[0].limits is an empty list: fill it, or leave the word out"),
        (
            FILE.replace('["api"]', '["api", "ap"]'),
            "7:18: rules[0].limits[1]: there is no limit 'ap': did you mean 'api'? allowed: api",
        ),
        (
            FILE.replace('["api"]', '["api", "api"]'),
            "7:18: rules[0].limits[1]: the limit 'api' is here twice: leave one out",
        ),
        (
            rule('path = "login"'),
            '8:8: rules[0].path: a path pattern begins with "/", as in "/users/{id}" or "/api/*", not \'login\'',
        ),
        (
            rule('path = ["/a", "/b/.*"]'),
            "8:8: rules[0].path: the path pattern '/b/.*' has .*: write * for anything, and .{name} for names that "
            "begin with a dot",
        ),
        (rule("path = []"), "8:8: rules[0].path is an empty list: fill it, or leave the word out"),
        (
            rule("path = 5"),
            '8:8: rules[0].path is a path pattern such as "/users/{id}" or "/api/*" or a list of several, not 5',
        ),
        (
            rule('methods = "*"'),
            "8:11: rules[0].methods: no request has the method '*': leave methods out for every method",
        ),
        (
            rule('headers = {"X Y" = "a"}'),
            "8:12: rules[0].headers.X Y: 'X Y' is no name of a header field such as X-API-Key",
        ),
        (rule('headers = {X = ""}'), "8:16: rules[0].headers.X: a field has a value: write * for any"),
        (
            rule("headers = {X = 5}"),
            "8:16: rules[0].headers.X is the value of a header field, in which * matches anything, not 5",
        ),
        (
            rule('address = ["10.0.0.1/8"]'),
            "8:12: rules[0].address[0]: an address or a network is such as \"10.0.0.0/8\", not '10.0.0.1/8': "
            "10.0.0.1/8 has host bits set",
        ),
        (
            rule('address = ["10.0.0.0/8", "::/0"]'),
            "8:26: rules[0].address[1]: '::/0' is every address: leave it out",
        ),
        (
            rule('except_address = ["fe80::1%eth0"]'),
            "8:19: rules[0].except_address[0]: 'fe80::1%eth0' has a zone, which no client's address has: leave it out",
        ),
        (
            rule('address = ["10.1.0.0/16"]\nexcept_address = ["10.0.0.0/8"]'),
            "8:11: rules[0].address: all of it is in except_address, so the rule would match no request",
        ),
        (rule('tier = ["pro"]'), "8:9: rules[0].tier[0]: tiers has no 'pro': allowed: none"),
        (
            'tiers = ["free", "pro"]\n' + rule('tier = ["free"]'),
            "1:18: tiers[1]: no rule's tier or except_tier is about 'pro': name it, or leave it out",
        ),
        (
            'tiers = ["free", "free"]\n' + rule('tier = ["free"]'),
            "1:18: tiers[1]: the tier 'free' is here twice: leave one out",
        ),
        (
            'tiers = ["free", "pro"]\n' + rule('tier = ["free"]\nexcept_tier = ["pro"]'),
            "10:15: rules[0].except_tier: give tier or except_tier: the rule is for the first, or for all others",
        ),
        (
            'tiers = ["free", "pro"]\n' + rule('except_tier = ["pro", "free"]'),
            "9:15: rules[0].except_tier: every tier is excepted, so the rule would match no request",
        ),
        (
            rule('key = "adress"'),
            "8:7: rules[0].key: 'adress' is no part of a key: did you mean 'address'? allowed: address, "
            "constant:TEXT, everyone, header:NAME, path:NAME, tier, user",
        ),
        (
            rule('key = "header:X"'),
            "8:7: rules[0].key: a request without header:x would have no key: write what counts then, "
            '"header:x | address"',
        ),
        (
            rule('key = "header:X Y | address"'),
            "8:7: rules[0].key: 'X Y' is no name of a header field such as X-API-Key",
        ),
        (
            rule('key = "address | user"'),
            "8:7: rules[0].key: every request has address, so nothing after it counts: leave the rest out",
        ),
        (
            rule('path = ["/a/{id}", "/b/{name}"]\nkey = ["path:id"]'),
            "9:7: rules[0].key: path:id needs the segment {id} in each path of the rule",
        ),
        (
            rule('key = ["address", "user | address"]'),
            "8:7: rules[0].key: the key has address twice: leave one out",
        ),
        (
            rule("cost = 6"),
            "7:11: rules[0].limits[0]: a cost of 6 can never be allowed by limiter 'api', which allows at most 5 at "
            "once: raise its limit (a bucket's burst, initial or capacity) or split the request",
        ),
        (rule("cost = 0"), "8:8: rules[0].cost is a whole number of at least 1, not 0"),
        (
            rule('charge_on = [99, "1-2"]'),
            '8:14: rules[0].charge_on[0] is a status such as 401 or statuses such as "400-499", not 99\n'
            "8:18: rules[0].charge_on[1] is a status such as 401 or statuses such as \"400-499\", not '1-2'",
        ),
        (
            rule('charge_on = ["500-400"]'),
            "8:13: rules[0].charge_on: no status is in it, so no request would ever be charged",
        ),
        (
            rule('delay = "2s"'),
            "5:1: rules[0]: <FixedWindow 'api' 5 per hour> can't delay requests, as it books no turns: delay is for a "
            "TokenBucket, a LeakyBucket or a MinInterval of a Store",
        ),
        (
            rule('delay = "soon"'),
            f"8:9: rules[0].delay: delay is a length of time of at least 0, not 'soon'; {DURATIONS}",
        ),
        (rule("response = {status = 99}"), "8:22: rules[0].response.status is a status such as 429, not 99"),
        (
            rule('response = {text = "a"}'),
            "8:13: 'text' is no word of rules[0].response: allowed: body, headers, status",
        ),
        (
            rule('response = {headers = {"X Y" = "a"}}'),
            '8:12: rules[0].response: an Answer has headers such as (("Content-Type", "text/plain"),), not '
            "(('X Y', 'a'),)",
        ),
        (rule('shadow = "yes"'), "8:10: rules[0].shadow is true or false, not 'yes'"),
        (
            FILE + RULE.replace('["api"]', '["api"]\npath = "/a"'),
            "9:8: rules[1].name: rules[0] has the name 'api', too",
        ),
        (
            FILE + RULE.replace('"api"\n', '"b"\n'),
            "8:1: rules[1]: it repeats rules[0], so each request would be charged twice",
        ),
        # Overrides
        (
            override('key = {address = "192.0.2.1"}\n' + LATER),
            "8:1: rules[0].overrides[0]: an override has one of limits, exempt = true and deny = true",
        ),
        (
            override('key = {address = "192.0.2.1"}\nexempt = true\ndeny = true\n' + LATER),
            "8:1: rules[0].overrides[0]: an override has one of limits, exempt = true and deny = true",
        ),
        (
            override('key = {address = "192.0.2.1"}\nexempt = true'),
            "8:1: rules[0].overrides[0] lacks until: a time with its offset from UTC, such as 2027-01-31T12:00:00Z",
        ),
        (
            override('key = {user = "ada"}\nexempt = true\n' + LATER),
            "9:7: rules[0].overrides[0].key: the rule's key has no part 'user': allowed: address",
        ),
        (
            override('key = {address = "10.0.0.0/8"}\nexempt = true\n' + LATER),
            "9:7: rules[0].overrides[0].key: '10.0.0.0/8' is no address such as 192.0.2.1",
        ),
        (
            override('key = {address = "2001:db8::1"}\nexempt = true\n' + LATER)
            + '[[rules.overrides]]\nkey = {address = "2001:db8::2"}\ndeny = true\n'
            + LATER,
            "14:7: rules[0].overrides[1].key: another override of the rule has this key: leave one out",
        ),
        (
            FILE.replace("[limits.api]", '[limits."api denied"]').replace('["api"]', '["api denied"]')
            + '[[rules.overrides]]\nkey = {address = "192.0.2.1"}\ndeny = true\n'
            + LATER,
            "6:8: rules[0].name: the limit 'api denied' has the name of this rule's denials: rename it",
        ),
        (
            override('key = {address = "192.0.2.1"}\nlimits = ["apo"]\n' + LATER),
            "10:11: rules[0].overrides[0].limits[0]: there is no limit 'apo': did you mean 'api'? allowed: api",
        ),
        (
            rule(
                'key = ["constant:a", "user | address"]\n[[rules.overrides]]\nkey = {user = "a", address = "192.0.2.1"}'
            )
            + "deny = true\n"
            + LATER,
            "10:7: rules[0].overrides[0].key: it names one of user, address, as the rule's key does",
        ),
        # Syntax
        (FILE + "[limits.api]\n", "8:12: Cannot declare ('limits', 'api') twice"),
        ("version = \n", "1:11: Invalid value"),
        (b"version = 1\n# caf\xe9".decode("latin-1").encode("latin-1"), "2:6: the byte 0xe9 isn't UTF-8"),
        ("a = " + "[" * 5000, "1:1: its lists and tables are nested too deeply"),
        ("#" * (2**20 + 1), "1:1: a rule file has at most 1048576 bytes, and this one has 1048577"),
    ],
)
def test_mistake_is_found_with_its_place(text: str | bytes, expected: str) -> None:
    assert "\n".join(problems(text)) == expected


YAML = "version: 1\nlimits:\n  api: {algorithm: fixed-window, rate: 5/hour}\nrules:\n- name: api\n  limits: [api]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (YAML.replace("5/hour", "5"), '3:40: limits.api.rate is a rate such as "100/minute", not 5'),
        (YAML.replace("name", "nmae"), None),
        (YAML + "  cost: ~\n", "7:9: there is no value: write one, or leave the word out"),
        (YAML + "  shadow: yes\n", "7:11: rules[0].shadow is true or false, not 'yes'"),
        (YAML + "  cost: 1:30\n", "7:9: rules[0].cost is a whole number of at least 1, not '1:30'"),
        (YAML + "  cost: 1.5\n", "7:9: rules[0].cost is a whole number of at least 1, not 1.5"),
        (
            YAML.replace("rules:", "  api: {algorithm: fixed-window, rate: 9/hour}\nrules:"),
            "4:3: 'api' is here twice, first in line 3: leave one out",
        ),
        (YAML + "  cost: &a 1\n", "7:9: rule files have no anchors and aliases: repeat the value"),
        (YAML + "  cost: *a\n", "7:9: rule files have no anchors and aliases: repeat the value"),
        (YAML + "  cost: !!int 1\n", "7:9: rule files have no tags, as 'tag:yaml.org,2002:int': leave it out"),
        (YAML + "  ? [a]\n  : 1\n", "7:5: a word before a colon is text"),
        (YAML + "---\n", "7:1: but found another document"),
        (YAML + "  cost: [\n", "8:1: expected the node content, but found '<stream end>'"),
        (YAML + "# \x07", "7:3: the character '\\x07' isn't allowed in YAML"),
        ("- 1", "1:1: the file is a table, not a list"),
        (
            YAML + '  path: "/\\udcff"\n',
            "7:9: '/\\udcff' has an escape of half a character: write the whole one",
        ),
        (YAML + '  "\\ud83d": 1\n', "7:3: '\\ud83d' has an escape of half a character: write the whole one"),
    ],
)
def test_mistake_in_yaml_is_found_with_its_place(text: str, expected: str | None) -> None:
    found = problems(text, "limits.yaml")
    if expected is None:
        assert [line.partition(" is ")[0] for line in found] == ["5:3: 'nmae'", "5:3: rules[0] lacks name: a name"]
    else:
        assert found == [expected]


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("request_id", 'a table such as { field = "Idempotency-Key" }'),
        ("canary", 'a table such as { percent = 5, limits = ["new"] }'),
        ("response", 'a table such as { status = 503, body = "Later." }'),
    ],
)
def test_value_in_place_of_a_table_is_refused_with_an_example(word: str, meaning: str) -> None:
    column = len(word) + 4
    assert problems(f"{FILE}{word} = 'x'\n") == [f"8:{column}: rules[0].{word} is {meaning}, not 'x'"]


BUCKET = 'version = 1\n[limits.api]\nalgorithm = "token-bucket"\nrate = "1 MiB/second"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('bytes = "both"', "8:9: rules[0].bytes is 'requests' or 'responses', not 'both'"),
        ('bytes = "responses"\nafter = "1 mib"', "5:1: rules[0]: after is a number of bytes such as"),
        ('bytes = "responses"\nafter = -1', "9:9: rules[0].after is a number of bytes or a size such as"),
        ('bytes = "responses"\nmost_wait = "soon"', "5:1: rules[0]: most_wait is a length of time of at least 0"),
        (
            'bytes = "responses"\nban = "b"\n[bans.b]\ndenials = "5/minute"\nlasts = "1m"',
            "9:7: rules[0].ban: ban has no effect on bytes: leave it out",
        ),
        ('bytes = "responses"\ncost = 2', "9:8: rules[0].cost: cost has no effect on bytes: leave it out"),
        ('bytes = "requests"\nshadow = true', "9:10: rules[0].shadow: shadow has no effect on bytes: leave it out"),
        ('after = "1 MiB"', '8:9: rules[0].after: after is for a rule with bytes = "responses": leave it out'),
        ("most_held = 3", '8:13: rules[0].most_held: most_held is for a rule with bytes = "responses": leave it out'),
        (
            'bytes = "responses"\n[[rules]]\nname = "b"\nlimits = ["api"]',
            "2:9: limits.api: a rule with bytes names it, and one without",
        ),
    ],
)
def test_mistake_in_a_byte_rate_is_found_with_its_place(text: str, expected: str) -> None:
    [problem] = problems(f"{BUCKET}{RULE}{text}\n")
    assert problem.startswith(expected)


def test_byte_rate_needs_a_token_bucket() -> None:
    [problem] = problems(rule('bytes = "responses"'))
    assert "can't meter bytes: a ByteRate is for a TokenBucket of a Store" in problem


def test_all_problems_are_found_at_once() -> None:
    text = """version = 1
[limits.api]
algorithm = "fixed-window"
rate = "5/fortnight"
[limits.b]
algorithm = "fixd-window"
[limits.c]
algorithm = "min-interval"
interval = "1s"
[[rules]]
name = "one"
limits = ["api", "d"]
pathh = "/a"
[[rules]]
name = "two"
limits = ["b", "ap"]
cost = 5
path = "b"
[[rules]]
name = "two"
limits = ["c"]
cost = 2
"""
    found = problems(text)
    assert [line.partition(" ")[0] for line in found] == [
        "4:8:",
        "6:13:",
        "13:1:",
        "16:16:",
        "18:8:",
        "20:8:",
        "21:11:",
    ], found


def test_tier_functions_are_asked_for() -> None:
    text = 'tiers = ["free"]\n' + rule('tier = ["free"]')
    assert problems(text, given=functions(tier=None)) == [
        "9:8: rules[0].tier: there is no function that returns a request's tier: write tier="
    ]
    assert problems(rule('key = ["tier", "address"]'), given=functions(tier=None)) == [
        "8:7: rules[0].key: tier is a part of a key, and there is no function for it: write tier="
    ]

    async def tier(request: object) -> str:
        return "free"

    assert problems(text, given=functions(tier=tier)) == []
    assert problems(rule('key = ["tier", "address"]'), given=functions(tier=tier)) == [
        "8:7: rules[0].key: tier is a part of a key, so the function of load_rules for it can't be async"
    ]


def test_name_of_the_file_says_its_format() -> None:
    assert problems(FILE, "limits.json") == ["1:1: the name of a rule file ends with one of .toml, .yaml, .yml"]
    assert problems(FILE, "LIMITS.TOML") == []


def test_error_has_the_problems_as_data(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("version = 2\n")
    with pytest.raises(InvalidRuleFile) as raised:
        load_rules(path)
    assert raised.value.path == str(path)
    assert raised.value.problems[0] == RuleFileProblem(1, 1, "the file lacks limits: a table of limits by name")
    assert len(raised.value.problems) == 3
    assert str(raised.value).startswith(f"{path}:1:1: the file lacks limits")


def test_a_wrong_file_makes_nothing_in_the_store(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(rule("cost = 6"))
    with Store.private(keys=100) as store:
        with pytest.raises(InvalidRuleFile, match="a cost of 6"):
            load_rules(path, store=store)
        assert store.stats().limiters == {}


def test_numbers_of_thousands_of_digits_are_refused() -> None:
    (found,) = problems("a = " + "9" * (sys.get_int_max_str_digits() + 1))
    assert found.startswith("1:1: a value can't be read: Exceeds the limit")


def test_message_lists_few_of_many_limits() -> None:
    limits = "".join(f'[limits.l{n:02}]\nalgorithm = "min-interval"\ninterval = "1s"\n' for n in range(40))
    names = ", ".join(f'"l{n:02}"' for n in range(40))
    (found,) = problems(f'version = 1\n{limits}[[rules]]\nname = "one"\nlimits = [{names}, "other"]\n')
    assert found.endswith(
        "there is no limit 'other': allowed: " + ", ".join(f"l{n:02}" for n in range(30)) + " and 10 more"
    )


DEEP = [
    ("limits.toml", "x = " + "[" * 100_000 + "]" * 100_000),
    ("limits.toml", "a." * 100_000 + "a = 1"),
    ("limits.toml", "# don't\n['a' . " + '"a" . ' * 100_000 + "a]"),
    ("limits.toml", "x = {" + "a." * 100_000 + "a = 1}"),
    ("limits.yaml", "x: " + "[" * 100_000),
    ("limits.yaml", "- " * 100_000 + "a"),
    ("limits.yaml", "? " * 100_000 + "a"),
]


@pytest.mark.parametrize(("name", "text"), DEEP, ids=range(len(DEEP)))
def test_deep_document_is_refused_before_it_takes_time_and_memory(name: str, text: str) -> None:
    assert problems(text, name) == ["1:1: its lists and tables are nested too deeply"]


def test_dots_that_join_no_words_are_not_deep() -> None:
    dots = "a." * 100
    words = f'path = \'/{dots}\'\nresponse = {{ body = """{dots}""" }}\n'
    assert problems(FILE.replace('"api"\n', f'"api"  # {dots}\n') + words) == []


def test_only_the_first_thousand_problems_are_found() -> None:
    assert len(problems(FILE + "".join(f"word{number} = 1\n" for number in range(5000)))) == 1000
