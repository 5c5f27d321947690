"""Names, ports and folders of Prometheus and Grafana in compose.fleet.yaml fit together."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICES = yaml.safe_load((ROOT / "compose.fleet.yaml").read_text(encoding="utf-8"))["services"]
PROMETHEUS_PORT = 9090  # where its image listens


def mounts(service: str) -> dict[PurePosixPath, Path]:
    """Return the source of each mount in the container."""
    found = (volume.split(":") for volume in SERVICES[service]["volumes"])
    return {PurePosixPath(there): ROOT / here for here, there, *_ in found}


def listens(service: str) -> set[int]:
    if service.startswith("node"):
        exposed = re.findall(r"^EXPOSE (.*)$", (ROOT / "Dockerfile.cpu").read_text(), re.M)
        return {int(port) for line in exposed for port in line.split()}
    if service == "prometheus":
        return {PROMETHEUS_PORT}
    binds = SERVICES[service]["environment"]
    return {int(binds[name].rpartition(":")[2]) for name in ("BIND", "INSIDE")}


def provisioned(kind: str) -> list[dict[str, Any]]:
    files = (DEPLOY / "grafana" / "provisioning" / kind).iterdir()
    return [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]


def test_prometheus_asks_every_server_and_the_proxy_where_they_listen() -> None:
    place, file = next(iter(mounts("prometheus").items()))
    assert place == PurePosixPath("/etc/prometheus/prometheus.yml")  # its default
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["scrape_configs"]
    targets = [t for job in jobs for config in job["static_configs"] for t in config["targets"]]
    asked = {host: int(port) for host, port in (target.split(":") for target in targets)}
    assert asked.keys() == {"node1", "node2", "node3", "proxy"}
    for service, port in asked.items():
        assert port in listens(service)


def test_grafana_asks_that_prometheus_by_the_type_that_the_dashboard_names() -> None:
    (said,) = provisioned("datasources")
    (source,) = said["datasources"]
    url = urlsplit(source["url"])
    assert url.hostname in SERVICES
    assert url.port in listens(url.hostname)
    assert source["isDefault"]  # which a dashboard's variable takes first
    board = json.loads((DEPLOY / "grafana" / "kogpt2.json").read_text(encoding="utf-8"))
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert variables["datasource"]["query"] == source["type"]
    asked = [panel["datasource"] for panel in board["panels"]] + [variables["model"]["datasource"]]
    assert all(one == {"type": source["type"], "uid": "${datasource}"} for one in asked)


def test_grafana_finds_the_dashboard_where_it_looks_and_begins_with_it() -> None:
    there = mounts("grafana")
    assert there[PurePosixPath("/etc/grafana/provisioning")] == DEPLOY / "grafana" / "provisioning"
    (said,) = provisioned("dashboards")
    (provider,) = said["providers"]
    home = PurePosixPath(
        SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    )
    assert home.parent == PurePosixPath(provider["options"]["path"])
    assert there[home] == DEPLOY / "grafana" / "kogpt2.json"
