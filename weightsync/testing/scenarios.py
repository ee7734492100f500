"""All scenarios, in the order in which they run."""

from __future__ import annotations

from weightsync.testing.ending_scenarios import ENDING_SCENARIOS
from weightsync.testing.graph_scenarios import GRAPH_SCENARIOS
from weightsync.testing.link_scenarios import LINK_SCENARIOS
from weightsync.testing.protocol_scenarios import PROTOCOL_SCENARIOS
from weightsync.testing.script import Scenario
from weightsync.testing.walks import WALKS

#: The scenarios by name.
SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (*LINK_SCENARIOS, *ENDING_SCENARIOS, *PROTOCOL_SCENARIOS, *WALKS, *GRAPH_SCENARIOS)
}
