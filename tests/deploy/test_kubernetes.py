"""The Kustomize base fits Kubernetes' published schemas, the image and what the server serves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from serving.api.metrics import Metrics
from serving.settings import Settings
from tests.e2e.server import REPOSITORY
from tests.serving.test_dashboard import STATISTICS

BASE = REPOSITORY / "deploy" / "kubernetes"
VERSIONS = ("1.29", "1.37")  # the oldest that managed clusters still run, and the newest here


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


KUSTOMIZATION = documents(BASE / "kustomization.yaml")[0]
RESOURCES = {
    (document["kind"], document["metadata"]["name"]): document
    for name in KUSTOMIZATION["resources"]
    for document in documents(BASE / name)
}
POD = RESOURCES["Deployment", "kogpt2"]["spec"]["template"]
SERVER = POD["spec"]["containers"][0]
PROBES = ("startup", "readiness", "liveness")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("key", RESOURCES, ids=" ".join)
def test_every_resource_fits_the_schema(key: tuple[str, str], version: str) -> None:
    kubernetes_validate.validate(RESOURCES[key], version, strict=True)


def test_a_wrong_resource_would_be_noticed() -> None:
    wrong = {**RESOURCES["Service", "kogpt2"], "spec": {"ports": [{"prot": 8080}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_every_file_is_part_of_the_base() -> None:
    files = {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])


def test_names_lead_to_what_is_there() -> None:
    labels = POD["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    services = {name: body["spec"] for (kind, name), body in RESOURCES.items() if kind == "Service"}
    for spec in services.values():
        assert spec["selector"].items() <= labels
        assert {port["targetPort"] for port in spec["ports"]} <= set(ports)
    for rule in RESOURCES["Ingress", "kogpt2"]["spec"]["rules"]:
        for path in rule["http"]["paths"]:
            backend = path["backend"]["service"]
            shown = {port["name"] for port in services[backend["name"]]["ports"]}
            assert backend["port"]["name"] in shown
    for probe in PROBES:
        assert SERVER[f"{probe}Probe"]["httpGet"]["port"] in ports
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
    assert ports == {"http": Settings().port, "management": Settings().management_port}
    account = POD["spec"]["serviceAccountName"]
    assert ("ServiceAccount", account) in RESOURCES
    mounted = {mount["name"] for mount in SERVER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["spec"]["volumes"]}
    (map_,) = KUSTOMIZATION["configMapGenerator"]
    assert SERVER["envFrom"][0]["configMapRef"]["name"] == map_["name"]


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


def test_the_autoscaler_asks_for_a_metric_that_is_served() -> None:
    spec = RESOURCES["HorizontalPodAutoscaler", "kogpt2"]["spec"]
    name = spec["metrics"][0]["pods"]["metric"]["name"]
    served = Metrics().text(STATISTICS, {"시#m1": "시"}, {"시": 0}).decode()
    assert f"# TYPE {name} gauge" in served
    target = spec["scaleTargetRef"]
    assert (target["kind"], target["name"]) in RESOURCES


def test_the_image_can_write_where_the_pod_lets_it() -> None:
    dockerfile = (REPOSITORY / "Dockerfile.cpu").read_text(encoding="utf-8")
    places = re.search(r"install -d -m 1777 (.*)", dockerfile)
    assert places
    assert {mount["mountPath"] for mount in SERVER["volumeMounts"]} == set(places[1].split())
    uid = re.search(r"useradd .*--uid (\d+)", dockerfile)
    assert uid
    assert POD["spec"]["securityContext"]["runAsUser"] == int(uid[1])
    assert SERVER["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_stop_has_the_time_that_it_may_take() -> None:
    literals = KUSTOMIZATION["configMapGenerator"][0]["literals"]
    settings = dict(literal.split("=", 1) for literal in literals)
    sleep_s = int(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = sleep_s + int(settings["DRAIN_S"]) + 10
    assert POD["spec"]["terminationGracePeriodSeconds"] >= needed
    cache = next(v for v in POD["spec"]["volumes"] if v["name"] == "cache")["emptyDir"]
    assert int(settings["CACHE_MAX_MIB"]) < int(cache["sizeLimit"].removesuffix("Gi")) * 1024
