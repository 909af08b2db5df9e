# The worker beside the GPU: vLLM's official image and this package, nothing of Airflow.
# Build from the repository's root:  docker build -f docker/worker.Dockerfile -t batchinfer-worker:0.1.0 .
ARG VLLM_VERSION=v0.32.0
FROM vllm/vllm-openai:${VLLM_VERSION}

# vLLM's own pins stay as they are: only what is missing is installed.
COPY pyproject.toml README.md /src/
COPY airflow_batchinfer /src/airflow_batchinfer
RUN python3 -m pip install --no-cache-dir --upgrade-strategy only-if-needed /src \
    && rm -rf /src \
    && python3 -c "import airflow_batchinfer.worker.run"

# The root file system may be read-only: all that is written goes below /tmp and /cache. User 10001 has no
# entry in /etc/passwd, and PyTorch and vLLM ask for a name in places.
ENV HOME=/tmp \
    USER=batchinfer \
    HF_HOME=/cache/models/huggingface \
    VLLM_CACHE_ROOT=/cache/compiled \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    VLLM_NO_USAGE_STATS=1
RUN mkdir -p /cache/models /cache/compiled && chown -R 10001:10001 /cache
USER 10001:10001
WORKDIR /tmp

# Exec form, no shell between: SIGTERM reaches the worker itself.
ENTRYPOINT ["python3", "-m", "airflow_batchinfer.worker"]
