"""A conformance kit: checks any transport against the contract of links and the delivery that it declares.

    from weightsync.testing import Ends, check_transport

    def test_my_transport():
        print(check_transport(lambda model_id: Ends(*my_pair(model_id))))

`check_transport` raises `Nonconforming`, which names each broken rule with its scenario and step.
It does not need pytest. ``docs/testing.md`` describes the contract of factories and has an example.
"""

from weightsync.testing.check import SCENARIOS, check_transport
from weightsync.testing.clock import FakeClock
from weightsync.testing.ends import Ends, Factory, Listen
from weightsync.testing.faulty import FaultyTransport
from weightsync.testing.rules import Broken, Conformance, Nonconforming, Rule

__all__ = [
    "SCENARIOS",
    "Broken",
    "Conformance",
    "Ends",
    "Factory",
    "FakeClock",
    "FaultyTransport",
    "Listen",
    "Nonconforming",
    "Rule",
    "check_transport",
]
