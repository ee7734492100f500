"""Options of torch's RPC in tests, and a new process for each test: a process that left RPC cannot join it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

#: TCP alone. With TensorPipe's shared memory, a thread in each process polls without a pause from `init_rpc` to the
#: end, and a few idle processes would take all cores from the other tests.
TCP_ONLY: Final[dict[str, Any]] = {"_transports": ["uv"], "_channels": ["basic"]}
#: All of TensorPipe's transports and channels for CPUs, the default.
ALL_TRANSPORTS: Final[dict[str, Any]] = {"_transports": None, "_channels": None}


def run_in_own_process(context: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a process of its own, and fail unless it returns None."""
    ours, theirs = context.Pipe()
    process = context.Process(target=_call, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    with contextlib.closing(ours):
        assert ours.poll(100), "the process does not end"
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
