"""What boto3 raises, as one sentence for people."""

from __future__ import annotations

HINTS = {
    "ExpiredToken": "your AWS session has expired: log in again",
    "ExpiredTokenException": "your AWS session has expired: log in again",
    "InvalidClientTokenId": "AWS does not know these credentials: see `aws configure`",
    "UnrecognizedClientException": "AWS does not know these credentials: see `aws configure`",
}


def explain(error: Exception) -> str | None:
    """One sentence for an error of boto3, None for any other."""
    from boto3 import exceptions as boto3_errors
    from botocore import exceptions as errors
    from botocore.parsers import ResponseParserError

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
