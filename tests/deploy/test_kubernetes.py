"""The Kustomize base, its overlays and its components fit the image and the server. What kubectl
makes of them fits Kubernetes' schemas: test_composed.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.api.metrics import Metrics
from serving.settings import Settings
from tests.deploy import volumes
from tests.e2e.server import REPOSITORY
from tests.serving.test_dashboard import STATISTICS

FOLDER = REPOSITORY / "deploy" / "kubernetes"
BASE = FOLDER / "base"
OVERLAYS = ("envoy-gateway", "haproxy-ingress", "example")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def resources(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the resources that a kustomization names itself."""
    return {
        (document["kind"], document["metadata"]["name"]): document
        for name in documents(folder / "kustomization.yaml")[0].get("resources", [])
        if name.endswith(".yaml")
        for document in documents(folder / name)
    }


KUSTOMIZATION = documents(BASE / "kustomization.yaml")[0]
RESOURCES = resources(BASE)
FOLDERS = [BASE, *(FOLDER / o for o in OVERLAYS), *sorted((FOLDER / "components").iterdir())]
ALL = {
    (folder.name, *key): document
    for folder in FOLDERS
    for key, document in resources(folder).items()
}
POD = RESOURCES["Deployment", "kogpt2"]["spec"]["template"]
SERVER = POD["spec"]["containers"][0]
PROBES = ("startup", "readiness", "liveness")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_file_is_part_of_something(folder: Path) -> None:
    files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    named = documents(folder / "kustomization.yaml")[0].get("resources", [])
    assert files == {name for name in named if name.endswith(".yaml")}


def test_the_ingress_asks_for_what_the_tested_proxy_does() -> None:
    """HAProxy Ingress writes the annotation into its backend as it is."""
    annotations = ALL["haproxy-ingress", "Ingress", "kogpt2"]["metadata"]["annotations"]
    own = {name.partition("/")[2]: value for name, value in annotations.items()}
    configuration = (REPOSITORY / "deploy" / "haproxy" / "haproxy.cfg").read_text("utf-8")
    backend = configuration.partition("\nbackend kogpt2\n")[2]
    shared, servers = backend.split("\n\n")[:2]
    said = [line.strip() for line in shared.splitlines()]
    assert own["config-backend"].splitlines() == said
    assert f"balance {own['balance-algorithm']}" in said
    assert f"weight {own['initial-weight']} " in servers
    assert f"uri {own['health-check-uri']}\n" in servers
    fall, rise = own["health-check-fall-count"], own["health-check-rise-count"]
    assert f"inter {own['health-check-interval']} fall {fall} rise {rise} " in servers
    assert f"timeout server {own['timeout-server']}\n" in configuration


def test_who_may_reach_what() -> None:
    labels = POD["metadata"]["labels"].items()
    policies = [document for key, document in ALL.items() if key[1] == "NetworkPolicy"]
    opened = {}
    for policy in policies:
        spec = policy["spec"]
        assert spec["podSelector"]["matchLabels"].items() <= labels
        for rule in spec["ingress"]:
            for port in rule["ports"]:
                opened.setdefault(port["port"], []).extend(rule["from"])
    assert opened["management"] == [{"podSelector": {"matchLabels": {"kogpt2/management": "true"}}}]
    assert set(opened) == {"http", "management"}
    (token,) = SERVER["env"]
    assert token["name"] == "MANAGEMENT_TOKEN"
    assert token["valueFrom"]["secretKeyRef"].get("optional", False) is False


def test_the_scraper_that_the_autoscaler_needs_is_let_in_whatever_its_namespace_is_called() -> None:
    """KEDA asks the Prometheus of the namespace that is let in by its name."""
    assert ("HorizontalPodAutoscaler", "kogpt2") in RESOURCES
    policy = RESOURCES["NetworkPolicy", "kogpt2"]["spec"]["ingress"]
    peers = [peer for rule in policy if {"port": "http"} in rule["ports"] for peer in rule["from"]]
    spaces = [p["namespaceSelector"]["matchLabels"] for p in peers if "namespaceSelector" in p]
    (named, labelled) = (next(iter(space.items())) for space in spaces)
    (trigger,) = ALL["keda", "ScaledObject", "kogpt2"]["spec"]["triggers"]
    assert f".{named[1]}:" in trigger["metadata"]["serverAddress"]
    for page in ("kubernetes.md", "kubernetes.ko.md"):
        text = (REPOSITORY / "docs" / "deploy" / page).read_text("utf-8")
        assert f'`{labelled[0]}: "{labelled[1]}"`' in text


def test_what_selects_pods_selects_these() -> None:
    labels = POD["metadata"]["labels"]
    budget = RESOURCES["PodDisruptionBudget", "kogpt2"]["spec"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    spread = POD["spec"]["topologySpreadConstraints"]
    assert {constraint["topologyKey"] for constraint in spread} == {
        "topology.kubernetes.io/zone",
        "kubernetes.io/hostname",
    }
    for constraint in spread:
        assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
    monitor = ALL["service-monitor", "ServiceMonitor", "kogpt2"]["spec"]
    assert monitor["selector"]["matchLabels"] == KUSTOMIZATION["labels"][0]["pairs"]
    shown = {port["name"] for port in RESOURCES["Service", "kogpt2"]["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= shown


@pytest.mark.parametrize("kind", ["BackendTrafficPolicy", "EnvoyExtensionPolicy", "HTTPRoute"])
def test_what_is_said_of_a_route_or_gateway_finds_it(kind: str) -> None:
    (document,) = (d for key, d in ALL.items() if key[:2] == ("envoy-gateway", kind))
    for target in document["spec"].get("targetRefs", document["spec"].get("parentRefs")):
        assert ("envoy-gateway", target.get("kind", "Gateway"), target["name"]) in ALL


def test_names_lead_to_what_is_there() -> None:
    labels = POD["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    services = {name: body["spec"] for (kind, name), body in RESOURCES.items() if kind == "Service"}
    for spec in services.values():
        assert spec["selector"].items() <= labels
        assert {port["targetPort"] for port in spec["ports"]} <= set(ports)
    for rule in ALL["haproxy-ingress", "Ingress", "kogpt2"]["spec"]["rules"]:
        for path in rule["http"]["paths"]:
            backend = path["backend"]["service"]
            shown = {port["name"] for port in services[backend["name"]]["ports"]}
            assert backend["port"]["name"] in shown
    for rule in ALL["envoy-gateway", "HTTPRoute", "kogpt2"]["spec"]["rules"]:
        for reference in rule["backendRefs"]:
            shown = {port["port"] for port in services[reference["name"]]["ports"]}
            assert reference["port"] in shown
    for probe in PROBES:
        assert SERVER[f"{probe}Probe"]["httpGet"]["port"] in ports
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
    assert ports == {"http": Settings().port, "management": Settings().management_port}


def test_only_readiness_waits_for_models() -> None:
    """A preload may take longer than any probe: a restart in its midst would begin it again."""
    paths = {probe: SERVER[f"{probe}Probe"]["httpGet"]["path"] for probe in PROBES}
    assert paths == {
        "startup": "/v2/health/live",
        "readiness": "/ping",
        "liveness": "/v2/health/live",
    }
    startup = SERVER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > Settings().start_timeout_s


def test_both_autoscalers_ask_for_a_metric_that_is_served() -> None:
    own = RESOURCES["HorizontalPodAutoscaler", "kogpt2"]["spec"]
    name = own["metrics"][0]["pods"]["metric"]["name"]
    served = Metrics().text(STATISTICS, {"시#m1": "시"}, {"시": 0}).decode()
    assert f"# TYPE {name} gauge" in served
    keda = ALL["keda", "ScaledObject", "kogpt2"]["spec"]
    (trigger,) = keda["triggers"]
    assert trigger["metadata"]["query"] == f"sum({name})"
    assert trigger["metadata"]["threshold"] == own["metrics"][0]["pods"]["target"]["averageValue"]
    limits = keda["minReplicaCount"], keda["maxReplicaCount"]
    assert limits == (own["minReplicas"], own["maxReplicas"])
    behaviour = keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behaviour == own["behavior"]


def test_the_image_can_write_where_the_pod_lets_it() -> None:
    made = (REPOSITORY / "docker/debian.sh").read_text(encoding="utf-8")
    places = re.search(r"install -d -m 1777 (.*)", made)
    assert places
    assert {mount["mountPath"] for mount in SERVER["volumeMounts"]} == set(places[1].split())
    uid = re.search(r"useradd .*--uid (\d+)", made)
    assert uid
    assert POD["spec"]["securityContext"]["runAsUser"] == int(uid[1])
    assert SERVER["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_stop_has_the_time_that_it_may_take() -> None:
    literals = KUSTOMIZATION["configMapGenerator"][0]["literals"]
    settings = dict(literal.split("=", 1) for literal in literals)
    sleep_s = int(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = sleep_s + int(settings["DRAIN_S"]) + 10
    assert POD["spec"]["terminationGracePeriodSeconds"] >= needed


def test_the_pods_disk_holds_what_its_volumes_may() -> None:
    cache_mib = volumes.sizes(POD["spec"])["cache"]
    disk = {k: r["ephemeral-storage"] for k, r in SERVER["resources"].items()}
    assert int(disk["requests"].removesuffix("Gi")) * 1024 >= cache_mib
    assert int(disk["limits"].removesuffix("Gi")) * 1024 > cache_mib


def test_the_page_makes_what_the_example_needs() -> None:
    page = (REPOSITORY / "docs" / "deploy" / "kubernetes.md").read_text("utf-8")
    token = SERVER["env"][0]["valueFrom"]["secretKeyRef"]
    pulled = RESOURCES["ServiceAccount", "kogpt2"]["imagePullSecrets"]
    secrets = {token["name"], *(secret["name"] for secret in pulled)}
    assert set(re.findall(r"create secret \S+ (\S+)", page)) == secrets
    assert f"--from-literal={token['key']}=" in page
    assert set(re.findall(r"kubectl -n (\S+) (?:create|rollout)", page)) == {
        ALL["example", "Namespace", "kogpt2"]["metadata"]["name"]
    }
    (rule,) = ALL["haproxy-ingress", "NetworkPolicy", "kogpt2-proxy"]["spec"]["ingress"]
    (home,) = rule["from"][0]["namespaceSelector"]["matchLabels"].values()
    assert f"--namespace {home} " in page
    said = (FOLDER / "haproxy-ingress" / "ingress.yaml").read_text("utf-8")
    (buffer,) = re.findall(r"config-global: (.*)", said)
    assert f"config-global={buffer}'" in page
