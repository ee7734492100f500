"""Schemes by the name of their backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal, TypeVar

from weightsync.errors import ConfigurationError

Scheme = TypeVar("Scheme", bound=type[Any])

#: The built-in backends, for annotations.
WeightSyncBackend = Literal[
    "none", "direct", "shared", "thread", "process", "multiprocessing", "distributed", "rpc", "ray"
]

#: Our own schemes, imported on first use, so that only programs that use Ray need it.
_HOMES = {
    "none": ("weightsync.schemes.none", "NoWeightSyncScheme"),
    "shared": ("weightsync.schemes.shared", "SharedMemWeightSyncScheme"),
    "process": ("weightsync.schemes.pipes", "MultiProcessWeightSyncScheme"),
    "distributed": ("weightsync.schemes.distributed", "DistributedWeightSyncScheme"),
    "rpc": ("weightsync.schemes.rpc", "RPCWeightSyncScheme"),
    "ray": ("weightsync.schemes.ray", "RayWeightSyncScheme"),
}
#: A direct worker shares the trainer's own model; a thread shares the trainer's memory.
_ALIASES = {"direct": "none", "thread": "shared", "multiprocessing": "process"}
_registered: dict[str, type[Any]] = {}
#: The group of entry points in which installed packages name schemes of their own. They are imported on first use.
ENTRY_POINTS: Final = "weightsync.transports"


def register_weight_sync_backend(backend: str) -> Callable[[Scheme], Scheme]:
    """A class decorator: `WeightSyncScheme.from_backend` then makes this class for ``backend``.

    It may replace a built-in one. An installed package may instead name the class in its metadata, as an entry point of
    the group ``weightsync.transports``.

    Raises:
        ConfigurationError: the name is empty, or no str.
    """
    if not isinstance(backend, str) or not backend:
        raise ConfigurationError(f"A backend's name is a str, not {backend!r}.")

    def register(scheme: Scheme) -> Scheme:
        _registered[backend] = scheme
        return scheme

    return register


def scheme_of(backend: str) -> type[Any]:
    """The class registered for a backend, else ours, else that of an installed package's entry point.

    Raises:
        ConfigurationError: there is no such backend, or what its entry point names cannot be imported.
    """
    name = backend if isinstance(backend, str) else ""
    if name in _registered:
        return _registered[name]
    name = _ALIASES.get(name, name)
    if name in _registered:
        return _registered[name]
    if name not in _HOMES:
        installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name in installed:
            return _load_entry_point(installed[name])
        known = sorted({*_HOMES, *_ALIASES, *_registered, *installed})
        raise ConfigurationError(f"Unsupported weight-sync backend {backend!r}: choose one of {', '.join(known)}.")
    module, scheme = _HOMES[name]
    found: type[Any] = getattr(importlib.import_module(module), scheme)
    return found


def _load_entry_point(point: EntryPoint) -> type[Any]:
    try:
        scheme_type: type[Any] = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"The weight-sync backend {point.name!r} is {point.value!r} of an installed package (an entry point of "
            f"{ENTRY_POINTS}), which cannot be imported: {error}."
        ) from error
    return scheme_type
