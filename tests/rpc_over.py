"""What torch's RPC runs over in tests, and a process for a test of it: one that left RPC cannot join new ones there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

#: TCP alone. TensorPipe's shared memory has a thread in each process that polls without a pause, from `init_rpc` to its
#: end: a few processes of a world that waits would take all cores from the other tests.
TCP: Final[dict[str, Any]] = {"_transports": ["uv"], "_channels": ["basic"]}
#: All that TensorPipe has for processors, as is the default.
ANYTHING: Final[dict[str, Any]] = {"_transports": None, "_channels": None}


def apart(context: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a process of its own."""
    ours, theirs = context.Pipe()
    process = context.Process(target=_call, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    with contextlib.closing(ours):
        assert ours.poll(100), "it does not end"
        error = ours.recv()
    process.join(20)
    process.kill()
    process.join()
    assert error is None, error


def _call(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(*arguments))
    except BaseException as error:
        pipe.send(repr(error))
        raise
