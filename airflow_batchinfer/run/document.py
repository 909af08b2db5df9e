"""Small JSON documents in the store: read with a clear error, written atomically.

A document ends with the SHA-256 of what stands before it, so that a flipped byte is noticed even where
the JSON still fits. One without it, written by hand or by an older release, is taken as it is.
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.store import Store

_END = b"\n}\n"
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')


def _checked_time(text: str) -> str:
    if text and datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


Timestamp = Annotated[str, AfterValidator(_checked_time)]
"""A time with its zone, ISO 8601; empty if it is not known."""


class Document(BaseModel):
    """Base of plan, commit, progress, ledger and the rest: frozen, nothing unknown in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """Indented JSON, UTF-8, with its seal."""
        body = (self.model_dump_json(indent=1, by_alias=True) + "\n").encode()
        seal = f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"'
        return body.removesuffix(_END) + seal.encode() + _END

    def digest(self) -> str:
        """SHA-256 of the stored form, hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def write(self, store: Store, key: str) -> None:
        """Write atomically under `key`."""
        store.write_bytes(key, self.to_bytes())

    @classmethod
    def read(cls, store: Store, key: str) -> Self:
        """Read what `write` wrote.

        Raises:
            FileNotFoundError: there is no such object.
            CorruptError: it is not JSON of this document, or not what was written, naming the object.
        """
        body, seal = _unsealed(store.read_bytes(key))
        try:
            document = cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "document"
            raise CorruptError(f"{store.uri_of(key)} is damaged: {where}: {first['msg']}") from error
        if seal is not None and seal != hashlib.sha256(body).hexdigest():
            raise CorruptError(
                f"{store.uri_of(key)} is damaged: its SHA-256 is not the one it ends with (who changed it by "
                "hand on purpose removes the line `sha256`)"
            )
        return document

    @classmethod
    def find(cls, store: Store, key: str) -> Self | None:
        """The same as `read`; none if there is no such object. Raises `CorruptError`."""
        try:
            return cls.read(store, key)
        except FileNotFoundError:
            return None


def _unsealed(data: bytes) -> tuple[bytes, str | None]:
    """A document's JSON without its seal, and the seal; none if it has none."""
    found = _SEAL.search(data)
    return (data, None) if found is None else (data[: found.start()] + _END, found[1].decode())
