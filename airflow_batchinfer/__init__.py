"""Offline LLM inference for Apache Airflow: sharded, restartable, every row accounted for."""

__version__ = "0.1.0"
