"""The real kubectl composes deploy; objects fit published schemas, and names lead to objects."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import published, volumes
from tests.deploy.published import ELSEWHERE, GROUPS, KSERVE, Document, group
from tests.e2e.server import REPOSITORY

pytestmark = pytest.mark.slow

DEPLOY = REPOSITORY / "deploy"
COMPONENTS = sorted(path.name for path in (DEPLOY / "kubernetes" / "components").iterdir())
WAYS_IN = ("envoy-gateway", "haproxy-ingress")
PLAIN = ["kubernetes/base", *(f"kubernetes/{way}" for way in WAYS_IN), "kubernetes/example"]
OF_OTHERS = ["kserve", "seldon"]
WITH_COMPONENT = [
    f"{way} {component}"
    for way in WAYS_IN
    for component in COMPONENTS
    if not component.startswith("envoy-") or way == "envoy-gateway"
]
EVERYTHING = "example with everything"
ALL = [*PLAIN, *OF_OTHERS, *WITH_COMPONENT, EVERYTHING]
EDITS = {  # what a person writes in the example's three lines
    "image": "registry.local/poems/kogpt2",
    "store": "MODEL_STORE=s3://b/모델/",
    "host": "poems.example.com",
}


def kustomization(**fields: Any) -> str:
    return yaml.safe_dump({"apiVersion": "kustomize.config.k8s.io/v1beta1", **fields})


def edited(text: str) -> str:
    """The example's, with the three lines edited and all components that it leaves out."""
    for what, value in EDITS.items():
        text, count = re.subn(rf"\S+  # <- the {what}$", value, text, flags=re.MULTILINE)
        assert count == 1
    assert "<- the" not in text
    return text.replace("  # - ../components", "  - ../components")


@pytest.fixture(scope="module")
def modules() -> Path:
    return published.modules()


@pytest.fixture(scope="module")
def composed(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Document]]:
    """The objects of each; kubectl has nothing to warn of."""
    root = tmp_path_factory.mktemp("composed")
    program = published.kubectl(modules, root)
    shutil.copytree(DEPLOY, root / "deploy")
    folders = {name: root / "deploy" / name for name in [*PLAIN, *OF_OTHERS]}
    for name in OF_OTHERS:
        files = sorted(path.name for path in folders[name].glob("*.yaml"))
        (folders[name] / "kustomization.yaml").write_text(kustomization(resources=files), "utf-8")
    for name in WITH_COMPONENT:
        way, component = name.split()
        folders[name] = root / "deploy" / "kubernetes" / name.replace(" ", "-")
        folders[name].mkdir()
        (folders[name] / "kustomization.yaml").write_text(
            kustomization(resources=[f"../{way}"], components=[f"../components/{component}"])
        )
    folders[EVERYTHING] = root / "deploy" / "kubernetes" / "everything"
    shutil.copytree(folders["kubernetes/example"], folders[EVERYTHING])
    file = folders[EVERYTHING] / "kustomization.yaml"
    file.write_text(edited(file.read_text("utf-8")), "utf-8")

    found = {}
    for name, folder in folders.items():
        done = subprocess.run(
            [program, "kustomize", folder], capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr.decode()) == (0, ""), name
        found[name] = list(yaml.load_all(done.stdout, yaml.CSafeLoader))
    return found


def of(composed: dict[str, list[Document]], groups: Any) -> list[Document]:
    """Return the manifests of some groups, each once."""
    every = [document for documents in composed.values() for document in documents]
    unique = {json.dumps(document): document for document in every if group(document) in groups}
    return list(unique.values())


def by_name(documents: list[Document]) -> dict[tuple[str, str], Document]:
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


@pytest.mark.parametrize("name", ALL)
def test_what_kubectl_composes_fits_the_schemas_of_kubernetes(
    name: str, composed: dict[str, list[Document]]
) -> None:
    own = [d for d in composed[name] if group(d) not in {*GROUPS, KSERVE, *ELSEWHERE}]
    assert [error for document in own for error in published.kubernetes_errors(document)] == []


def test_kinds_of_the_gateway_api_keda_and_prometheus_operator_fit_their_sources(
    composed: dict[str, list[Document]], modules: Path, tmp_path: Path
) -> None:
    found = of(composed, GROUPS)
    kinds = {"GatewayClass", "Gateway", "HTTPRoute", "ScaledObject", "ServiceMonitor"}
    assert {document["kind"] for document in found} == kinds
    assert published.model_errors(found, modules, tmp_path) == []


def broken(document: Document, path: str, value: Any) -> Document:
    """Return a copy with one value set; the path begins below `spec`."""
    wrong = copy.deepcopy(document)
    *folders, name = path.split(".")
    place = wrong["spec"]
    for folder in folders:
        place = place[int(folder) if folder.isdigit() else folder]
    place[name] = value
    return wrong


def test_a_wrong_object_is_noticed(
    composed: dict[str, list[Document]], modules: Path, tmp_path: Path
) -> None:
    own = by_name(composed[EVERYTHING])
    misspelt = broken(own["StatefulSet", "kogpt2"], "template.spec.securityContexts", {})
    assert len(published.kubernetes_errors(misspelt)) == len(published.VERSIONS)
    route = by_name(composed["kubernetes/envoy-gateway"])["HTTPRoute", "kogpt2"]
    scaled = own["ScaledObject", "kogpt2"]
    wrong = [
        broken(route, "rules.0.backendRefs.0.prot", 8080),
        broken(route, "hostnames", ["시.example.com"]),
        broken(scaled, "fallback.behavior", "whatever"),
        broken(scaled, "minReplicaCount", "2"),
        broken(own["ServiceMonitor", "kogpt2"], "endpoints.0.interval", "soon"),
    ]
    errors = "\n".join(published.model_errors(wrong, modules, tmp_path))
    for said in ('"prot"', "hostnames", '"whatever"', "minReplicaCount", "interval"):
        assert said in errors


def test_kinds_of_kserve_fit_its_models_and_a_wrong_object_is_noticed(
    composed: dict[str, list[Document]],
) -> None:
    found = of(composed, [KSERVE])
    assert {document["kind"] for document in found} == {"InferenceService", "ServingRuntime"}
    service = by_name(composed["kserve"])["InferenceService", "kogpt2"]
    wrong = {
        "minReplica: unknown": broken(service, "predictor.minReplica", 1),
        "env: a list": broken(service, "predictor.model.env", {"MODEL_STORE": "s3://b/시/"}),
        "runAsUser: int": broken(service, "predictor.securityContext.runAsUser", "kogpt2"),
        "`model_format`": broken(service, "predictor.model", {"runtime": "kogpt2"}),
    }
    errors = published.kserve_errors([*found, *wrong.values()])
    assert errors[: len(found)] == [[]] * len(found)
    for part, of_one in zip(wrong, errors[len(found) :], strict=True):
        assert part in "\n".join(of_one)


def test_the_example_is_three_lines_away_from_a_fleet_of_ones_own(
    composed: dict[str, list[Document]],
) -> None:
    found = by_name(composed[EVERYTHING])
    (settings,) = (d["data"] for (kind, _), d in found.items() if kind == "ConfigMap")
    assert settings["MODEL_STORE"] == "s3://b/모델/"
    assert settings["DRAIN_S"] == "25"
    pod = found["StatefulSet", "kogpt2"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.local/poems/kogpt2:cpu"
    (rule,) = found["Ingress", "kogpt2"]["spec"]["rules"]
    assert rule["host"] == "poems.example.com"
    everywhere = {kind for (kind, _), d in found.items() if "namespace" not in d["metadata"]}
    assert everywhere == {"Namespace", "PriorityClass"}


@pytest.mark.parametrize("name", [*PLAIN, *WITH_COMPONENT, EVERYTHING])
def test_names_lead_to_objects(name: str, composed: dict[str, list[Document]]) -> None:
    found = by_name(composed[name])
    (owner,) = (d for (kind, _), d in found.items() if kind in ("Deployment", "StatefulSet"))
    pod = owner["spec"]["template"]["spec"]
    server = pod["containers"][0]
    assert ("ServiceAccount", pod["serviceAccountName"]) in found
    assert ("ConfigMap", server["envFrom"][0]["configMapRef"]["name"]) in found
    assert "priorityClassName" not in pod or ("PriorityClass", pod["priorityClassName"]) in found
    (scaler,) = (d for d in composed[name] if "scaleTargetRef" in d.get("spec", {}))
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (owner["kind"], owner["metadata"]["name"])
    claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
    volumes = {volume["name"] for volume in pod["volumes"]} | claims
    assert {mount["name"] for mount in server["volumeMounts"]} == volumes


def servers(documents: list[Document]) -> Iterator[tuple[Document, Document, list[Document]]]:
    """The server's container, its pod and the claims of its volumes."""
    for document in documents:
        spec = document.get("spec", {})
        pod = {
            "Deployment": lambda spec: spec["template"]["spec"],
            "StatefulSet": lambda spec: spec["template"]["spec"],
            "ServingRuntime": lambda spec: spec,
            "ServerConfig": lambda spec: spec["podSpec"],
        }.get(document["kind"], lambda spec: None)(spec)
        if pod is not None:
            (container,) = (c for c in pod["containers"] if "kogpt2" in c["image"])
            yield container, pod, spec.get("volumeClaimTemplates", [])


@pytest.mark.parametrize("name", ALL)
def test_the_limits_of_all_caches_on_a_volume_fit_into_it(
    name: str, composed: dict[str, list[Document]]
) -> None:
    settings = next((d["data"] for d in composed[name] if d["kind"] == "ConfigMap"), {})
    ((container, pod, claims),) = servers(composed[name])
    assert volumes.overfull_of(container, pod, settings, claims) == []
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted & volumes.sizes(pod, claims).keys() >= {"run", "cache"}
