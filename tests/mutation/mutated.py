"""The modules whose functions are mutated."""

from __future__ import annotations

#: The machines and their pure halves.
PURE = (
    "weightsync.machine",
    "weightsync.protocol.sender",
    "weightsync.protocol.sender_guards",
    "weightsync.protocol.receiver",
)
#: The drivers, and the path of the payload.
DRIVEN = (
    "weightsync.driving.adapters",
    "weightsync.driving.backlog",
    "weightsync.driving.base",
    "weightsync.driving.interrupts",
    "weightsync.driving.packing",
    "weightsync.driving.receiver",
    "weightsync.driving.reporter",
    "weightsync.driving.sender",
    "weightsync.header",
    "weightsync.packing",
    "weightsync.serving",
    "weightsync.swapping",
    "weightsync.timing",
    "weightsync.transports.distributed.store",
    "weightsync.transports.fork",
    "weightsync.transports.memory",
    "weightsync.transports.pins",
    "weightsync.wire",
)
