"""Has atheris look for bytes that a decoder answers with anything but a typed error: `make fuzz`.

    python tests/fuzz.py SECONDS [NAME...]

looks so many seconds at each of `decoders.DECODERS`, each in a process of its own, as many at a time as there are
cores. What it finds is printed and left in `crash-*`; `python tests/fuzz.py --again NAME FILE` tries such a file again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Fuzz the decoders; 1 if one of them failed."""
    if arguments[:1] == ["--again"]:
        _decoder(arguments[1])[0](Path(arguments[2]).read_bytes())
        return 0
    if arguments[:1] == ["--one"]:
        _fuzz(*arguments[1:])
    seconds, *names = arguments
    from decoders import DECODERS  # noqa: PLC0415 - in the other processes it is instrumented first

    chosen = names or list(DECODERS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = pool.map(lambda name: _passes(name, seconds, DECODERS[name][1]), chosen)
        failed = [name for name, passes in zip(chosen, passed, strict=True) if not passes]
    print(f"failed: {', '.join(failed)}" if failed else "Nothing but typed errors.")
    return 1 if failed else 0


def _decoder(name: str):
    from decoders import DECODERS  # noqa: PLC0415

    return DECODERS[name]


def _passes(name: str, seconds: str, seeds: list[bytes]) -> bool:
    """Fuzz one decoder in a process of its own, beginning with the seeds; whether nothing was found."""
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds):
            Path(folder, f"seed{number}").write_bytes(seed)
        command = [sys.executable, __file__, "--one", name, seconds, folder]
        found = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    said = [line for line in found.stderr.splitlines() if line.startswith("stat::")]
    lines = said[:1] if found.returncode == 0 else found.stderr.splitlines()[-60:]
    print("\n  ".join([f"{name}: {seconds} s", *lines]), flush=True)
    return found.returncode == 0


def _fuzz(name: str, seconds: str, folder: str) -> None:
    """Fuzz one decoder; atheris ends the process."""
    import atheris  # noqa: PLC0415
    import tensordict  # noqa: F401, PLC0415 - not instrumented, as torch
    import torch  # noqa: F401, PLC0415

    with atheris.instrument_imports(include=["weightsync", "decoders"]):
        decode, _ = _decoder(name)
    limits = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=4096", "-max_len=8192"]
    atheris.Setup([sys.argv[0], folder, "-print_final_stats=1", *limits], decode)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
