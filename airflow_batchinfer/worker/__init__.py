"""What runs beside the GPU: admission, engine, checkpoints, signals; no Airflow here."""
