"""An array given for an option is refused by an error that names the option: numpy compares arrays by elements."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import pytest
import torch
from skipping import require_modules
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

# NumPy before 2.4 warns before it tries to convert an array of one string to a number.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

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


def is_list_of_names(array: Any) -> bool:
    return isinstance(array, numpy.ndarray) and array.shape != () and array.dtype.kind == "U"


#: The arguments for which some arrays are accepted, as lists.
LISTS: dict[str, Callable[[Any], bool]] = {"names": is_list_of_names, "pipes": lambda array: len(array) == 0}
#: The arguments that are accepted as they are, since other classes look at them.
PASSED_ON: dict[Callable[..., Any], set[str]] = {
    weightsync.RayTransport: {"remote_collector", "remote_actor", "worker_idx", "model_id", "connection_info_name"}
}
#: What errors call an argument, where it is not its name.
CALLED = {
    "carrier": "Carrier",
    "devices": "device",
    "extract_as": "strategy",
    "pipe": "connection",
    "url": "URL",
    "weights": "Weights",
    "worker_ids": "worker",
}
#: How an error begins to say that the argument was not looked at, since this machine lacks what the object needs.
LACKING = re.compile("NCCLCarrier joins the engine's group by .*, which cannot be imported|torch finds none")


def pass_each_array(call: Callable[..., Any], argument: str) -> None:
    """Pass each array for an argument. An error has to name the argument, unless the array is a list that it takes."""
    for array in ARRAYS:
        said = ""
        try:
            call(**{argument: array})
        except WeightSyncError as error:
            said = str(error)
        if said or argument not in LISTS or not LISTS[argument](array):
            assert CALLED.get(argument, argument) in said or LACKING.search(said), array


@pytest.mark.parametrize("made", CONSTRUCTORS, ids=lambda made: made.__name__)
def test_constructors_accept_arrays_or_raise_a_weightsync_error(made: Callable[..., Any]) -> None:
    if made is weightsync.RayTransport:
        require_modules("ray", what="RAYTRANSPORT WITH ARRAYS AS OPTIONS", extra="ray")
    passed_on = PASSED_ON.get(made, set())
    for argument in arguments_of(made):
        if argument not in passed_on:
            pass_each_array(lambda **given: made(**{**CONSTRUCTORS[made], **given}), argument)
    for argument in sorted(passed_on):
        for array in ARRAYS:
            made(**{**CONSTRUCTORS[made], argument: array})


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
def test_init_on_sender_accepts_arrays_or_raises_a_weightsync_error(argument: str) -> None:
    def init(**given: Any) -> None:
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs, MultiProcessWeightSyncScheme() as scheme:
            scheme.init_on_sender("policy", **{"pipes": [ours], "model": nn.Linear(2, 2), **given})

    pass_each_array(init, argument)


@pytest.mark.parametrize("argument", ["pipe", "names", "name_map", "bucket_bytes", "worker_idx", "loader"])
def test_init_on_worker_accepts_arrays_or_raises_a_weightsync_error(argument: str) -> None:
    def init(**given: Any) -> None:
        loads = argument in {"name_map", "bucket_bytes", "loader"}
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs, MultiProcessWeightSyncScheme() as scheme:
            taker = {"loader": print} if loads else {"model": nn.Linear(2, 2)}
            scheme.init_on_worker("policy", **{"pipe": theirs, **taker, **given})

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
