"""The environment variables of Ray's processes in the tests. Importing this module does not import Ray."""

from __future__ import annotations

import os
from pathlib import Path

#: The folders from which actors import modules: all folders of tests, and the repository.
FOLDERS = [*sorted({path.parent for path in Path(__file__).parent.rglob("*.py")}), *Path(__file__).parents[:2]]
#: Ray sends no usage statistics, and its actors can import the modules of the tests. Their niceness is 0: with the
#: default of 15 they would hardly run on a busy machine.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "PYTHONPATH": os.pathsep.join(map(str, FOLDERS)),
}
