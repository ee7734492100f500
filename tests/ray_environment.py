"""What Ray's processes find in their environment in the tests. Importing this does not import Ray."""

from __future__ import annotations

import os
from pathlib import Path

#: Where what actors need is imported from.
FOLDERS = [*sorted({path.parent for path in Path(__file__).parent.rglob("*.py")}), *Path(__file__).parents[:2]]
#: Ray asks nobody on the network, and its actors import what the tests do. By default their niceness is 15: on a busy
#: machine they would hardly run.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "PYTHONPATH": os.pathsep.join(map(str, FOLDERS)),
}
