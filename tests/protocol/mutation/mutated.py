"""The modules whose functions are mutated."""

from __future__ import annotations

#: The machines and their pure halves.
PURE = (
    "weightsync.protocol.machine",
    "weightsync.protocol.sender",
    "weightsync.protocol.receiver",
)
#: The drivers, and the modules on the payload's path.
DRIVEN = (
    "weightsync.engine.driver",
    "weightsync.engine.sender_driver",
    "weightsync.engine.packer",
    "weightsync.engine.parts",
    "weightsync.engine.receiver_driver",
    "weightsync.engine.reporter",
    "weightsync.protocol.codec",
    "weightsync.protocol.report_codec",
    "weightsync.weights.packing",
    "weightsync.weights.division",
    "weightsync.weights.threads",
    "weightsync.weights.moving",
    "weightsync.weights.send_plan",
    "weightsync.weights.tree_digest",
    "weightsync.weights.target",
    "weightsync.weights.destination_checks",
    "weightsync.weights.mapped",
    "weightsync.engine.serving_lock",
    "weightsync.engine.applier",
    "weightsync.clock",
    "weightsync.transports.store.store",
    "weightsync.transports.store.tree",
    "weightsync.transports.store.routes",
    "weightsync.transports.store.fanout",
    "weightsync.transports.process",
    "weightsync.transports.buffers",
    "weightsync.transports.mapping",
    "weightsync.transports.pipe.framing",
    "weightsync.transports.pipe.link",
)
