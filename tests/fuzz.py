"""Fuzz the decoders with atheris and Hypothesis, to find bytes that raise anything but a typed error: `make fuzz`.

    python tests/fuzz.py SECONDS [NAME...]

fuzzes the named decoders of `decoders.DECODERS`, or all of them: each with atheris for this many seconds, and with
Hypothesis for half as long. Without atheris, Hypothesis runs for the whole time. Each run is a process of its own, and
as many run at once as there are cores. A finding is printed, and its bytes are saved in `crash-*`.

    python tests/fuzz.py --again NAME FILE

runs a decoder on such a file again.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

#: The number of examples that Hypothesis tries between two checks of the time.
EXAMPLES = 500
#: Seconds after which a run of this many examples counts as hung.
_HUNG_S = 120.0
#: Hypothesis's share of the seconds if atheris is installed.
_SHARE = 0.5


def main(arguments: list[str]) -> int:
    """Fuzz the decoders. Returns 1 if one of them failed."""
    if arguments[:1] == ["--again"]:
        _decoder(arguments[1])[0](Path(arguments[2]).read_bytes())
        return 0
    if arguments[:1] == ["--atheris"]:
        _fuzz(*arguments[1:])
    if arguments[:1] == ["--hypothesis"]:
        _run_hypothesis(*arguments[1:])
        return 0
    seconds, *names = arguments
    from decoders import DECODERS  # noqa: PLC0415 - the other processes instrument it before they import it

    chosen = [(name, engine, share) for engine, share in _engines(float(seconds)) for name in names or DECODERS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = pool.map(lambda each: _passes(*each, DECODERS[each[0]][1]), chosen)
        failed = [f"{name} ({engine})" for (name, engine, _), passes in zip(chosen, passed, strict=True) if not passes]
    print(f"failed: {', '.join(failed)}" if failed else "Nothing but typed errors.")
    return 1 if failed else 0


def _engines(seconds: float) -> list[tuple[str, float]]:
    """The engines that fuzz each decoder, and for how many seconds. The longer run comes first."""
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: Hypothesis alone.")
        return [("hypothesis", seconds)]
    return [("atheris", seconds), ("hypothesis", seconds * _SHARE)]


def _decoder(name: str):
    from decoders import DECODERS  # noqa: PLC0415

    return DECODERS[name]


def _passes(name: str, engine: str, seconds: float, seeds: list[bytes]) -> bool:
    """Fuzz one decoder in a process of its own, starting from the seeds. Returns whether nothing was found."""
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds):
            Path(folder, f"seed{number}").write_bytes(seed)
        command = [sys.executable, __file__, f"--{engine}", name, f"{seconds:.0f}", folder]
        found = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    said = [line for line in found.stderr.splitlines() if line.startswith("stat::")]
    lines = said[:1] if found.returncode == 0 else found.stderr.splitlines()[-60:]
    print("\n  ".join([f"{name}: {seconds:.0f} s of {engine}", *lines]), flush=True)
    return found.returncode == 0


def _fuzz(name: str, seconds: str, folder: str) -> None:
    """Fuzz one decoder with atheris, which ends the process."""
    import atheris  # noqa: PLC0415
    import tensordict  # noqa: F401, PLC0415 - imported before the instrumentation, like torch
    import torch  # noqa: F401, PLC0415

    with atheris.instrument_imports(include=["weightsync", "decoders"]):
        decode, _ = _decoder(name)
    limits = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=4096", "-max_len=8192"]
    atheris.Setup([sys.argv[0], folder, "-print_final_stats=1", *limits], decode)
    atheris.Fuzz()


def _run_hypothesis(name: str, seconds: str, folder: str) -> None:
    tried = look(*_decoder(name), float(seconds), Path(f"crash-hypothesis-{name}"))
    print(f"stat::number_of_executed_units: {tried}", file=sys.stderr)


def look(decode: Callable[[bytes], None], seeds: list[bytes], seconds: float, crash: Path) -> int:
    """Fuzz a decoder with Hypothesis for this many seconds, in at least one run. Returns the number of examples.

    Raises:
        Exception: the decoder's error for the simplest bytes that were found, which are saved in ``crash``.
    """
    from edits import inputs  # noqa: PLC0415
    from hypothesis import HealthCheck, given, seed, settings  # noqa: PLC0415

    tried, last = 0, b""

    def one(data: bytes) -> None:
        nonlocal tried, last
        tried, last = tried + 1, data
        decode(data)

    until = time.monotonic() + seconds
    settled = settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    try:
        while not tried or time.monotonic() < until:
            faulthandler.dump_traceback_later(_HUNG_S, exit=True)
            seed(random.getrandbits(64))(settled(given(inputs(seeds))(one)))()
    except Exception:
        crash.write_bytes(last)
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
    return tried


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
