"""The faults that `FaultyTransport` causes under each delivery, in the tests of the conformance kit."""

from __future__ import annotations

from weightsync.protocol._tables import Delivery

FAULTS = {
    Delivery.ORDERED: {"delay": 0.3},
    Delivery.REORDERED: {"delay": 0.4},
    Delivery.AT_LEAST_ONCE: {"delay": 0.3, "duplicate": 0.3},
    Delivery.BEST_EFFORT: {"delay": 0.2, "duplicate": 0.2, "drop": 0.2},
}
