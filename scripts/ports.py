"""A port for a server that takes no port 0."""

from __future__ import annotations

import contextlib
import secrets
import socket


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on.

    It is below those that Linux gives to clients (32768 and more), so no connection takes it before the
    server listens; and it is drawn, so that two who ask at once hardly ever get the same.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)  # `random` may be seeded, as hypothesis does
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
