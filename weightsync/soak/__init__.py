"""`weightsync soak`: random syncs and faults at full speed, and a table of what happened.

A program on the public API. It finds what short tests do not: leaks, rare interleavings, and a machine's own limits.
"""

import os

# torch's RPC logs each connection of a worker that was killed, in every process; this is read when torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
