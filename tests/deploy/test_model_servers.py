"""All pods that deploy declares keep to Pod Security's restricted level; those of KServe and Seldon
Core fit the schema of a pod, and the server."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from serving.settings import Settings
from tests.deploy import volumes
from tests.deploy.published import kubernetes_errors
from tests.deploy.test_kubernetes import POD, RESOURCES
from tests.deploy.test_kubernetes import SERVER as OWN
from tests.e2e.server import REPOSITORY


def documents(*path: str) -> dict[str, dict[str, Any]]:
    file = REPOSITORY.joinpath("deploy", *path)
    return {d["kind"]: d for d in yaml.safe_load_all(file.read_text("utf-8"))}


SERVING_RUNTIME = documents("kserve", "serving-runtime.yaml")["ServingRuntime"]
RUNTIME = SERVING_RUNTIME["spec"]
KSERVE = documents("kserve", "inference-service.yaml")
SERVICE = KSERVE["InferenceService"]["spec"]["predictor"]
MODEL = SERVICE["model"]
CONFIG = documents("seldon", "server-config.yaml")["ServerConfig"]["spec"]
SELDON = documents("seldon", "model.yaml")
REPLICAS = ("minReplicas", "maxReplicas", "scale")
PODS = {
    # The runtime's, and what the InferenceService says of it.
    "kserve": {
        "containers": [
            {**container, "env": [*container["env"], *MODEL["env"]]}
            for container in RUNTIME["containers"]
        ],
        "volumes": RUNTIME["volumes"],
        **{k: v for k, v in SERVICE.items() if k != "model" and not k.startswith(REPLICAS)},
    },
    # The operator mounts the claims.
    "seldon": {
        **CONFIG["podSpec"],
        "volumes": [
            *CONFIG["podSpec"]["volumes"],
            *({"name": claim["name"], "emptyDir": {}} for claim in CONFIG["volumeClaimTemplates"]),
        ],
    },
}


def server(pod: str) -> dict[str, Any]:
    return dict(PODS[pod]["containers"][-1])


def settings(pod: str) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in server(pod)["env"]}


@pytest.mark.parametrize("pod", PODS)
def test_the_pod_fits_the_schema(pod: str) -> None:
    resource = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": PODS[pod]}
    assert kubernetes_errors(resource) == []
    mounted = {m["name"] for c in PODS[pod]["containers"] for m in c["volumeMounts"]}
    assert mounted == {volume["name"] for volume in PODS[pod]["volumes"]}


@pytest.mark.parametrize("spec", [POD["spec"], *PODS.values()], ids=["base", *PODS])
def test_a_pod_keeps_to_the_restricted_level(spec: dict[str, Any]) -> None:
    """As in https://kubernetes.io/docs/concepts/security/pod-security-standards."""
    assert {name for name in spec if name.startswith("host")} == set()
    kinds = {kind for volume in spec["volumes"] for kind in volume} - {"name"}
    assert kinds <= {"emptyDir", "configMap"}
    for container in spec["containers"]:
        context = {**spec["securityContext"], **container["securityContext"]}
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["runAsGroup"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("pod", PODS)
def test_the_server_runs_as_in_the_base(pod: str) -> None:
    own = server(pod)
    paths = {mount["mountPath"] for mount in own["volumeMounts"]}
    assert {mount["mountPath"] for mount in OWN["volumeMounts"]} <= paths
    context = {**PODS[pod]["securityContext"], **own["securityContext"]}
    for name in ("runAsUser", "runAsGroup"):
        assert context[name] == POD["spec"]["securityContext"][name]
    assert context["readOnlyRootFilesystem"] is True
    for probe in ("startup", "liveness"):
        said = own[f"{probe}Probe"]["httpGet"]["path"]
        assert said == OWN[f"{probe}Probe"]["httpGet"]["path"]


@pytest.mark.parametrize("pod", PODS)
def test_the_limits_of_all_caches_on_a_volume_fit_into_it(pod: str) -> None:
    assert volumes.overfull_of(server(pod), PODS[pod], {}) == []


def test_kserve_serves_a_store_by_the_runtime() -> None:
    own = server("kserve")
    assert own["ports"] == [{"containerPort": Settings().port, "protocol": "TCP"}]
    assert MODEL["runtime"] == SERVING_RUNTIME["metadata"]["name"]
    assert MODEL["modelFormat"].items() <= RUNTIME["supportedModelFormats"][0].items()
    assert MODEL["protocolVersion"] in RUNTIME["protocolVersions"]
    assert "multiModel" not in RUNTIME
    assert own["env"][-1]["name"] == "MODEL_STORE"
    assert "MODEL_STORE" not in {variable["name"] for variable in RUNTIME["containers"][0]["env"]}
    assert OWN["env"][0] in own["env"]  # the token for management
    assert own["lifecycle"] == OWN["lifecycle"]
    needed = int(own["lifecycle"]["preStop"]["exec"]["command"][1]) + 10
    grace_s = PODS["kserve"]["terminationGracePeriodSeconds"]
    assert grace_s >= needed + int(settings("kserve")["DRAIN_S"])


def test_kserve_has_the_account_and_the_topology_of_the_base() -> None:
    account = KSERVE["ServiceAccount"]
    assert account == RESOURCES["ServiceAccount", "kogpt2"]
    assert SERVICE["serviceAccountName"] == account["metadata"]["name"]
    name = KSERVE["InferenceService"]["metadata"]["name"]
    own = {"matchLabels": {"serving.kserve.io/inferenceservice": name}}
    assert SERVICE["topologySpreadConstraints"] == [
        {**constraint, "labelSelector": own}
        for constraint in POD["spec"]["topologySpreadConstraints"]
    ]


def test_seldons_agent_finds_the_server_where_it_looks() -> None:
    agent = PODS["seldon"]["containers"][1]
    said = {variable["name"]: variable.get("value") for variable in agent["env"]}
    ports = {port["name"]: port["containerPort"] for port in server("seldon")["ports"]}
    assert said["SELDON_SERVER_HTTP_PORT"] == str(ports["server-http"]) == str(Settings().port)
    grpc_port = str(ports["server-grpc"])
    assert said["SELDON_SERVER_GRPC_PORT"] == grpc_port == settings("seldon")["GRPC_PORT"]
    assert settings("seldon")["MODEL_STORE"] == "/mnt/agent/models"
    assert said["SELDON_SERVER_CAPABILITIES"] in SELDON["Model"]["spec"]["requirements"]
    assert SELDON["Server"]["spec"]["serverConfig"] == "kogpt2"
