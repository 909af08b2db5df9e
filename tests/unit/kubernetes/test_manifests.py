"""What `docker/` ships to be copied: it parses, and fits the types of Kubernetes' own client."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.airflow_env

DOCKER = Path(__file__).resolve().parents[3] / "docker"
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_manifests_fit_the_clients_types(path: Path) -> None:
    from kubernetes import client

    from tests.kube.server import checked

    manifests = objects(path)
    assert manifests
    for found in manifests:
        assert found["apiVersion"]
        assert found["metadata"]["name"]
        kind = f"V1{found['kind']}"
        if hasattr(client, kind):
            checked(found, kind)


def test_airflows_role_has_what_the_operator_calls_and_no_more() -> None:
    role = next(o for o in objects(DOCKER / "kubernetes" / "airflow-rbac.yaml") if o["kind"] == "Role")

    granted = {(r, v) for rule in role["rules"] for r in rule["resources"] for v in rule["verbs"]}

    pods = {("pods", verb) for verb in ("create", "get", "list", "patch", "delete")}
    assert granted == pods | {("pods/log", "get"), ("events", "list")}


def test_compose_names_what_it_builds_and_defaults_no_password() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]

    dockerfile = services["airflow-api"]["build"]["dockerfile"]
    assert (DOCKER.parent / dockerfile).is_file()
    assert {"postgres", "s3", "airflow-scheduler", "airflow-triggerer"} <= services.keys()
    environment = services["airflow-scheduler"]["environment"]
    assert environment["AWS_ENDPOINT_URL_S3"] == "http://s3:9000"
    assert environment["AWS_SECRET_ACCESS_KEY"] == services["s3"]["environment"]["MINIO_ROOT_PASSWORD"]
    for name in ("POSTGRES_PASSWORD", "S3_PASSWORD", "AIRFLOW_JWT_SECRET", "AIRFLOW_API_SECRET"):
        assert f"${{{name}:?" in text
        assert f"${{{name}:-" not in text


@pytest.mark.parametrize("name", ["worker", "airflow"])
def test_what_dockerfiles_copy_exists(name: str) -> None:
    lines = (DOCKER / f"{name}.Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]

    assert "airflow_batchinfer" in copied
    for source in copied:
        assert source.startswith("--") or (DOCKER.parent / source).exists(), source


def test_the_airflow_image_keeps_its_own_versions(tmp_path: Path) -> None:
    text = (DOCKER / "airflow.Dockerfile").read_text()
    (program,) = re.findall(r"awk -F== '(.*?)' - /src/constraints.txt", text, re.DOTALL)
    lock = tmp_path / "lock.txt"
    lock.write_text("SQLAlchemy==2.1.9\nflask-cors==6.0.5\nduckdb==2.0.0\ntyping_extensions==4.15.0\n")
    image = "sqlalchemy==2.0.44\nFlask-Cors==6.0.1\ntyping-extensions==4.14.0\npip==25.3\n"

    command = ["awk", "-F==", program.replace("\\\n", ""), "-", str(lock)]
    kept = subprocess.run(command, input=image, capture_output=True, text=True, check=True).stdout

    assert kept == "duckdb==2.0.0\n"
