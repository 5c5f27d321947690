"""Hides the server's secrets from its child processes and from models' own scripts."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from common.settings import comma_separated

PR_SET_DUMPABLE = 4

# The environment variables that the engine and workers inherit. It is a list of allowed names,
# because a password can have any name. docs/operate/security.md lists these for users.
PASSED = (
    # the system's
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TERM", "TZ", "LANG", "LANGUAGE",
    "LC_*", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "GLIBC_TUNABLES",
    # Python's and Java's
    "PYTHON*", "VIRTUAL_ENV", "PIP_*", "JAVA_*", "JDK_JAVA_OPTIONS",
    # the network's
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY",
    "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy",
    "AWS_REGION", "AWS_DEFAULT_REGION",
    # what computes
    "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "CUDA_*", "CUBLAS_*", "CUDNN_*",
    "NVIDIA_*", "NCCL_*", "MXNET_*", "DMLC_*", "ORT_*", "TORCH_*", "PYTORCH_*", "TRANSFORMERS_*",
    "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_*",
    # the platform's and our own
    "SAGEMAKER_*", "SM_*", "MMS_*", "ENGINE_*", "SCRIPT_*", "ALLOW_MODEL_REQUIREMENTS",
    "REQUEST_TIMEOUT_S", "LOAD_TIMEOUT_S",
)  # fmt: skip
SECRET_WORDS = frozenset(
    ("TOKEN", "SECRET", "KEY", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS")
)
USER_INFO = re.compile(r"://[^/?#\s]*@")  # https://user:password@host


def passed(environment: Mapping[str, str], more: str = "") -> dict[str, str]:
    """Filter the environment for the engine, for workers and for models' scripts.

    more: further names, separated by commas, or patterns such as `MY_*`
    Variables that look like secrets are removed: names with TOKEN, PASSWORD or another of
    SECRET_WORDS, and URLs with a user or a password. A full name in `more` overrides this.
    """
    named = comma_separated(more)
    patterns = (*PASSED, *named)
    return {
        name: value
        for name, value in environment.items()
        if name in named
        or (any(fnmatchcase(name, p) for p in patterns) and not _is_secret(name, value))
    }


def _is_secret(name: str, value: str) -> bool:
    return not SECRET_WORDS.isdisjoint(name.upper().split("_")) or bool(USER_INFO.search(value))


def close_to_others() -> None:
    """Make this process's memory and environment unreadable to other processes of its user.

    Otherwise they could read `/proc/<pid>/environ`. The protection ends when this process executes
    another program, and root is not affected by it.
    """
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
