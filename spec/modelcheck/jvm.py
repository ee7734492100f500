"""A process that runs TLC repeatedly in one JVM. `kept` starts it as a script, so it imports nothing of weightsync.

Its arguments are TLC's jar, the JVM's library, a folder for temporary files, and the mark after the output of a run.
Each line of its input is a run: a JSON list of the modules' folder and TLC's arguments. The output of the run follows,
then a line with the mark and TLC's exit code. The process ends when its input ends, so it does not outlive the process
that started it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading

import jpype

NOTHING_RUN = -1


def main() -> None:
    """Run TLC for each line of the input."""
    jar, library, folder, mark = sys.argv[1:]
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    options = ("-XX:+UseSerialGC", "-XX:-UsePerfData", f"-Djava.io.tmpdir={folder}")
    jpype.startJVM(library, *options, classpath=[jar])
    out = jpype.JClass("java.lang.System").out
    while True:
        code = _run(*json.loads(lines.get()))
        out.flush()
        print(f"{mark}{code}", flush=True)


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _run(folder: str, arguments: list[str]) -> int:
    tlc = jpype.JClass("tlc2.TLC")()
    if not tlc.handleParameters(arguments):
        return NOTHING_RUN
    tlc.setResolver(jpype.JClass("util.SimpleFilenameToStream")(folder))
    return int(tlc.process())


if __name__ == "__main__":
    main()
