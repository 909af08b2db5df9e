"""The report a run ends with: `report.json` for programs, `report.html` for people."""

from airflow_batchinfer.pipeline.report.build import build_report
from airflow_batchinfer.pipeline.report.model import Report
from airflow_batchinfer.pipeline.report.write import write_report

__all__ = ["Report", "build_report", "write_report"]
