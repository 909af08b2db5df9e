import importlib
import json
from importlib.metadata import entry_points
from pathlib import Path

import jsonschema
import pytest

pytestmark = pytest.mark.airflow_env


@pytest.fixture(scope="module")
def info():
    entries = entry_points(group="apache_airflow_provider")
    (entry,) = (e for e in entries if e.dist.name == "airflow-provider-batchinfer")
    return entry.load()()


def test_fits_airflows_schema(info):
    import airflow

    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(info, schema)
    assert info["package-name"] == "airflow-provider-batchinfer"


def test_every_module_it_names_is_there(info):
    for integration in [*info["operators"], *info["triggers"]]:
        for module in integration["python-modules"]:
            importlib.import_module(module)


def test_every_link_it_names_is_an_operators(info):
    from airflow_batchinfer.operators.report import ReportOperator
    from airflow_batchinfer.operators.validate import ValidateOperator

    links = [*ValidateOperator.operator_extra_links, *ReportOperator.operator_extra_links]
    assert {f"{type(link).__module__}.{type(link).__name__}" for link in links} == set(info["extra-links"])


def test_pages_are_linked_where_a_browser_can_open_them(monkeypatch, tmp_path):
    from airflow_batchinfer.operators.links import page_address
    from airflow_batchinfer.store import LocalStore, open_store

    local, bucket = LocalStore(tmp_path), open_store("s3://bucket/prefix", {})
    assert page_address(local, "job/page.html") == f"file://{tmp_path}/job/page.html"
    assert page_address(bucket, "job/page.html") == "s3://bucket/prefix/job/page.html"
    monkeypatch.setenv("AIRFLOW__BATCHINFER__STORE_URL", "https://files.example.com/b/")
    assert page_address(bucket, "job/page.html") == "https://files.example.com/b/job/page.html"


def test_its_settings_are_read_by_the_operators(info, monkeypatch):
    from airflow_batchinfer.operators.job import CONFIG_SECTION, configured_store

    assert set(info["config"][CONFIG_SECTION]["options"]) == {"worker_python", "store", "store_url"}
    monkeypatch.setenv("AIRFLOW__BATCHINFER__STORE", "s3://bucket/prefix")
    assert configured_store() == "s3://bucket/prefix"
    monkeypatch.delenv("AIRFLOW__BATCHINFER__STORE")
    assert configured_store() is None


def test_airflows_own_limit_on_mapped_tasks_is_kept(monkeypatch):
    """A longer list fails split (fact A6)."""
    from airflow_batchinfer.operators.bundle import max_mapped_tasks

    assert max_mapped_tasks() == 1024
    monkeypatch.setenv("AIRFLOW__CORE__MAX_MAP_LENGTH", "100")
    assert max_mapped_tasks() == 100
    monkeypatch.setenv("AIRFLOW__CORE__MAX_MAP_LENGTH", "5000")
    assert max_mapped_tasks() == 1024
