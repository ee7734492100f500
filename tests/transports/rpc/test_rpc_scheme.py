"""`RPCWeightSyncScheme` with workers that have a weightsync receiver, and that stay alive."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import time
from typing import Any

import pytest
import torch
from fleet import PATIENCE, WorkerSetup, large, receive, serve_until_gone, small
from rpc_fleet import (
    World,
    attempt,
    command,
    listen,
    odd,
    retire,
    send,
    send_async,
    send_odd,
    sender_state,
    shows,
    state_dict,
    wait_async,
)
from rpc_processes import ALL_TRANSPORTS
from torch.distributed import rpc

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    Evidence,
    OutcomeKind,
    RefusedError,
    RPCWeightSyncScheme,
    State,
    StateError,
    WorkerLostError,
)
from weightsync.clock import Deadline

# ----------------------------------------------------------------------------------------------- sending


@pytest.mark.parametrize("make", [small, large])
def test_a_version_is_applied_and_acked_by_all_workers(world: World, make: Any) -> None:
    with world.syncing([0, 1, 2], make) as trainer:
        trainer.tell(send, 4.0)
        assert all(worker.do(receive) for worker in world.workers)
        report = trainer.answer()

        assert report.ok
        assert {outcome.evidence for outcome in report.outcomes.values()} == {Evidence.ANSWER}
        assert [worker.do(shows) for worker in world.workers] == [(1, {4.0})] * 3


def _key(setup: WorkerSetup, key: str | None) -> None:
    """Set the key of everything that this process creates from now on; None removes it."""
    os.environ.pop("WEIGHTSYNC_KEY", None)
    if key is not None:
        os.environ["WEIGHTSYNC_KEY"] = key


@pytest.mark.parametrize("make", [small, large])
def test_with_a_key_a_worker_applies_only_updates_of_senders_with_the_same_key(world: World, make: Any) -> None:
    worker = world.workers[0]
    for process in (world.trainer, worker):
        process.do(_key, "k")
    try:
        with world.syncing([0], make) as trainer:
            trainer.tell(send, 4.0)
            assert worker.do(receive)
            assert trainer.answer().ok

            stranger = world.workers[1]
            stranger.do(_key, "another")
            stranger.do(command, ["w0"], make)
            error = stranger.do(attempt, send, 66.0)
            assert isinstance(error, WorkerLostError)
            assert "another key" in str(error)
            assert worker.do(receive, 0) is False

            trainer.tell(send, 5.0)
            assert worker.do(receive)
            assert trainer.answer().version == 2
            assert worker.do(shows) == (2, {5.0})
            stranger.do(retire)
    finally:
        for process in (world.trainer, *world.workers):
            process.do(_key, None)


def test_a_send_works_over_torchs_default_shared_memory_transport(short_lived: Any) -> None:
    world = short_lived(1, **ALL_TRANSPORTS)
    with world.syncing([0], large) as trainer:
        trainer.tell(send, 4.0)
        assert world.workers[0].do(receive)

        assert trainer.answer().ok
        assert world.workers[0].do(shows) == (1, {4.0})


def test_weights_of_every_dtype_and_shape_arrive_bit_identical(world: World) -> None:
    with world.syncing([0], odd) as trainer:
        trainer.tell(send_odd)
        assert world.workers[0].do(receive)
        assert trainer.answer().ok
        expected, found = odd(1.0).state_dict(), world.workers[0].do(state_dict)

        assert list(expected) == list(found)
        for name, tensor in expected.items():
            assert tensor.dtype == found[name].dtype
            assert torch.equal(
                tensor.contiguous().view(-1).view(torch.uint8), found[name].reshape(-1).view(torch.uint8)
            )


def test_a_send_to_a_subset_changes_no_other_worker(world: World) -> None:
    with world.syncing([0, 1, 2]) as trainer:
        trainer.tell(send_to, 2.0, [0, 2])
        assert world.workers[0].do(receive)
        assert world.workers[2].do(receive)

        assert sorted(trainer.answer().outcomes) == [0, 2]
        assert not world.workers[1].do(receive, 0)
        assert world.workers[1].do(shows) == (None, {0.0})


def send_to(setup: WorkerSetup, fill: float, worker_ids: list[int]) -> Any:
    return send(setup, fill, worker_ids=worker_ids)


def test_send_async_sends_a_snapshot_of_the_weights(world: World) -> None:
    with world.syncing([0, 1]) as trainer:
        pending = trainer.do(send_async, 3.0)
        trainer.do(overwrite)
        assert trainer.do(sender_state)[0] == State.PENDING_ASYNC.value
        assert isinstance(trainer.do(attempt, send), StateError)
        assert all(world.workers[worker].do(receive) for worker in (0, 1))

        assert {outcome.kind for outcome in pending.outcomes.values()} == {OutcomeKind.PENDING}
        assert trainer.do(wait_async).ok
        assert world.workers[0].do(shows) == (1, {3.0})


def overwrite(setup: WorkerSetup) -> None:
    with torch.no_grad():
        for tensor in setup.model.state_dict().values():
            tensor.fill_(-1)


def test_weights_that_do_not_fit_are_refused_and_the_old_weights_stay(world: World) -> None:
    world.workers[0].do(listen, large)
    world.workers[1].do(listen)
    trainer = world.trainer
    trainer.do(command_unknown, ["w0", "w1"])
    trainer.tell(attempt, send_small)
    assert not world.workers[0].do(receive)
    assert world.workers[1].do(receive)
    error = trainer.answer()

    assert isinstance(error, RefusedError)
    assert list(error.refused) == [0]
    assert error.report.outcomes[1].kind is OutcomeKind.APPLIED
    assert world.workers[0].do(shows) == (None, {0.0})
    for process in (trainer, *world.workers[:2]):
        process.do(retire)


def command_unknown(setup: WorkerSetup, names: list[str]) -> None:
    """Create a sender without a model, so that its handshake has no layout."""
    setup.scheme = RPCWeightSyncScheme()
    setup.scheme.init_on_sender("policy", collector_infos=names)
    setup.kept["sender"] = setup.scheme.get_sender()


def send_small(setup: WorkerSetup) -> Any:
    return setup.kept["sender"].send(small(5.0), timeout=PATIENCE)


def test_thirty_versions_in_a_row_are_applied(world: World) -> None:
    with world.syncing([0]) as trainer:
        for version in range(1, 31):
            trainer.tell(send, float(version))
            assert world.workers[0].do(receive)
            assert trainer.answer().version == version
        assert world.workers[0].do(shows) == (30, {30.0})


# ------------------------------------------------------------------------------------- early senders, other workers


def test_an_update_sent_before_the_receiver_listens_waits_for_it(world: World) -> None:
    world.trainer.do(command, ["w0"])
    world.trainer.do(send_async, 7.0)
    error = world.trainer.do(attempt, wait_briefly)
    world.workers[0].do(listen)

    assert isinstance(error, AckTimeoutError)
    assert world.workers[0].do(receive)
    assert world.trainer.do(wait_async).ok
    assert world.workers[0].do(shows) == (1, {7.0})
    world.trainer.do(retire)
    world.workers[0].do(retire)


def wait_briefly(setup: WorkerSetup) -> Any:
    return wait_async(setup, timeout=0.2)


def test_waiting_calls_occupy_no_rpc_thread(world: World) -> None:
    """Each process of the world has only four threads for RPC."""
    world.trainer.do(command_many, "w0", 12)

    assert world.trainer.do(ask_pid, "w0") == world.workers[0].pid
    world.trainer.do(retire)


def command_many(setup: WorkerSetup, name: str, count: int) -> None:
    for number in range(count):
        scheme = setup.kept[number] = RPCWeightSyncScheme()
        scheme.init_on_sender(f"nobody's {number}", collector_infos=[name], model=small())


def ask_pid(setup: WorkerSetup, name: str) -> int:
    pid: int = rpc.rpc_sync(name, os.getpid, timeout=PATIENCE)
    return pid


def test_calls_without_a_receiver_return_when_the_sender_closes(world: World) -> None:
    """A graceful shutdown of RPC would wait forever for calls that do not return."""
    world.trainer.do(command_many, "w1", 3)
    assert world.trainer.do(outstanding_calls) >= 3
    world.trainer.do(retire)

    assert comes_to_rest(world)


def comes_to_rest(world: World) -> bool:
    """Whether all of the trainer's calls return."""
    deadline = time.monotonic() + PATIENCE
    while world.trainer.do(outstanding_calls) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not world.trainer.do(outstanding_calls)


def outstanding_calls(setup: WorkerSetup) -> int:
    return int(rpc.api._get_current_rpc_agent().get_debug_info()["agent.client_active_calls"])


def test_two_models_are_updated_over_one_rpc_world(world: World) -> None:
    world.workers[0].do(listen_two)
    world.trainer.do(command_two)
    world.trainer.do(send_two)

    assert world.workers[0].do(take_two) == {"actor": {1.0}, "critic": {2.0}}
    assert world.trainer.do(wait_two)
    world.trainer.do(retire)
    world.workers[0].do(retire)


def listen_two(setup: WorkerSetup) -> None:
    for model_id, make in (("actor", small), ("critic", large)):
        scheme = setup.kept[model_id] = RPCWeightSyncScheme()
        scheme.init_on_worker(model_id, model=make())


def command_two(setup: WorkerSetup) -> None:
    for model_id, model in (("actor", small(1.0)), ("critic", large(2.0))):
        scheme = setup.kept[model_id] = RPCWeightSyncScheme()
        scheme.init_on_sender(model_id, collector_infos=["w0"], model=model)


def send_two(setup: WorkerSetup) -> None:
    for scheme in setup.kept.values():
        scheme.get_sender().send_async()


def take_two(setup: WorkerSetup) -> dict[str, set[float]]:
    found = {}
    for model_id, scheme in setup.kept.items():
        receiver = scheme.get_receiver()
        assert receiver.receive(timeout=PATIENCE)
        found[model_id] = {
            value for tensor in receiver.model.state_dict().values() for value in tensor.unique().tolist()
        }
    return found


def wait_two(setup: WorkerSetup) -> bool:
    return all(scheme.get_sender().wait_async(timeout=PATIENCE).ok for scheme in setup.kept.values())


def test_a_second_sender_fences_the_first(world: World) -> None:
    with world.syncing([0]) as trainer:
        trainer.tell(send, 1.0)
        assert world.workers[0].do(receive)
        assert trainer.answer().ok
        world.workers[1].do(command, ["w0"])
        world.workers[1].tell(send, 2.0)
        assert world.workers[0].do(receive)
        assert world.workers[1].answer().ok
        fenced = trainer.do(attempt, send, 3.0)

        assert isinstance(fenced, WorkerLostError)
        assert fenced.fence > 0
        assert world.workers[0].do(shows) == (1, {2.0})
        world.workers[1].do(retire)


def test_a_sender_that_closes_says_goodbye(world: World) -> None:
    with world.syncing([0]) as trainer:
        trainer.tell(send, 1.0)
        world.workers[0].do(receive)
        trainer.answer()
        world.workers[0].tell(serve_until_gone)
        trainer.do(retire)

        assert "goodbye" in world.workers[0].answer()
        assert world.workers[0].do(shows) == (1, {1.0})


def test_the_worker_of_a_closed_receiver_is_removed_and_can_be_added_again(world: World) -> None:
    with world.syncing([0, 1]) as trainer:
        trainer.tell(send, 1.0)
        assert world.workers[0].do(receive)
        assert world.workers[1].do(receive)
        trainer.answer()
        world.workers[0].do(retire)
        trainer.tell(attempt, send, 2.0)
        assert world.workers[1].do(receive)
        assert "said goodbye" in trainer.answer().lost[0]
        assert trainer.do(sender_state)[2] == ["UP"]
        world.workers[0].do(listen)
        trainer.do(add_again, 0, "w0")

        assert world.workers[0].do(receive)
        assert world.workers[0].do(shows) == (2, {2.0})


def add_again(setup: WorkerSetup, worker_id: int, name: str) -> None:
    setup.kept["sender"].add_worker(worker_id, name)


def test_a_worker_that_already_serves_the_version_accepts_a_new_link(world: World) -> None:
    """Over a new link the weights travel until it is answered; over the former one, the worker mapped them."""
    with world.syncing([0], large) as trainer:
        for version in (1, 3):
            trainer.tell(send, float(version))
            world.workers[0].do(take_until, version)
            assert trainer.answer().ok
            trainer.do(add_again, 0, "w0")
            world.workers[0].tell(take_until, version + 1)
            trainer.do(catch_up)
            trainer.do(send, float(version + 1))
            world.workers[0].answer()
            assert world.workers[0].do(shows) == (version + 1, {float(version + 1)})


def take_until(setup: WorkerSetup, version: int) -> None:
    """Receive until this version is served. The old link never ends before the new one has arrived."""
    waited = Deadline(PATIENCE)
    while setup.receiver.version != version and not waited.passed:
        setup.receiver.receive(timeout=0.5)


def catch_up(setup: WorkerSetup) -> None:
    """Wait until the worker has reported the version that it serves over its new link."""
    sender, waited = setup.kept["sender"], Deadline(PATIENCE)
    while sender.workers[0].served != sender.version and not waited.passed:
        sender.poll()
        time.sleep(0.01)


def test_a_second_receiver_for_a_model_in_one_process_is_refused(world: World) -> None:
    world.workers[0].do(listen)

    assert isinstance(world.workers[0].do(attempt, listen_anew), ConfigurationError)
    world.workers[0].do(retire)
    world.workers[0].do(listen)
    world.workers[0].do(retire)


def listen_anew(setup: WorkerSetup) -> None:
    RPCWeightSyncScheme().init_on_worker("policy", model=small())


# ------------------------------------------------------------------------------------------- configuration, copies


def test_init_on_sender_without_initialised_rpc_is_refused() -> None:
    scheme = RPCWeightSyncScheme()
    with pytest.raises(ConfigurationError, match="not initialised"):
        scheme.init_on_sender("policy", collector_infos=["w0"], model=small())
    with pytest.raises(StateError):
        scheme.get_sender()


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "collector_infos"),
        ({"collector_infos": ["w0"], "num_workers": 2}, "num_workers"),
        ({"collector_infos": ["w0"], "collector_class": object}, "collector_rrefs"),
        ({"collector_infos": ["w0"], "collector_rrefs": [1, 2]}, "collector_rrefs"),
    ],
)
def test_init_on_sender_names_missing_or_contradictory_arguments(given: Any, missing: str) -> None:
    with pytest.raises(ConfigurationError, match=missing):
        RPCWeightSyncScheme().init_on_sender("policy", model=small(), **given)


def test_a_context_gives_what_is_not_given(world: World) -> None:
    world.workers[0].do(listen)
    world.trainer.do(command_by_context)
    world.trainer.tell(send, 6.0)

    assert world.workers[0].do(receive)
    assert world.trainer.answer().ok
    world.trainer.do(retire)
    world.workers[0].do(retire)


class Context:
    """A context with the attributes of a trainer's collector that schemes read."""

    def __init__(self) -> None:
        self.collector_infos = [rpc.get_worker_info("w0")]
        self.num_workers = 1
        self.policy = small()


def command_by_context(setup: WorkerSetup) -> None:
    setup.kept["context"] = context = Context()
    setup.scheme, setup.model = RPCWeightSyncScheme(), context.policy
    setup.scheme.init_on_sender("policy", context)
    setup.kept["sender"] = setup.scheme.get_sender()


def test_an_unknown_name_is_refused_with_a_note_that_workers_cannot_be_replaced(world: World) -> None:
    error = world.trainer.do(attempt, command, ["w0", "w9"])

    assert isinstance(error, ConfigurationError)
    assert "w9" in str(error)
    assert "cannot replace" in str(error)
    assert comes_to_rest(world)
    world.trainer.do(retire)


def test_copies_are_uninitialized_and_the_original_continues(world: World) -> None:
    with world.syncing([0]) as trainer:
        trainer.do(send_async, 8.0)
        assert trainer.do(states_of_copies) == ["uninitialized"] * 2
        assert world.workers[0].do(receive)

        assert trainer.do(wait_async).ok


def states_of_copies(setup: WorkerSetup) -> list[str]:
    made = [copy.deepcopy(setup.scheme), pickle.loads(pickle.dumps(setup.scheme))]
    for scheme in made:
        with pytest.raises(StateError):
            scheme.get_sender()
    return [
        copy.deepcopy(setup.kept["sender"]).state.value,
        pickle.loads(pickle.dumps(setup.kept["sender"])).state.value,
    ]


def test_a_forked_child_cannot_send_over_its_parents_rpc(world: World) -> None:
    with world.syncing([0]) as trainer:
        said = trainer.do(said_by_a_forked_child)
        trainer.tell(send, 1.0)
        assert world.workers[0].do(receive)

        assert "forked" in said
        assert trainer.answer().ok


def said_by_a_forked_child(setup: WorkerSetup) -> str:
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        said = attempt(setup, lambda _: RPCWeightSyncScheme().init_on_sender("policy", collector_infos=["w0"]))
        os.write(theirs, str(said).encode())
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(child, 0)
    return found


def _told(setup: WorkerSetup) -> list[str]:
    return list(setup.kept["log"].lines)


def _listen_to_the_log(setup: WorkerSetup) -> None:
    setup.kept["log"] = _Lines()


class _Lines(logging.Handler):
    """A log handler that records the lines of weightsync until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("weightsync").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def close(self) -> None:
        logging.getLogger("weightsync").removeHandler(self)
        super().close()


def _send_critic(setup: WorkerSetup, name: str) -> Any:
    with RPCWeightSyncScheme() as scheme:
        scheme.init_on_sender("critic", collector_infos=[name], model=small(1.0))
        sender, waited = scheme.get_sender(), Deadline(PATIENCE)
        sender.send_async()
        while True:
            outcome = sender.wait_async(timeout=0.05, on_failure="report")[0]
            if "none of 'critic'" in outcome.reason or waited.passed:
                return outcome


def test_a_handshake_for_another_model_id_is_reported_on_both_sides(world: World) -> None:
    worker = world.workers[0]
    with world.syncing([0]) as trainer:
        worker.do(_listen_to_the_log)

        outcome = trainer.do(_send_critic, "w0")

        assert outcome.kind is OutcomeKind.TIMED_OUT
        assert "receiver of 'policy', and none of 'critic'" in outcome.reason
        assert any("'critic'" in line and "'policy'" in line for line in worker.do(_told))
