"""How the workers of a group are started, reached, and ended with the trainer's process. Its scheme decides how."""

from __future__ import annotations

import atexit
import contextlib
import copy
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn

from weightsync.engine.arguments import require_context, require_count, require_name, require_whole
from weightsync.errors import ConfigurationError
from weightsync.group.function import require_make_model, require_run
from weightsync.group.members import Rules, Running
from weightsync.group.steps import Staleness
from weightsync.group.worker import MakeModel, Plan, Worker
from weightsync.options import OnStale, is_number, items_of
from weightsync.schemes.base import WeightSyncScheme
from weightsync.weights.meta_device import is_on_meta
from weightsync.weights.reading import merges_into_others
from weightsync.weights.selection import Selection
from weightsync.weights.sharded import is_sharded

#: The priority of `AtExit` among the finalizers of `multiprocessing`: before senders are closed.
_FINALIZER_PRIORITY: Final = 200


@dataclass(frozen=True)
class GroupArguments:
    """The arguments of `WorkerGroup` with these names."""

    run: Callable[[Worker], object] | None
    model: nn.Module
    num_workers: int | None
    make_model: MakeModel | None
    model_id: str
    capacity: int
    max_restarts: int
    staleness: Staleness
    ctx: BaseContext | None
    actor_options: Mapping[str, Any] | None
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigurationError: the model is no module with whole weights; or its name or ``ctx`` is wrong."""
        require_name(self.model_id)
        if self.ctx is not None:
            require_context(self.ctx)
        if not isinstance(self.model, nn.Module):
            raise ConfigurationError(
                f"model= is {self.model!r}: give the trainer's nn.Module, whose weights the workers get. Nothing was "
                "started."
            )
        if is_sharded(self.model):
            raise ConfigurationError(
                f"model= ({type(self.model).__name__}) is sharded over ranks (fully_shard(), or DTensors): this rank "
                "holds only its shards, and a group sends whole weights. Start the workers yourself, initialise a "
                "scheme without model=, and call weightsync.send_sharded(scheme, model) on every rank for each version "
                "(see docs/guide.md). Nothing was started."
            )
        if self.names is None and is_on_meta(self.model):
            raise ConfigurationError(
                f"model= ({type(self.model).__name__}) is on the meta device, so it has no weights to send: give the "
                "trainer's model with its weights. A model without weights is for the workers: make_model= makes "
                "theirs. Nothing was started."
            )

    def plan(self, pickle_model: Callable[[nn.Module], bytes] = pickle.dumps) -> Plan:
        """What the workers have in common, where the group starts them.

        Args:
            pickle_model: pickles the workers' copy of the model.

        Raises:
            ConfigurationError: the function or ``make_model`` cannot be called, or the model cannot be copied, or a
                copy of it would not have the weights that are sent.
        """
        self._refuse_unmerged_copies()
        run, make_model = require_run(self.run), self.make_model
        copy_arguments = self.names is not None, pickle_model
        model_maker = CopiedModel(self.model, *copy_arguments) if make_model is None else require_make_model(make_model)
        return Plan(run, model_maker, self.model_id, self.capacity, self.staleness, self.names)

    def _refuse_unmerged_copies(self) -> None:
        if self.make_model is None and self.names is None and merges_into_others(self.model):
            raise ConfigurationError(
                f"model= ({type(self.model).__name__}) has adapters, which merge_and_unload() merges into the weights "
                "that are sent: they would not fit a worker's copy of the model, which is not merged. Either give "
                "make_model=, a function that makes the model as it is once merged; or send only the adapters' "
                'weights, which are then not merged: names="*lora_?.*", for example. Nothing was started.'
            )

    def least_one_worker(self) -> int:
        """How many workers are to be started. Raises ConfigurationError: none, or more than there can be."""
        return require_count(least_one(self.num_workers, "num_workers"))

    def refuse_others(self, *arguments: str) -> None:
        """Refuse arguments that mean nothing to workers of this kind. Raises ConfigurationError: one was given."""
        given = [argument for argument in arguments if not _is_left_out(vars(self)[argument])]
        if given:
            raise ConfigurationError(
                f"{', '.join(given)}: the workers of this scheme= do not support it (see docs/group.md). Nothing was "
                "started."
            )


def least_one(value: object, argument: str) -> int:
    """A number, 1 or more. Raises ConfigurationError: it is not."""
    with contextlib.suppress(ConfigurationError):
        number = require_whole(value, argument, "1 or more")
        if number >= 1:
            return number
    raise ConfigurationError(f"{argument}= is {value!r}: give a whole number, 1 or more. Nothing was started.")


def names_of(names: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """The names of the weights that are sent, as a tuple; None: all. Raises ConfigurationError: they are not names."""
    if names is None:
        return None
    items = [names] if isinstance(names, str) else items_of(names)
    Selection(names if items is None else items)
    return None if items is None else tuple(items)


def _is_left_out(value: object) -> bool:
    """Whether an argument was left out, or has a value that means the same: no restarts, no options."""
    return value is None or (isinstance(value, int | Mapping) and not value)


def rules_of(capacity: int, max_restarts: int, restart_delay: float, deadline: float | None) -> Rules:
    """What the group is told about its workers. Raises ConfigurationError: an argument is out of range."""
    if not is_number(restart_delay) or not restart_delay >= 0:
        raise ConfigurationError(f"restart_delay= is {restart_delay!r}: give seconds, 0 or more. Nothing was started.")
    if deadline is not None and not (is_number(deadline) and deadline > 0):
        raise ConfigurationError(
            f"deadline= is {deadline!r}: give seconds, more than 0, or None for no limit. Nothing was started."
        )
    restarts = require_whole(max_restarts, "max_restarts", "the number of restarts of each worker")
    return Rules(least_one(capacity, "capacity"), restarts, restart_delay, deadline)


def staleness_of(max_staleness: int | None, on_stale: OnStale | str) -> Staleness:
    """How old a worker's weights may be. Raises ConfigurationError: an argument is out of range, or unknown."""
    limit = None if max_staleness is None else require_whole(max_staleness, "max_staleness", "a number of versions")
    return Staleness(limit, OnStale(on_stale))


class Launched(NamedTuple):
    """A worker that was started."""

    running: Running
    #: How the sender reaches it: what `add_worker` takes.
    endpoint: Any
    #: Process to watch until the worker connects. None: the link reports its death.
    watched: Any


class Launcher(Protocol):
    """Starts the lives of workers."""

    #: How many workers there are.
    size: int
    #: What to do about a worker that failed and was never restarted.
    remedy: str

    @property
    def scheme(self) -> WeightSyncScheme:
        """The trainer's scheme."""

    def open(self) -> None:
        """Make what all workers need.

        Raises:
            WeightSyncError: workers cannot be started from here.
        """

    def init_arguments(self, lives: Sequence[Launched]) -> Mapping[str, Any]:
        """The keywords by which `init_on_sender` reaches the workers.

        Args:
            lives: the first life of each worker, in the order of the workers.
        """

    def launch(self, index: int, restarts: int) -> Launched:
        """Begin a life of a worker. Never waits.

        Raises:
            Exception: it could not be begun. Nothing is left of it.
        """

    def close(self, unreached: Sequence[Launched]) -> None:
        """Let go of what `open` has made. The workers are dead, or were given up.

        Args:
            unreached: lives that the sender was never given.
        """


class AtExit:
    """Calls a function when the process ends.

    A process that `multiprocessing` has started first runs its finalizers, then waits for the processes that it has
    started itself, and runs the functions of `atexit` after that or never. So the function is registered as both.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._finalizer: Finalize | None = None

    def register(self) -> None:
        """Call it when the process ends."""
        atexit.register(self._call)
        self._finalizer = Finalize(None, self._call, exitpriority=_FINALIZER_PRIORITY)

    def cancel(self) -> None:
        """Do not call it any more. Allowed at any time."""
        atexit.unregister(self._call)
        if self._finalizer is not None:
            self._finalizer.cancel()


class CopiedModel:
    """Makes a worker's model of the trainer's: a copy without its weights, which the first version brings.

    Args:
        model: the trainer's.
        with_weights: copy its weights too, because a version brings only some of them.
        pickle_model: pickles it, so that `pickle` can load it. Not as multiprocessing does: that would put its tensors
            into shared memory.

    Raises:
        ConfigurationError: it cannot be copied or pickled.
    """

    def __init__(
        self, model: nn.Module, with_weights: bool, pickle_model: Callable[[nn.Module], bytes] = pickle.dumps
    ) -> None:
        if with_weights and is_on_meta(model):
            raise ConfigurationError(
                f"some weights of model= ({type(model).__name__}) are on the meta device, and with names= workers "
                "keep those that are not sent: give make_model=, a function that makes a worker's model with its "
                "weights. Nothing was started."
            )
        try:
            self._pickled = pickle_model(copy.deepcopy(model, _tensors_of_copy(model, with_weights)))
        except Exception as error:
            raise ConfigurationError(
                f"the model {type(model).__name__} cannot be copied to workers ({type(error).__name__}: {error}): give "
                "make_model=, a function that makes one."
            ) from error

    def __call__(self) -> nn.Module:
        """A new model. Its parameters are on the meta device, unless it was copied with its weights.

        Raises:
            ConfigurationError: this process cannot import what the model is made of.
        """
        try:
            model: nn.Module = pickle.loads(self._pickled)
        except (AttributeError, ImportError) as error:
            raise ConfigurationError(
                f"this worker cannot import what its copy of the model is made of ({type(error).__name__}: {error}): "
                "put the model's class into a module that workers can import, not into a notebook or a prompt; or give "
                'a group of processes ctx=multiprocessing.get_context("fork").'
            ) from error
        return model


def _tensors_of_copy(model: nn.Module, with_weights: bool) -> dict[int, Any]:
    """What a copy of a model has in place of its tensors, by their ids."""
    replacements: dict[int, Any] = {}
    for parameter in model.parameters():
        data = _on_host(parameter) if with_weights else parameter.detach().to("meta")
        replacements[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
    for buffer in model.buffers():
        replacements[id(buffer)] = _on_host(buffer)
    return replacements


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()
