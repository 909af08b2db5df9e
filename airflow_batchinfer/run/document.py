"""Small JSON documents in the store: read with a clear error, written atomically."""

from __future__ import annotations

import hashlib
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.store import Store


class Document(BaseModel):
    """Base of plan, commit, progress, ledger and the rest: frozen, nothing unknown in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_bytes(self) -> bytes:
        """Indented JSON, UTF-8."""
        return (self.model_dump_json(indent=1, by_alias=True) + "\n").encode()

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
            CorruptError: it is not JSON of this document, naming the object.
        """
        try:
            return cls.model_validate_json(store.read_bytes(key))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "document"
            raise CorruptError(f"{store.uri_of(key)} is damaged: {where}: {first['msg']}") from error
