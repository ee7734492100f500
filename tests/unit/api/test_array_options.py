"""An array given for an option is refused with a clear message, although numpy compares arrays element by element."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import weightsync
from weightsync import (
    Carrier,
    ConfigurationError,
    Loader,
    MultiProcessWeightSyncScheme,
    SGLangEngine,
    Verify,
    VLLMEngine,
    WeightStrategy,
    WeightSyncError,
    WeightSyncScheme,
    WorkerGroup,
)

ARRAYS = (
    numpy.array([1, 2]),
    numpy.array(["auto", "raise"]),
    numpy.array([]),
    numpy.array(["auto"]),
    numpy.array("auto"),  # zero-dimensional
    torch.tensor([1, 2]),
)


class NullCarrier(Carrier):
    """A carrier that never delivers anything."""

    def update_info(self, bucket: Any) -> Mapping[str, Any]:
        return {}


#: The callables under test, and the arguments that each must have.
CONSTRUCTORS: dict[Callable[..., Any], dict[str, Any]] = {
    **{getattr(weightsync, name): {} for name in weightsync.__all__ if name.endswith("WeightSyncScheme")},
    weightsync.RayModuleTransformScheme: {},
    weightsync.VLLMIPCCarrier: {},
    weightsync.VLLMNCCLCarrier: {"world_size": 2},
    weightsync.SGLangNCCLCarrier: {"world_size": 2},
    WorkerGroup: {"run": print, "model": nn.Linear(2, 2), "num_workers": 1},
    VLLMEngine: {"engine": "http://localhost:1", "carrier": NullCarrier()},
    SGLangEngine: {"url": "http://localhost:1"},
    weightsync.RayTransport: {},
    Loader: {"load": print},
    WeightStrategy: {},
    WeightSyncScheme.from_backend: {"backend": "process"},
    weightsync.register_weight_sync_backend: {"backend": "one of my own"},
}
del CONSTRUCTORS[WeightSyncScheme]


def arguments_of(call: Callable[..., Any]) -> list[str]:
    found = inspect.signature(call).parameters.values()
    return [each.name for each in found if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]


def pass_each_array(call: Callable[..., Any], argument: str) -> None:
    """Pass each array for an argument. It may be accepted, as names may, or refused by an error of weightsync."""
    for array in ARRAYS:
        with contextlib.suppress(WeightSyncError):
            call(**{argument: array})


@pytest.mark.parametrize("made", CONSTRUCTORS, ids=lambda made: made.__name__)
def test_constructors_accept_arrays_or_raise_a_weightsync_error(made: Callable[..., Any]) -> None:
    for argument in arguments_of(made):
        pass_each_array(lambda **given: made(**{**CONSTRUCTORS[made], **given}), argument)


@pytest.mark.parametrize("array", ARRAYS, ids=repr)
def test_an_array_as_verify_option_is_refused(array: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^verify=.* is unknown: choose one of 'auto', 'digest', 'layout'"):
        Verify(array)


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any]]:
    ends = multiprocessing.Pipe()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("argument", ["pipes", "names", "num_workers", "expected_workers", "fence", "check_finite"])
def test_init_on_sender_accepts_arrays_or_raises_a_weightsync_error(argument: str, ends: tuple[Any, Any]) -> None:
    def init(**given: Any) -> None:
        with MultiProcessWeightSyncScheme() as scheme:
            scheme.init_on_sender("policy", **{"pipes": [ends[0]], "model": nn.Linear(2, 2), **given})

    pass_each_array(init, argument)


@pytest.mark.parametrize("argument", ["pipe", "names", "name_map", "bucket_bytes", "worker_idx", "loader"])
def test_init_on_worker_accepts_arrays_or_raises_a_weightsync_error(argument: str, ends: tuple[Any, Any]) -> None:
    def init(**given: Any) -> None:
        with MultiProcessWeightSyncScheme() as scheme:
            scheme.init_on_worker("policy", **{"pipe": ends[1], "model": nn.Linear(2, 2), **given})

    pass_each_array(init, argument)


@pytest.mark.parametrize("call", ["send", "send_async", "wait_async", "await_workers"])
def test_calls_of_a_sender_accept_arrays_or_raise_a_weightsync_error(call: str, ends: tuple[Any, Any]) -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", pipes=[ends[0]], model=nn.Linear(2, 2))
        asked = getattr(scheme.get_sender(), call)
        for argument in arguments_of(asked):
            pass_each_array(lambda **given: asked(**{"timeout": 0.0, **given}), argument)


def test_numpy_integers_are_accepted_as_ints(ends: tuple[Any, Any]) -> None:
    one = numpy.int64(1)
    assert SGLangEngine("http://localhost:1", tp_size=one, bucket_bytes=one).bucket_bytes == 1
    assert type(weightsync.DistributedWeightSyncScheme(fanout=one).fanout) is int
    with MultiProcessWeightSyncScheme() as scheme, MultiProcessWeightSyncScheme() as worker:
        model = nn.Linear(2, 2)
        scheme.init_on_sender("policy", pipes=[ends[0]], processes={0: numpy.int64(os.getpid())})
        worker.init_on_worker("policy", pipe=ends[1], model=model, worker_idx=numpy.int64(0))
        thread = threading.Thread(target=worker.connect)
        thread.start()
        scheme.connect(weights={numpy.int64(0): model.state_dict()})
        thread.join()
