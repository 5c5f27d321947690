#!/sbom/venv/bin/python
"""Prints the software bill of materials of an image as CycloneDX JSON.

It lists Python's distributions (by cyclonedx-py), Debian's packages and the Java runtime.
"""

import json
import subprocess
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL


def component(name: str, version: str, purl: PackageURL) -> dict[str, str]:
    component = {"type": "library", "name": name, "version": version, "purl": str(purl)}
    return {**component, "bom-ref": str(purl)}


def printed(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def variables(file: str) -> dict[str, str]:
    """Return the variables of a file of NAME="value" lines."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}


def main() -> None:
    options = ["--sv", "1.6", "--output-reproducible", "--pyproject", "/sbom/pyproject.toml"]
    bom = json.loads(
        printed("/sbom/venv/bin/cyclonedx-py", "environment", *options, "/opt/venv/bin/python")
    )
    release = variables("/etc/os-release")
    packages = printed("dpkg-query", "-Wf", "${Package} ${Version} ${Architecture}\n")
    for line in packages.splitlines():
        name, version, architecture = line.split()
        known = {"arch": architecture, "distro": f"{release['ID']}-{release['VERSION_ID']}"}
        purl = PackageURL("deb", release["ID"], name, version, known)
        bom["components"].append(component(name, version, purl))
    java = variables("/opt/java/release")["JAVA_VERSION"]
    bom["components"].append(
        component("openjdk", java, PackageURL("generic", None, "openjdk", java))
    )
    text = json.dumps(bom, indent=1, ensure_ascii=False)
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong:
        raise SystemExit(str(wrong))
    print(text)


main()
