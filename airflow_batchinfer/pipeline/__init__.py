"""The steps of a run as plain functions on a store; no Airflow here."""
