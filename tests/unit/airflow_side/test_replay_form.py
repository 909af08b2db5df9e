"""The form of a replay, as `prepare_replay` reads it."""

from types import SimpleNamespace

import pytest

from airflow_batchinfer.errors import InputError, SpecError

pytestmark = pytest.mark.airflow_env


def prepare(store, conf):
    """Run the task with the params that Airflow makes of a run's conf."""
    from airflow.sdk.definitions.param import process_params

    from airflow_batchinfer.dag import replay_dead_letters

    dag = replay_dead_letters(store=str(store))
    task = dag.get_task("prepare_replay")
    params = process_params(dag, task, conf, suppress_exception=False)
    return task.execute({"dag": dag, "params": params, "dag_run": SimpleNamespace(conf=conf), "run_id": "r"})


@pytest.mark.parametrize(
    ("conf", "meant"), [({"reason": ["over_long"]}, "reasons"), ({"max_token": 900}, "max_tokens")]
)
def test_a_mistyped_key_does_not_run_all_letters_unchanged(tmp_path, conf, meant):
    """Airflow puts keys that are no params among the params."""
    with pytest.raises(SpecError, match=f"unknown key `{next(iter(conf))}`; did you mean `{meant}`"):
        prepare(tmp_path, {"job": "tickets"} | conf)
    with pytest.raises(InputError, match="no published run"):
        prepare(tmp_path, {"job": "tickets", meant: next(iter(conf.values()))})


def test_the_box_is_merged_over_the_form():
    from airflow_batchinfer.operators.replay import overrides_of

    params = {"engine": {"max_model_len": 8192}, "max_tokens": 9, "template": "{{ text }}"}
    box = """
        model: {engine: {seed: 7}, revision: main}
        sampling: {max_tokens: 90}
        prompt: {messages: [{role: user, content: "{{ text }}"}]}
    """
    assert overrides_of(params | {"overrides": box}) == {
        "model": {"engine": {"max_model_len": 8192, "seed": 7}, "revision": "main"},
        "sampling": {"max_tokens": 90},
        "prompt": {"messages": [{"role": "user", "content": "{{ text }}"}]},
    }
