"""Which launcher starts the workers of a group: its scheme says."""

from __future__ import annotations

from weightsync.errors import ConfigurationError
from weightsync.group.launcher import GroupArguments, Launcher
from weightsync.group.process import ProcessLauncher
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.distributed import DistributedWeightSyncScheme
from weightsync.schemes.pipes import PipeScheme
from weightsync.schemes.ray import RayWeightSyncScheme
from weightsync.schemes.ray_module import RayModuleTransformScheme
from weightsync.schemes.shared import SharedMemWeightSyncScheme


def launcher_for(scheme: WeightSyncScheme | str | None, arguments: GroupArguments) -> Launcher:
    """The launcher of a group.

    Raises:
        ConfigurationError: a group cannot start workers for this scheme, or an argument is for another scheme.
    """
    chosen_scheme = SharedMemWeightSyncScheme() if scheme is None else scheme
    chosen_scheme = _scheme_of_backend(chosen_scheme) if isinstance(chosen_scheme, str) else chosen_scheme
    if not isinstance(chosen_scheme, WeightSyncScheme) or chosen_scheme.initialized_on_sender:
        raise _unusable_scheme_error(scheme)
    if isinstance(chosen_scheme, PipeScheme):
        return ProcessLauncher(chosen_scheme, arguments)
    if isinstance(chosen_scheme, RayWeightSyncScheme) and not isinstance(chosen_scheme, RayModuleTransformScheme):
        from weightsync.group.actors import ActorLauncher  # noqa: PLC0415 - for Ray alone

        return ActorLauncher(chosen_scheme, arguments)
    if isinstance(chosen_scheme, DistributedWeightSyncScheme):
        from weightsync.group.ranks import RankLauncher  # noqa: PLC0415 - for torch.distributed alone

        return RankLauncher(chosen_scheme, arguments)
    raise _unusable_scheme_error(scheme)


def _scheme_of_backend(backend: str) -> WeightSyncScheme:
    try:
        return WeightSyncScheme.from_backend(backend)
    except ConfigurationError as error:
        if error.__cause__ is None:  # no such backend: its text names backends that are not for groups
            raise _unusable_scheme_error(backend) from error
        raise ConfigurationError(f"scheme= is {backend!r}. {error} Nothing was started.") from error


def _unusable_scheme_error(scheme: object) -> ConfigurationError:
    used = isinstance(scheme, WeightSyncScheme) and scheme.initialized_on_sender
    given = f"a {type(scheme).__name__} that is in use already" if used else repr(scheme)
    return ConfigurationError(
        f"scheme= is {given}: give a new SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, "
        "RayWeightSyncScheme or DistributedWeightSyncScheme, which the group initialises, or "
        '"shared", "process", "ray" or "distributed". Nothing was started.'
    )
