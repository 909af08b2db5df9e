import pytest
import yaml

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.spec_files import load_spec

pytestmark = pytest.mark.airflow_env

FIELDS = {
    "name": "job",
    "input": {"path": ["data/a.jsonl", "/abs/b.jsonl", "s3://bucket/c"]},
    "prompt": {"template": "{{ text }}"},
    "model": {"name": "org/name", "adapter": "../adapters/a"},
    "validation": {"suite": "suite.json"},
    "export": [{"format": "csv", "path": "out/{run_id}.csv"}],
    "store": "runs",
}


def write(folder, **changes):
    folder.mkdir(exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (FIELDS | changes).items() if v is not None}))
    return path


def test_relative_paths_start_at_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    here = tmp_path / "jobs"
    spec = load_spec(write(here))
    assert spec.input.paths == [str(here / "data/a.jsonl"), "/abs/b.jsonl", "s3://bucket/c"]
    assert (spec.model.name, spec.model.adapter) == ("org/name", str(tmp_path / "adapters/a"))
    assert spec.validation.suite == str(here / "suite.json")
    assert spec.export[0].path == str(here / "out/{run_id}.csv")
    assert spec.store == str(here / "runs")


@pytest.mark.parametrize(
    ("own", "default", "expected"),
    [
        ("runs", "/big/store", "/big/store/runs"),
        ("runs", "s3://bucket/prefix/", "s3://bucket/prefix/runs"),
        (None, "/big/store", "/big/store"),
        ("/own", "/big/store", "/own"),
        ("s3://own/x", "/big/store", "s3://own/x"),
    ],
)
def test_store_and_the_configured_one(tmp_path, own, default, expected):
    assert load_spec(write(tmp_path, store=own), default).store == expected


def test_no_store_at_all_is_an_error_that_names_file_and_field(tmp_path):
    path = write(tmp_path, store=None)
    with pytest.raises(SpecError, match="store: Field required") as caught:
        load_spec(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("text", ["- 1", "a: [", "just text"])
def test_not_a_mapping(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"x\.yaml: "):
        load_spec(path)
