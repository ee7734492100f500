"""What TLC checks in each configuration, read from the configuration itself and not from its description."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modelcheck.second.bounds import LINKS, Bounds
from weightsync.model.config import Value
from weightsync.model.manifest import Configuration, Manifest, Purpose

#: The modules whose configurations check the properties of AckProtocol.tla over its own actions.
OF_THE_PROTOCOL = ("MC", "MCHunt", "MCInductive")
#: Have no protocol in them: the steps of the promise, what waits in a sender, kernels, a worker group's results and
#: steps, a loader, deltas, and the exchange of challenges.
_WITHOUT_IT = ("MCPromise", "Backlog", "Kernels", "Group", "Loader", "Delta", "Challenge")
#: What configurations of the families of transports do not set themselves: their modules do.
_OF_A_FAMILY: dict[str, Value] = {**dict.fromkeys(LINKS, False), "Without": [], "Unfair": []}


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration, and what TLC checks in it.

    Attributes:
        configuration: its entry in the manifest.
        properties: the invariants and properties that are checked in it.
        bounds: its constants.
    """

    configuration: Configuration
    properties: tuple[str, ...]
    bounds: Bounds

    @property
    def name(self) -> str:
        """The configuration's name."""
        return self.configuration.name

    @property
    def states(self) -> int:
        """The distinct states that are pinned."""
        return self.configuration.pinned.distinct if self.configuration.pinned else 0

    def allows(self, features: Iterable[str]) -> bool:
        """Whether one of these features may happen in it; true if none is named."""
        wanted = set(features)
        return not wanted or bool(wanted & self.bounds.features)


def proofs(manifest: Manifest, modules: Iterable[str] | None = None) -> tuple[Checked, ...]:
    """The manifest's proofs and what TLC checks in each, in the order of the manifest.

    Args:
        manifest: names the configurations.
        modules: only the proofs of these root modules; None: all that contain the protocol.

    Raises:
        ConfigurationError: a constant that the protocol needs is missing, or is no plain value.
    """
    wanted = None if modules is None else set(modules)
    found = (each for each in manifest.configurations if each.purpose is Purpose.PROOF)
    of = (each for each in found if each.module not in _WITHOUT_IT)
    return tuple(_checked(each) for each in of if wanted is None or each.module in wanted)


def _checked(configuration: Configuration) -> Checked:
    config = configuration.config
    return Checked(configuration, config.checked, Bounds.read({**_OF_A_FAMILY, **config.constants}))
