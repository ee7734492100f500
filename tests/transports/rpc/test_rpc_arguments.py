"""Invalid names of workers are refused before anything is sent, with a message that says what to give instead."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import receive, small
from rpc_fleet import World, attempt, command, listen, retire, send
from torch.distributed import rpc

from weightsync import ConfigurationError, RPCWeightSyncScheme


@pytest.mark.parametrize("name", ["collector_infos", "collector_rrefs"])
@pytest.mark.parametrize("given", ["w0", 1, {"w0"}, {0: "w0"}])
def test_collector_arguments_that_are_not_lists_are_refused(name: str, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}= is .*one entry per worker"):
        RPCWeightSyncScheme().init_on_sender("policy", model=small(), **{name: given})


@pytest.mark.parametrize("given", [None, 70_000, 2**70, -1])
def test_values_that_name_no_worker_are_refused(given: Any, world: World) -> None:
    error = world.trainer.do(attempt, command, [given])

    assert isinstance(error, ConfigurationError)
    assert "worker 0" in str(error)
    world.trainer.do(retire)


def command_by_reference(setup: Any) -> None:
    command(setup, ["w0"], small, {"collector_rrefs": ["a collector"]})


def test_a_collector_rref_that_is_not_an_rref_is_refused(world: World) -> None:
    error = world.trainer.do(attempt, command_by_reference)

    assert isinstance(error, ConfigurationError)
    assert "rpc.remote()" in str(error)
    world.trainer.do(retire)


def command_twice(setup: Any, how: str) -> None:
    command(setup, ["w0", {"name": "w0", "rank": 1, "info": rpc.get_worker_info("w0")}[how]])


@pytest.mark.parametrize("how", ["name", "rank", "info"])
def test_a_worker_given_twice_by_name_rank_or_info_is_refused(how: str, world: World) -> None:
    error = world.trainer.do(attempt, command_twice, how)

    assert isinstance(error, ConfigurationError)
    assert "workers 0 and 1 are the same" in str(error)
    world.trainer.do(retire)


def test_a_generator_of_workers_is_accepted(world: World) -> None:
    world.workers[0].do(listen)
    world.trainer.do(command_by_generator)
    world.trainer.tell(send, 6.0)

    assert world.workers[0].do(receive)
    assert world.trainer.answer().ok
    world.trainer.do(retire)
    world.workers[0].do(retire)


def command_by_generator(setup: Any) -> None:
    command(setup, (name for name in ["w0"]))  # type: ignore[arg-type]
