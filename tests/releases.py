"""Documents as another release of this package would have left them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from airflow_batchinfer.store import Store

OTHER = "9.9.9"
"""A release that is not this one."""


def rewrite_as_other_release(store: Store, key: str, **fields: Any) -> None:
    """Write a document anew, with fields that only the other release has, and its own seal."""
    content = json.loads(store.read_bytes(key))
    del content["sha256"], content["written_by"]
    content |= {**fields, "written_by": OTHER}
    body = (json.dumps(content, indent=1) + "\n").encode()
    seal = f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'
    store.write_bytes(key, body.removesuffix(b"\n}\n") + seal.encode())
