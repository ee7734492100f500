"""Functions for worker processes of generation B, which get the pickled scheme after `init_on_sender`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from fleet import PATIENCE, Crew, Worker, WorkerSetup, constants, filled, small
from torch import nn

from weightsync.clock import Deadline


class Collector:
    """A context on a worker, in TorchRL's sense: it has the model, and records the updates for its sub-collectors."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        self.handed_on: list[tuple[str, Any]] = []

    def update_policy_weights_(self, policy_or_weights: Any = None, *, model_id: str = "policy") -> None:
        self.handed_on.append((model_id, policy_or_weights))


def enter(setup: WorkerSetup, index: int, make: Callable[..., nn.Module] = small) -> set[float]:
    """Initialise and connect as documented. Returns the values in the model afterwards."""
    setup.model = make()
    setup.scheme.init_on_receiver(model_id="policy", model=setup.model, worker_idx=index)
    setup.scheme.connect(worker_idx=index)
    return holds(setup)


def enter_with_context(setup: WorkerSetup, index: int) -> set[float]:
    """Initialise and connect with a context, which has the model. Returns the values in the model afterwards."""
    setup.kept["collector"] = Collector(small())
    setup.model = setup.kept["collector"].policy
    setup.scheme.init_on_receiver(model_id="policy", context=setup.kept["collector"], worker_idx=index)
    setup.scheme.connect(worker_idx=index)
    return constants(setup.model)


def holds(setup: WorkerSetup) -> set[float]:
    """The distinct values of all parameters and buffers, without the extra state."""
    tensors = [*setup.model.parameters(), *setup.model.buffers()]
    return {value for tensor in tensors for value in tensor.flatten().tolist()}


def comes_to_hold(setup: WorkerSetup, fill: float) -> bool:
    """Whether the model gets this value in time without a call to `receive`."""
    deadline = Deadline(PATIENCE)
    while constants(setup.model) != {fill} and not deadline.passed:
        pass
    return constants(setup.model) == {fill}


def handed_on(setup: WorkerSetup) -> list[str]:
    return [model_id for model_id, _ in setup.kept["collector"].handed_on]


def receives(setup: WorkerSetup, timeout: float) -> Any:
    """Call `scheme.receive`. Returns the sorted distinct values of the weights, or None."""
    weights = setup.scheme.receive(timeout=timeout)
    return None if weights is None else sorted(constants(SimpleNamespace(state_dict=lambda: flat(weights))))


def flat(weights: Any) -> Any:
    from weightsync import WeightStrategy  # noqa: PLC0415 - in the worker only

    return WeightStrategy("state_dict").extract_weights(weights)


def applies_by_hand(setup: WorkerSetup, fill: float) -> set[float]:
    setup.scheme.apply_weights(small(fill).state_dict())
    return constants(setup.model)


def raises(setup: WorkerSetup, name: str, *arguments: Any, **named: Any) -> str | None:
    """Call a method of the scheme. Returns the names of the error's type and its bases, or None without an error."""
    try:
        getattr(setup.scheme, name)(*arguments, **named)
    except Exception as error:  # noqa: BLE001 - returned to the test
        return " ".join(kind.__name__ for kind in type(error).__mro__)
    return None


def connects_again(setup: WorkerSetup, index: int) -> str | None:
    return raises(setup, "connect", worker_idx=index)


def moves_to_another_model(setup: WorkerSetup) -> bool:
    """Set another context and model, as TorchRL's collectors do after copying the policy."""
    setup.model = small(8.0)
    setup.kept["collector"] = Collector(setup.model)
    setup.scheme.context, setup.scheme.model = setup.kept["collector"], setup.model
    return setup.scheme.context is setup.kept["collector"] and setup.scheme.model is setup.model


def properties(setup: WorkerSetup) -> dict[str, Any]:
    """The properties of the scheme on the receiver."""
    scheme = setup.scheme
    return {
        "initialized": (scheme.initialized_on_sender, scheme.initialized_on_receiver),
        "synchronized": (scheme.synchronized_on_sender, scheme.synchronized_on_receiver),
        "model_id": scheme.model_id,
        "worker_idx": scheme.worker_idx,
        "model": scheme.model is setup.model,
        "weights": sorted(constants(SimpleNamespace(state_dict=lambda: flat(scheme.weights)))),
        "context": scheme.context is setup.kept.get("collector"),
        "strategy": (str(scheme.strategy), scheme.strategy_str),
        "receiver_transport": scheme.receiver_transport is not None,
    }


def ends(setup: WorkerSetup) -> None:
    setup.scheme.shutdown()


class Counted(nn.Linear):
    """A layer with a number as its extra state."""

    def __init__(self, count: int) -> None:
        super().__init__(1, 1)
        self.count = count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def counted(count: int = 0) -> Counted:
    return Counted(count)


def extra_of(setup: Any) -> int:
    return setup.model.count


def linear(fill: float = 0.0) -> Any:
    return filled(nn.Linear(2, 2), fill)


class Fleet:
    """A scheme of generation B, with initialised and connected workers."""

    def __init__(self, crew: Crew, scheme: Any, count: int = 2, *, entering: Any = enter, **sender: Any) -> None:
        self.scheme = scheme
        given = sender or {"model": small(1.0), "num_workers": count, "devices": ["cpu"] * count}
        self.given = given
        scheme.init_on_sender(model_id="policy", **given)
        self.workers: list[Worker] = crew.start(scheme, count)
        for index, worker in enumerate(self.workers):
            worker.tell(entering, index)
        scheme.connect()
        self.first = [worker.answer() for worker in self.workers]

    def all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for worker in self.workers:
            worker.tell(function, *arguments)
        return [worker.answer() for worker in self.workers]


@contextlib.contextmanager
def fleet_of(crew: Crew, scheme: Any, count: int = 2, **how: Any) -> Iterator[Fleet]:
    """A scheme and its workers. At the end the trainer's side is shut down first, then the workers'."""
    made = Fleet(crew, scheme, count, **how)
    try:
        yield made
    finally:
        scheme.shutdown()
        made.all(ends)
