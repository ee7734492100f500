"""The definition of a scenario."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from weightsync.protocol._tables import Delivery
from weightsync.testing.ends import Ends
from weightsync.testing.link_setup import LinkSetup


class Ability(Enum):
    """What an adapter may be able to do beyond the contract of links."""

    CUT = "Ends.cut"
    ANOTHER = "Ends.another"

    def of(self, ends: Ends) -> bool:
        """Whether these ends can do it."""
        return (ends.cut if self is Ability.CUT else ends.another) is not None


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something that runs over an adapter's links."""

    name: str
    play: Callable[[LinkSetup], None]
    needs: Ability | None = None
    #: Whether it can run where messages may be lost.
    over_losses: bool = False

    def beside(self, delivery: Delivery) -> str:
        """Why it does not apply to a delivery; empty: it applies."""
        if delivery.loses and not self.over_losses:
            return f"links of delivery {delivery.name} may lose messages and need not report deaths"
        return ""
