"""The examples of docs/server.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from decision_server import DecisionServer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()


def test_the_question_of_the_page_gets_its_reply(serve: Callable[..., DecisionServer]) -> None:
    text, _ = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    rules = text.replace('store = "shm:///shop?keys=1000000"\n', "")
    assert rules != text
    server = serve(rules, head="")
    found = re.search(r"\$ curl -s \S+(/v1/decide) -d '(.*?)'\n(.*?)\n", PAGE)
    assert found is not None
    status, _, body = server.get(found[1], method="POST", body=found[2].encode())
    assert (status, json.loads(body)) == (200, json.loads(found[3]))
