"""What torch's RPC runs over in tests."""

from __future__ import annotations

from typing import Any, Final

#: TCP alone. TensorPipe's shared memory has a thread in each process that polls without a pause, from `init_rpc` to its
#: end: a few processes of a world that waits would take all cores from the other tests.
TCP: Final[dict[str, Any]] = {"_transports": ["uv"], "_channels": ["basic"]}
#: All that TensorPipe has for processors, as is the default.
ANYTHING: Final[dict[str, Any]] = {"_transports": None, "_channels": None}
