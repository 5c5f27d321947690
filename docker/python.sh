#!/bin/sh
# Makes /opt/venv while an image is built, from lists of requirements:
# python.sh LIST... [-- PACKAGE...]
#
# Those of the packages behind -- that this processor has go to /opt/mxnet instead, which may be laid
# over /opt/venv.
#
# A CUDA build and the one for CPUs have files of the same names, so the one makes way for the other.
# What no program needs at run time is left out: tests and their data, and the symbols of the
# compiled modules. The libraries that wheels bring in `*.libs` are left as they are, because strip
# can break what auditwheel has patched; so is MXNet's, which has no symbols to lose.
set -eu

python -m venv /build/uv
/build/uv/bin/pip install --no-cache-dir --require-hashes -r /build/uv.txt
uv() {
  VIRTUAL_ENV=/opt/venv UV_NO_CACHE=1 UV_LINK_MODE=copy UV_SYSTEM_CERTS=1 CYTHON_FORCE_REGEN=1 \
    /build/uv/bin/uv "$@"
}
install_list() {
  case $1 in gpu-*) uv pip uninstall "${1#gpu-}" ;; esac
  uv pip install --no-deps --no-build-isolation --require-hashes -r "/build/$1.txt"
}
uv venv /opt/venv
install_list build
while [ $# != 0 ] && [ "$1" != -- ]; do
  install_list "$1"
  shift
done
# Of the kogpt2 command alone, which is not in the image.
uv pip uninstall typer rich markdown-it-py mdurl pygments shellingham annotated-doc safetensors
uv pip check

cd /opt/venv/lib/python3.*/site-packages
find . \( -name tests -o -path ./onnx/backend/test \) -type d -prune -exec rm -rf {} +
find . -name '*.so' -not -path './*.libs/*' -not -path './mxnet/*' -exec strip --strip-unneeded {} +
find . -name __pycache__ -type d -prune -exec rm -rf {} +
/opt/venv/bin/python -m compileall -q .

[ $# = 0 ] || /opt/venv/bin/python - "$@" <<'PYTHON'
import pathlib, sys
from importlib import metadata, util

venv, apart = pathlib.Path("/opt/venv"), pathlib.Path("/opt/mxnet")
there = {found.metadata["Name"] for found in metadata.distributions()}
for name in there.intersection(sys.argv[2:]):
    for file in metadata.files(name):
        path = pathlib.Path(file.locate()).resolve()
        compiled = pathlib.Path(util.cache_from_source(str(path)))
        for one in (path, compiled):
            if one.is_file():
                target = apart / one.relative_to(venv)
                target.parent.mkdir(parents=True, exist_ok=True)
                one.rename(target)
for folder in sorted((f for f in venv.rglob("*") if f.is_dir()), reverse=True):
    if not any(folder.iterdir()):
        folder.rmdir()
PYTHON
[ $# = 0 ] || /opt/venv/bin/python -c 'import importlib.util as u; assert not u.find_spec("mxnet")'
