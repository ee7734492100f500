"""The bench: weightsync, TorchRL and the physical floors, interleaved in one run on the user's own machine.

    settings   payloads, schemes, options      contenders     what is measured, and in which situation
    results    records, and their JSON         floors         memcpy, ping, TCP, gloo, copies of a GPU
    judging    ratios, targets, noise          schemes        weightsync's schemes between processes
    reporting  tables, also for the docs       call_schemes   weightsync over torch's RPC and Ray, and their floors
    running    the run                         torchrl_schemes, models, processes
                                               watching       ends what waits for a worker forever

The first column needs no torch, `running` apart. The bench uses only the public API, as a user's program would.
"""

from weightsync.bench.judging import Change, Compared, Floor, Line, Verdict, compare, noise, ratio, targets
from weightsync.bench.results import Case, Kind, Label, Measured, Results
from weightsync.bench.settings import BenchError, Device, Payload, SchemeName, Settings

__all__ = [
    "BenchError",
    "Case",
    "Change",
    "Compared",
    "Device",
    "Floor",
    "Kind",
    "Label",
    "Line",
    "Measured",
    "Payload",
    "Results",
    "SchemeName",
    "Settings",
    "Verdict",
    "compare",
    "noise",
    "ratio",
    "targets",
]
