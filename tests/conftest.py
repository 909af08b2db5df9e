"""Which test files each of the two environments collects, and how hypothesis draws."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from hypothesis import settings

# A change is judged by the same examples wherever it is tested. HYPOTHESIS_PROFILE=thorough draws ten times
# as many, others each time; what fails is kept in .hypothesis and drawn first the next time.
settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("thorough", max_examples=10 * settings.default.max_examples, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_AIRFLOW_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.airflow_env", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files of Airflow's side where it is not installed: they could not even be imported."""
    if collection_path.suffix != ".py" or find_spec("airflow") is not None:
        return None
    return True if _AIRFLOW_FILE.search(collection_path.read_text(encoding="utf-8")) else None
