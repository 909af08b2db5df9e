"""Epochs: names of attempts that sort by start time and never repeat."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime

EPOCH_PATTERN = re.compile(r"\d{8}T\d{9}Z-[0-9a-f]{8}")


def new_epoch() -> str:
    """For instance `20261129T170501123Z-9f3a01bc`: UTC to the millisecond, then 32 random bits.

    Order matters only for choosing one commit of several complete ones, so a skewed clock changes
    which is chosen, never whether the choice is right.
    """
    now = datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}Z-{secrets.token_hex(4)}"
