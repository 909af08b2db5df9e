"""`S3Options`: what a user may say of an S3 store. Never credentials: those come from boto3's chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Self
from urllib.parse import urlsplit

from airflow_batchinfer.errors import SpecError

_ADDRESSING_STYLES = ("auto", "path", "virtual")
_SSE_ALGORITHMS = ("AES256", "aws:kms", "aws:kms:dsse")
_SECRET_WORDS = ("key", "secret", "token", "password", "credential")
_CREDENTIALS_REMEDY = (
    "give credentials by the environment, a profile, the pod's identity, or the AWS connection named in "
    "`store_conn_id`"
)


@dataclass(frozen=True, slots=True)
class S3Options:
    """Non-secret settings of an S3 store; an empty text means unset.

    Attributes:
        endpoint_url: server that speaks S3, `http(s)://host[:port]`; unset is boto3's own choice (AWS,
            or `AWS_ENDPOINT_URL_S3`).
        region: region of the bucket; unset is boto3's own choice.
        addressing_style: `path` or `virtual` (bucket in the host name). Unset is `path` with an
            `endpoint_url`, which is what S3-like servers understand, else boto3's own choice.
        sse: server-side encryption of what is written: `AES256`, `aws:kms`, `aws:kms:dsse`, the last two
            optionally with a key, as in `aws:kms/alias/batch`; unset is the bucket's default.
    """

    endpoint_url: str = ""
    region: str = ""
    addressing_style: str = ""
    sse: str = ""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Validate a mapping.

        Raises:
            SpecError: an unknown name, a credential, or a value that cannot be; never shows a secret.
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                secret = any(word in name.lower() for word in _SECRET_WORDS)
                hint = f"; {_CREDENTIALS_REMEDY}" if secret else ""
                raise SpecError(f"unknown storage option `{name}` (allowed: {', '.join(known)}){hint}")
        parsed = cls(**options)
        parsed._check()
        return parsed

    def given(self) -> dict[str, str]:
        """The options that are set, as `parse` takes them."""
        return {name: value for name, value in asdict(self).items() if value}

    def put_arguments(self) -> dict[str, str]:
        """S3's request parameters for `sse`."""
        if not self.sse:
            return {}
        algorithm, _, kms_key = self.sse.partition("/")
        return {"ServerSideEncryption": algorithm} | ({"SSEKMSKeyId": kms_key} if kms_key else {})

    def _check(self) -> None:
        if self.endpoint_url:
            url = urlsplit(self.endpoint_url)
            if url.username or url.password:
                raise SpecError(f"`endpoint_url` holds a user or a password; {_CREDENTIALS_REMEDY}")
            if url.scheme not in ("http", "https") or not url.hostname:
                raise SpecError(f"`endpoint_url` must be http(s)://host[:port] (got {self.endpoint_url!r})")
        if self.addressing_style and self.addressing_style not in _ADDRESSING_STYLES:
            raise SpecError(
                f"`addressing_style` must be one of {', '.join(_ADDRESSING_STYLES)} "
                f"(got {self.addressing_style!r})"
            )
        algorithm, _, kms_key = self.sse.partition("/")
        if self.sse and (algorithm not in _SSE_ALGORITHMS or (kms_key and algorithm == "AES256")):
            raise SpecError(
                f"`sse` must be one of {', '.join(_SSE_ALGORITHMS)}, the last two optionally with `/KEY` "
                f"(got {self.sse!r})"
            )
