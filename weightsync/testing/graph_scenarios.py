"""Paths of the model's graph as scenarios, one for each configuration of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from weightsync.protocol._tables import Delivery
from weightsync.testing.link_setup import LinkSetup, Scenario
from weightsync.testing.replay_actors import MessageLost
from weightsync.testing.replay_data import Configuration, Step, graphs
from weightsync.testing.replaying import Replay

LOST_ON_THE_WAY = "the adapter lost a message on the way there, which it may do"


@dataclass(frozen=True, slots=True)
class GraphScenario(Scenario):
    """Every edge of both roles' projections of one configuration's graph."""

    configuration: str = ""

    def beside(self, delivery: Delivery) -> str:
        """Why it does not apply: its network misbehaves in ways that the links do not."""
        links = graphs().configurations[self.configuration].links
        may = {"Reorders": delivery.reorders, "Duplicates": delivery.duplicates, "Loses": delivery.loses}
        beyond = sorted(fault.lower() for fault in links if not may[fault])
        if beyond:
            return f"in its model, the network {' and '.join(beyond)}, and links of delivery {delivery.name} do not"
        if delivery.loses and "Loses" not in links:
            return f"links of delivery {delivery.name} may lose messages and need not report deaths"
        return ""


def replayed(link_setup: LinkSetup, name: str) -> None:
    """Replay all paths of a configuration."""
    configuration = graphs().configurations[name]
    link_setup.coverage.edges |= configuration.edges
    tried: set[str] = set()
    for number, path in enumerate(configuration.paths, 1):
        link_setup.watch.steps[:] = [f"path {number} of {len(configuration.paths)} in the model's graph {name!r}"]
        _walk(link_setup, configuration, path, tried)
        link_setup.clear()


def _walk(link_setup: LinkSetup, configuration: Configuration, path: Sequence[Step], tried: set[str]) -> None:
    replay = Replay(link_setup, configuration, tried)
    for place, step in enumerate(path):
        if step.needs in link_setup.unreachable:
            link_setup.coverage.stop(path[place:], link_setup.unreachable[step.needs])
            break
        try:
            replay.take(step)
        except MessageLost:
            link_setup.coverage.stop(path[place:], LOST_ON_THE_WAY)
            break
        link_setup.coverage.take(step)
    replay.finish()


GRAPH_SCENARIOS = tuple(
    GraphScenario(f"the graph of {name}", partial(replayed, name=name), over_losses=True, configuration=name)
    for name in graphs().configurations
)
