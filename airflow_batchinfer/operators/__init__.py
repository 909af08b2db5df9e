"""Thin Airflow operators: each turns arguments into one call of `pipeline/` or one worker."""
