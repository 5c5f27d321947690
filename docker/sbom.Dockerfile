# What an image holds, written to /sbom/sbom.json; `scripts/build ... --sbom FILE` takes it from there.
ARG IMAGE
FROM $IMAGE
USER root
WORKDIR /sbom
COPY requirements/sbom.txt pyproject.toml docker/sbom.py ./
RUN python -m venv venv \
 && venv/bin/pip install -q --no-cache-dir --require-hashes -r sbom.txt \
 && ./sbom.py >sbom.json
