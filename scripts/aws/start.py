"""Runs a command: reads its options, goes over to .venv's Python, says errors in one sentence."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path

from scripts.lib.documents import Problem

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("boto3", "tqdm")
HINTS = {
    "ExpiredToken": "your AWS session has expired: log in again",
    "ExpiredTokenException": "your AWS session has expired: log in again",
    "InvalidClientTokenId": "AWS does not know these credentials: see `aws configure`",
    "UnrecognizedClientException": "AWS does not know these credentials: see `aws configure`",
}


def use_project_environment() -> None:
    """Starts again with .venv's Python where this one lacks boto3."""
    if all(map(importlib.util.find_spec, NEEDED)):
        return
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists() or Path(sys.prefix) == python.parent.parent:
        raise Problem("boto3 is missing: run ./scripts/test or ./scripts/serve once first")
    os.execv(python, [str(python), *sys.argv])  # noqa: S606


def explain(error: Exception) -> str | None:
    """One sentence for an error of boto3, None for any other."""
    from boto3 import exceptions as boto3_errors  # type: ignore[import-untyped]
    from botocore import exceptions as errors  # type: ignore[import-untyped]
    from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]

    if isinstance(error, errors.ClientError):
        found = error.response.get("Error", {})
        code = found.get("Code", "Unknown")
        said = f"{error.operation_name}: {code}: {found.get('Message', '')}"
        text = f"{HINTS[code]} ({said})" if code in HINTS else said
    elif isinstance(error, errors.NoCredentialsError):
        text = "no AWS credentials: run `aws configure`, or give --profile"
    elif isinstance(error, errors.EndpointConnectionError):
        text = f"{error} Is --region right, and is there a network?"
    elif isinstance(error, ResponseParserError):
        text = "what answered was not AWS: a proxy, or a wrong AWS_ENDPOINT_URL?"
    elif isinstance(error, errors.BotoCoreError | boto3_errors.Boto3Error):
        text = str(error)
    else:
        return None
    return " ".join(text.split())


def main(command: str, argv: list[str] | None = None) -> int:
    """0: done; 1: AWS or another program refused; 2: wrong input; 130: interrupted."""
    module = importlib.import_module(f"scripts.aws.{command}")
    args = module.parse(argv)
    name = re.sub("_", "-", command)
    try:
        use_project_environment()
        module.run(args)
    except Problem as problem:
        print(f"{name}: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted; the same command again goes on from here", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        text = explain(error)
        if text is None:
            raise
        print(f"{name}: {text}", file=sys.stderr)
        return 1
    return 0
