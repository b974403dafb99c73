"""The dashboard and the alert rules in examples/monitoring: every metric that they name exists, and they work."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from forebay.metrics.readings import METRICS

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "examples" / "monitoring"
PAGE = (ROOT / "docs" / "metrics.md").read_text()
SERVER_METRICS = (ROOT / "native" / "server" / "src" / "metrics.rs").read_text()
SAMPLES = {metric.sample: metric for metric in METRICS}
NAME = re.compile(r"\bforebay_\w+")
SELECTOR = re.compile(r"\b(forebay_\w+)\{([^}]*)\}")
# Those of the scrape, and of alert rules.
MORE_LABELS = {"instance", "job"}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def dashboard() -> Any:
    return json.loads((MONITORING / "dashboard.json").read_text())


def expressions() -> Iterator[str]:
    for rule in rules():
        yield rule["expr"]
    board = dashboard()
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_expressions_name_only_metrics_and_labels_that_exist() -> None:
    found = set()
    for expression in expressions():
        names = set(NAME.findall(expression))
        assert names <= set(SAMPLES), expression
        found |= names
        for name, labels in SELECTOR.findall(expression):
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels)) <= {*SAMPLES[name].labels, *MORE_LABELS}
    assert set(SAMPLES) - found == set(), "metrics that neither the dashboard nor an alert shows"


def test_the_page_lists_every_metric_and_alert() -> None:
    of_server = re.findall(r"# TYPE (forebay_server_\w+)", SERVER_METRICS)
    assert set(re.findall(r"^\| `(forebay_\w+)`", PAGE, re.MULTILINE)) == {*SAMPLES, *of_server}
    assert re.findall(r"^### (Forebay\w+)$", PAGE, re.MULTILINE) == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook_url"].endswith(f"/metrics/#{rule['alert'].lower()}")
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_every_alert_has_a_test() -> None:
    tested = set()
    for test in yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]:
        tested |= {one["alertname"] for one in test.get("alert_rule_test", ())}
        for series in test["input_series"]:
            (name,) = NAME.findall(series["series"])
            assert name in SAMPLES
    assert tested == {rule["alert"] for rule in rules()}


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    for command in (
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
        ["check", "config", "prometheus.yml"],
    ):
        result = subprocess.run(["promtool", *command], cwd=MONITORING, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_parses_the_dashboards_expressions(tmp_path: Path) -> None:
    board = dashboard()
    records = [
        {"record": f"panel{panel['id']}:{target['refId']}", "expr": target["expr"].replace("$__rate_interval", "1m")}
        for panel in board["panels"]
        for target in panel["targets"]
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    result = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in board["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)
