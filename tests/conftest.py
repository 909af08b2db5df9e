"""Which test files each of the two environments collects, and how hypothesis draws."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Tests assert no time, and a test that hangs is ended by pytest. Not from the profile that is loaded: that
# is another one under CI.
_UNTIMED = settings(
    settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

# A change is judged by the same examples wherever it is tested. HYPOTHESIS_PROFILE=thorough draws ten times
# as many, others each time; what fails is kept in .hypothesis and drawn first the next time.
settings.register_profile("repeatable", _UNTIMED, derandomize=True, database=None)
settings.register_profile(
    "thorough", _UNTIMED, max_examples=10 * settings.default.max_examples, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

if settings.get_current_profile_name() == "repeatable":
    # Hypothesis draws one value in twenty from the constants of the modules that the process has imported so
    # far (`HypothesisProvider._maybe_draw_constant`): the examples would depend on the tests that ran before,
    # and on each change to the package. There is no setting for it.
    pytest.MonkeyPatch().setattr(providers, "_get_local_constants", providers.Constants)

_AIRFLOW_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.airflow_env", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files of Airflow's side where it is not installed: they could not even be imported."""
    if collection_path.suffix != ".py" or find_spec("airflow") is not None:
        return None
    return True if _AIRFLOW_FILE.search(collection_path.read_text(encoding="utf-8")) else None
