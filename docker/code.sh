#!/bin/sh
# Makes /opt/kogpt2 what an image has, of the files that .dockerignore lets through: our code,
# compiled, and readable by any --user whatever the umask of the checkout.
set -eu

cd /opt/kogpt2
mkdir bin
mv docker/dockerd-entrypoint.py docker/healthcheck bin/
mv docker/sitecustomize.py .
/opt/venv/bin/python -c 'import setuptools; setuptools.setup()' -q build_ext --inplace
PYTHONPATH=$(echo /opt/mxnet/lib/python3.*/site-packages) scripts/mxnet_operator /opt/venv/bin/python
rm -r build docker pyproject.toml requirements scripts
python -m compileall -q .
chmod -R a+rX,go-w .
chmod a+x bin/*
