"""What deploy declares for KServe and Seldon Core fits the schema of a pod, and the server."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from serving.settings import Settings
from tests.deploy.test_kubernetes import POD, VERSIONS
from tests.deploy.test_kubernetes import SERVER as OWN
from tests.e2e.server import REPOSITORY


def documents(*path: str) -> dict[str, dict[str, Any]]:
    file = REPOSITORY.joinpath("deploy", *path)
    return {d["kind"]: d for d in yaml.safe_load_all(file.read_text("utf-8"))}


RUNTIME = documents("kserve", "serving-runtime.yaml")["ServingRuntime"]["spec"]
KSERVE = documents("kserve", "inference-service.yaml")
CONFIG = documents("seldon", "server-config.yaml")["ServerConfig"]["spec"]
SELDON = documents("seldon", "model.yaml")
PODS = {
    "kserve": {name: RUNTIME[name] for name in ("containers", "volumes")},
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


@pytest.mark.parametrize("pod", PODS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_pod_fits_the_schema(pod: str, version: str) -> None:
    resource = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": PODS[pod]}
    kubernetes_validate.validate(resource, version, strict=True)
    mounted = {m["name"] for c in PODS[pod]["containers"] for m in c["volumeMounts"]}
    assert mounted == {volume["name"] for volume in PODS[pod]["volumes"]}


@pytest.mark.parametrize("pod", PODS)
def test_the_server_runs_as_in_the_base(pod: str) -> None:
    own = server(pod)
    paths = {mount["mountPath"] for mount in own["volumeMounts"]}
    assert {mount["mountPath"] for mount in OWN["volumeMounts"]} <= paths
    uid = own["securityContext"].get("runAsUser") or PODS[pod]["securityContext"]["runAsUser"]
    assert uid == POD["spec"]["securityContext"]["runAsUser"]
    both = {**PODS[pod].get("securityContext", {}), **own["securityContext"]}
    assert both["runAsNonRoot"] is True
    assert both["seccompProfile"] == POD["spec"]["securityContext"]["seccompProfile"]
    assert own["securityContext"]["readOnlyRootFilesystem"] is True
    for probe in ("startup", "liveness"):
        said = own[f"{probe}Probe"]["httpGet"]["path"]
        assert said == OWN[f"{probe}Probe"]["httpGet"]["path"]


def test_kserves_agent_finds_the_server_where_it_looks() -> None:
    """It brings models to /mnt/models and calls localhost:8080, with no token."""
    settings = {variable["name"]: variable["value"] for variable in server("kserve")["env"]}
    assert settings["MODEL_STORE"] == "/mnt/models"
    assert server("kserve")["ports"] == [{"containerPort": 8080, "protocol": "TCP"}]
    assert Settings().port == 8080
    assert not {"MANAGEMENT_TOKEN", "INFERENCE_TOKEN"} & set(settings)
    model = KSERVE["InferenceService"]["spec"]["predictor"]["model"]
    trained = KSERVE["TrainedModel"]["spec"]
    formats = {known["name"] for known in RUNTIME["supportedModelFormats"]}
    assert {model["modelFormat"]["name"], trained["model"]["framework"]} <= formats
    assert trained["inferenceService"] == KSERVE["InferenceService"]["metadata"]["name"]
    assert model["protocolVersion"] in RUNTIME["protocolVersions"]


def test_seldons_agent_finds_the_server_where_it_looks() -> None:
    agent = PODS["seldon"]["containers"][1]
    said = {variable["name"]: variable.get("value") for variable in agent["env"]}
    settings = {variable["name"]: variable["value"] for variable in server("seldon")["env"]}
    ports = {port["name"]: port["containerPort"] for port in server("seldon")["ports"]}
    assert said["SELDON_SERVER_HTTP_PORT"] == str(ports["server-http"]) == str(Settings().port)
    assert said["SELDON_SERVER_GRPC_PORT"] == str(ports["server-grpc"]) == settings["GRPC_PORT"]
    assert settings["MODEL_STORE"] == "/mnt/agent/models"
    assert said["SELDON_SERVER_CAPABILITIES"] in SELDON["Model"]["spec"]["requirements"]
    assert SELDON["Server"]["spec"]["serverConfig"] == "kogpt2"
