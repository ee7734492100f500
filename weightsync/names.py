"""Public names that a lower floor asks for, and modules that moved: their former names still work, and warn."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

#: Gives a public name of `weightsync`, and imports its module. The root package, which knows where each is, sets it.
lookup: Callable[[str], Any]

#: For each former module the module that has its names now, and the names; with a dot those of another module.
FORMER_HOMES: Final[Mapping[str, tuple[str, str]]] = {
    "messages": ("protocol.messages", "Ack Bye Ending Hello Message Refusal SlotRef Update WeightsForm"),
    "tracing": ("engine.recorder", "Recorder record"),
    "transports.memory": (
        "transports.buffers",
        "Buffer NoRoom Pool Segment Storage anonymous transports.mapping.Mapping",
    ),
    "updaters": (
        "torchrl.updaters",
        "MultiProcessedWeightUpdater RayWeightUpdater RemoteModuleWeightUpdater VanillaWeightUpdater WeightUpdaterBase",
    ),
    "integrations": ("torchrl", ""),
    "integrations.torchrl": ("torchrl.collectors", "accept"),
}


class FormerModuleFinder(MetaPathFinder, Loader):
    """Makes the former modules when they are imported."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """The spec of a former module; None for any other."""
        package, _, name = fullname.partition(".")
        known = package == "weightsync" and name in FORMER_HOMES
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> None:
        """None: Python makes the module as usual."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the module's names from where they are now."""
        package, _, name = module.__name__.partition(".")
        home, names = f"{package}.{FORMER_HOMES[name][0]}", FORMER_HOMES[name][1].split()
        module.__doc__ = f"The former home of `{home}`."
        for each in names:
            elsewhere, _, name = each.rpartition(".")
            found = importlib.import_module(f"{package}.{elsewhere}" if elsewhere else home)
            setattr(module, name, getattr(found, name))
        if names:
            advice = f"{module.__name__} is now {home}: import from there."
            warnings.warn(advice, DeprecationWarning, stacklevel=2)
