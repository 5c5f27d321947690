"""Explains boto3's errors in one sentence."""

from __future__ import annotations

HINTS = {
    "ExpiredToken": "your AWS session has expired: log in again",
    "ExpiredTokenException": "your AWS session has expired: log in again",
    "InvalidClientTokenId": "AWS does not know these credentials: see `aws configure`",
    "UnrecognizedClientException": "AWS does not know these credentials: see `aws configure`",
}


def explain(error: Exception) -> str | None:
    """Return one sentence for an error of boto3, None for any other error."""
    from boto3 import exceptions as boto3_errors
    from botocore import exceptions as errors
    from botocore.parsers import ResponseParserError

    if isinstance(error, errors.ClientError):
        details = error.response.get("Error", {})
        code = details.get("Code", "Unknown")
        message = f"{error.operation_name}: {code}: {details.get('Message', '')}"
        text = f"{HINTS[code]} ({message})" if code in HINTS else message
    elif isinstance(error, errors.NoCredentialsError):
        text = "no AWS credentials: run `aws configure`, or give --profile"
    elif isinstance(error, errors.EndpointConnectionError):
        text = f"{error} Is --region right, and is there a network?"
    elif isinstance(error, ResponseParserError):
        text = "the answer is not AWS's: is there a proxy, or a wrong AWS_ENDPOINT_URL?"
    elif isinstance(error, errors.BotoCoreError | boto3_errors.Boto3Error):
        text = str(error)
    else:
        return None
    return " ".join(text.split())
