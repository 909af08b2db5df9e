import pytest
import yaml

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.form import form_params, job_of_form
from airflow_batchinfer.spec_files import load_spec

pytestmark = pytest.mark.airflow_env

TEMPLATE = "{% if text %}{{ text }}{% endif %} {{ '{{ 7*7 }}' }}"
FIELDS = {
    "name": "tickets",
    "input": {"path": "data/t.jsonl", "id_column": "ticket", "carry": ["text"]},
    "prompt": {"template": TEMPLATE, "examples": [{"user": "u", "assistant": "a"}]},
    "model": {"name": "../m", "engine": {"max_model_len": 512}},
    "task": {"type": "choice", "labels": ["a", "b"]},
    "checkpoint": {"rows": 32},
    "store": "runs",
}


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(FIELDS))
    return path


@pytest.fixture
def values(spec_file):
    return {name: param.value for name, param in form_params(spec_file).items()}


def test_the_untouched_form_gives_the_files_own_job(spec_file, values):
    assert job_of_form(spec_file.parent)(values) == load_spec(spec_file)


def test_every_param_has_title_section_description_and_a_valid_default(spec_file):
    for name, param in form_params(spec_file).items():
        param.resolve()
        assert param.schema["title"], name
        assert param.schema["section"], name
        assert param.schema["description_md"], name


def test_bounds_and_choices_come_from_the_spec(spec_file):
    params = form_params(spec_file)
    assert params["format"].schema["enum"] == ["auto", "parquet", "jsonl", "csv", "delta"]
    assert params["overlong"].schema["enum"] == ["reject", "truncate", "split"]
    assert params["temperature"].schema["maximum"] == 2.0
    assert params["max_tokens"].schema["minimum"] == 1
    assert params["template"].schema["format"] == "multiline"


def test_what_the_form_has_no_field_for_stands_in_the_advanced_box(values):
    assert yaml.safe_load(values["advanced"]) == {
        "prompt": {"examples": [{"user": "u", "assistant": "a"}]},
        "checkpoint": {"rows": 32},
    }


def test_advanced_fields_are_merged_over_the_form(tmp_path, values):
    build = job_of_form(tmp_path)
    job = build(values | {"advanced": "model: {engine: {seed: 7}}\nsampling: {top_p: 0.5, max_tokens: 9}"})
    assert job.model.engine == {"max_model_len": 512, "seed": 7}
    assert (job.sampling.top_p, job.sampling.max_tokens) == (0.5, 9)
    assert build(values | {"advanced": "task: {type: regex, pattern: a+}"}).task.pattern == "a+"
    chat = build(values | {"advanced": "prompt: {messages: [{role: user, content: '{{ text }}'}]}"})
    assert chat.prompt.template is None
    emptied = values | {"template": "", "system": "Be kind."}
    chat = build(emptied | {"advanced": "prompt: {messages: [{role: user, content: '{{ text }}'}]}"})
    assert chat.prompt.system is None


def test_a_schema_in_the_box_takes_the_place_of_the_forms(tmp_path, values):
    form = values | {"task": "json", "json_schema": {"properties": {"a": {}}, "required": ["a"]}}
    box = {"advanced": "task: {type: json, schema: {properties: {b: {}}}}"}
    assert job_of_form(tmp_path)(form | box).task.json_schema == {"properties": {"b": {}}}


def test_fields_of_other_kinds_of_answer_are_left_out(tmp_path, values):
    job = job_of_form(tmp_path)(values | {"task": "generate", "pattern": "x+"})
    assert job.task.type == "generate"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advanced": "chekpoint: {rows: 3}"}, "did you mean `checkpoint`"),
        ({"advanced": "- 1"}, "advanced: give fields of the spec"),
        ({"advanced": "a: ["}, "advanced: cannot be read as YAML"),
        ({"advanced": "prompt: nonsense"}, "prompt: "),
        ({"task": "regex"}, r"task\.pattern: Field required"),
        ({"labels": ["only"]}, r"task\.labels"),
        ({"name": ""}, "name: Field required"),
    ],
)
def test_errors_name_the_field(tmp_path, values, change, message):
    with pytest.raises(SpecError, match=message):
        job_of_form(tmp_path)(values | change)


def test_a_spec_with_the_least_fields_fills_a_form_that_can_be_sent(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: least\ninput: {path: a.csv}\nprompt: {template: '{{ a }}'}\nmodel: {name: m}\n",
        encoding="utf-8",
    )
    values = {name: param.resolve() for name, param in form_params(file).items()}
    spec = job_of_form(tmp_path)({**values, "store": str(tmp_path)})
    assert spec == load_spec(file, str(tmp_path))
