"""What boto3 raised, as a `StoreError` that names bucket, key, operation and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import botocore.exceptions as boto
import urllib3
from boto3.exceptions import Boto3Error

from airflow_batchinfer.errors import StoreError

NOT_FOUND_CODES = frozenset({"NoSuchKey", "404", "NotFound"})
"""Codes of an answer that the object is not there; `404` is all that a HEAD request tells."""

_NEEDED_ACTIONS = (
    "s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload on the objects and s3:ListBucket, "
    "s3:ListBucketMultipartUploads on the bucket (without s3:ListBucket a missing object reads as denied)"
)
_NO_CREDENTIALS = (
    "there are no credentials: in Airflow, name an AWS connection (`store_conn_id`); give a worker's pod an "
    "identity, or a secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; on the command line, set these "
    "two or AWS_PROFILE"
)
_BAD_CREDENTIALS = "the credentials are not valid here (wrong, expired, or of another endpoint): renew them"
_THROTTLED = (
    "the server went on throttling through all retries: lower `sharding.max_parallel_shards`, raise "
    "`checkpoint.rows` and `checkpoint.seconds`, or ask for a higher request rate"
)
_REMEDIES = {
    "NoSuchBucket": "there is no such bucket: create it, or correct `store` and `endpoint_url`",
    "AccessDenied": f"access is denied: allow {_NEEDED_ACTIONS}",
    "403": f"access is denied, or the credentials are wrong: allow {_NEEDED_ACTIONS}",
    "AllAccessDisabled": "the bucket's owner has disabled all access to it",
    "InvalidAccessKeyId": _BAD_CREDENTIALS,
    "SignatureDoesNotMatch": _BAD_CREDENTIALS,
    "ExpiredToken": _BAD_CREDENTIALS,
    "ExpiredTokenException": _BAD_CREDENTIALS,
    "InvalidToken": _BAD_CREDENTIALS,
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it by NTP",
    "SlowDown": _THROTTLED,
    "Throttling": _THROTTLED,
    "ThrottlingException": _THROTTLED,
    "TooManyRequests": _THROTTLED,
    "TooManyRequestsException": _THROTTLED,
    "RequestLimitExceeded": _THROTTLED,
    "429": _THROTTLED,
    "PermanentRedirect": "the bucket lives in another region: set the storage option `region`",
    "301": "the bucket lives in another region: set the storage option `region`",
    "IllegalLocationConstraintException": "the bucket lives in another region: set the option `region`",
    "KMS.NotFoundException": "the KMS key of `sse` does not exist in this region",
    "KMS.DisabledException": "the KMS key of `sse` is disabled",
    "NoSuchUpload": "the upload was aborted meanwhile; another attempt starts it anew",
}


def code_of(error: boto.ClientError) -> str:
    """The server's error code; the HTTP status as text where it sent none."""
    code = error.response.get("Error", {}).get("Code")
    return code or str(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))


def explain(error: Exception) -> str:
    """What is wrong and what to do, without anything secret: no headers, no request, no key ids."""
    if isinstance(error, boto.ClientError):
        code = code_of(error)
        said = f"{code}: {error.response.get('Error', {}).get('Message') or 'no message'}"
        remedy = _REMEDIES.get(code)
        if remedy is None and code.startswith("5"):
            remedy = "the server failed through all retries: try again later"
        return f"{said} ({remedy})" if remedy else said
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return _NO_CREDENTIALS
    if isinstance(error, (boto.CredentialRetrievalError, boto.TokenRetrievalError)):
        return f"the credentials could not be fetched: {error}"
    if isinstance(error, boto.ProfileNotFound):
        return f"{error}: correct AWS_PROFILE or the profile file"
    if isinstance(error, boto.SSLError):
        return f"{error} (if the server has a certificate of its own, name its CA file in AWS_CA_BUNDLE)"
    if isinstance(error, (boto.HTTPClientError, boto.ConnectionError)):
        return f"{error} (is the server up, `endpoint_url` right, and no network policy in the way?)"
    return str(error)


@contextmanager
def store_errors(operation: str, uri: str) -> Iterator[None]:
    """Turn what boto3 raises inside into an error that names operation and object.

    Raises:
        FileNotFoundError: the server says that the object is not there.
        StoreError: anything else.
    """
    try:
        yield
    except boto.ClientError as error:
        if code_of(error) in NOT_FOUND_CODES:
            raise FileNotFoundError(f"{uri} does not exist") from error
        raise StoreError(f"cannot {operation} {uri}: {explain(error)}") from error
    except (boto.BotoCoreError, Boto3Error) as error:
        raise StoreError(f"cannot {operation} {uri}: {explain(error)}") from error
    except urllib3.exceptions.HTTPError as error:  # raised past botocore while it reads an answer
        raise StoreError(f"cannot {operation} {uri}: the server's answer broke off: {error}") from error
