"""Sends over torch.distributed: what arrives, at which workers, and TorchRL's keys in the store."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fleet import PATIENCE, Crew, constants, descriptors, filled, large, serve, shows, small
from store_fleet import StorePair, join_process_group, keys_of, leave_process_group, meet, select_model, sums
from torch import nn

from weightsync import (
    ConfigurationError,
    DistributedWeightSyncScheme,
    RefusedError,
    StateError,
    TransportError,
    WorkerLostError,
)
from weightsync.protocol.report import Evidence, OutcomeKind
from weightsync.transports.buffers import NoRoom
from weightsync.transports.pipe import framing
from weightsync.transports.store import group, link_threads, stream
from weightsync.transports.store.link import StoreLink
from weightsync.transports.store.link_threads import LinkThreads


@pytest.mark.parametrize("sync", [True, False])
def test_acked_versions_are_served_in_worker_processes(crew: Crew, store: Any, sync: bool) -> None:
    workers = crew.start(None, 2)
    scheme = DistributedWeightSyncScheme(sync=sync)
    scheme.init_on_sender("policy", store=store, num_workers=2, model=large(3.0))
    for index, worker in enumerate(workers):
        worker.do(meet, store.port, index + 1, large, "policy", sync)
        worker.tell(serve, 1)

    with scheme:
        report = scheme.get_sender().send(timeout=PATIENCE)

        assert [worker.answer() for worker in workers] == [1, 1]
        assert {Evidence.ANSWER} == {outcome.evidence for outcome in report.outcomes.values()}
        for worker in workers:
            assert worker.do(shows)[2] == {3.0}


def test_a_send_to_a_subset_changes_no_other_worker(three: StorePair) -> None:
    three.sync(worker_ids=[0, 2])

    assert [{1.0}, {0.0}, {1.0}] == [constants(model) for model in three.models]
    assert not three.receivers[1].receive(timeout=0.05)


def test_small_payloads_need_no_process_group(store: Any) -> None:
    pair = StorePair(store, model=small)
    with contextlib.closing(pair):
        pair.sync()

        assert {1.0} == constants(pair.model)
        assert not [key for key in keys_of(store) if "/group/" in key]


def test_send_async_sends_the_weights_as_of_the_call(pair: StorePair) -> None:
    pair.sender.send_async()
    filled(pair.source, 9.0)
    assert pair.receiver.receive(timeout=PATIENCE)

    assert pair.sender.wait_async(timeout=PATIENCE).ok
    assert {1.0} == constants(pair.model)


@pytest.mark.parametrize(("make", "kind"), [(large, OutcomeKind.APPLIED), (small, OutcomeKind.REFUSED)])
def test_a_worker_that_finds_a_replaced_link_first_answers_over_the_newest_in_the_same_receive(
    store: Any, monkeypatch: pytest.MonkeyPatch, make: Any, kind: OutcomeKind
) -> None:
    introduce, worker_listens = LinkThreads._introduce, threading.Event()

    def late(worker: LinkThreads, *clients: Any) -> None:
        if worker._side.rank == 0 and worker_listens.is_set():
            time.sleep(0.1)
        introduce(worker, *clients)

    monkeypatch.setattr(LinkThreads, "_introduce", late)
    trainer, worker = DistributedWeightSyncScheme(), DistributedWeightSyncScheme()
    with trainer, worker:
        trainer.init_on_sender("policy", store=store, num_workers=1, model=large(1.0))
        worker.init_on_worker("policy", store=store, rank=1, model=make())
        sender = trainer.get_sender()
        link = sender._driver.links()[0]
        assert isinstance(link, StoreLink)
        assert link._threads._connected.wait(PATIENCE)  # the worker has taken the first link
        worker_listens.set()
        sender.add_worker(0, (store, 1))
        sender.send_async()
        with pytest.raises(TransportError, match="refused") if make is small else contextlib.nullcontext():
            assert worker.get_receiver().receive(timeout=PATIENCE)

        assert sender.wait_async(timeout=PATIENCE, on_failure="report")[0].kind is kind


def test_a_refusal_is_reported_with_its_reason_and_the_worker_keeps_its_old_weights(store: Any) -> None:
    pair = StorePair(store, workers=1)
    other = DistributedWeightSyncScheme()
    model = nn.Linear(200, 100)
    before = model.weight.detach().clone()
    other.init_on_worker("policy", store=store, rank=2, model=model)
    with contextlib.closing(pair), other:
        pair.sender.add_worker(1, (store, 2))
        pair.sender.send_async()
        pair.receivers[0].receive(timeout=PATIENCE)
        with pytest.raises(ConnectionError):
            other.get_receiver().receive(timeout=PATIENCE)

        report = pair.sender.wait_async(timeout=PATIENCE, on_failure="report")

    assert OutcomeKind.APPLIED is report.outcomes[0].kind
    assert "0.weight" in report.outcomes[1].reason
    assert torch.equal(before, model.weight)


class LinearWithExtraState(nn.Linear):
    words = b""

    def get_extra_state(self) -> bytes:
        return self.words

    def set_extra_state(self, state: bytes) -> None:
        if state == b"refused":
            raise RuntimeError("no thanks")
        self.words = state


def test_a_version_that_cannot_be_applied_is_refused_with_the_traceback(store: Any) -> None:
    pair = StorePair(store, model=lambda fill: filled(LinearWithExtraState(2, 2), fill))
    with contextlib.closing(pair):
        pair.sync()
        pair.source.words = b"refused"  # type: ignore[assignment]
        pair.sender.send_async(filled(pair.source, 2.0))
        assert not pair.receiver.receive(timeout=PATIENCE)

        with pytest.raises(RefusedError, match="no thanks") as refused:
            pair.sender.wait_async(timeout=PATIENCE)
    traceback = refused.value.report.outcomes[0].remote_traceback
    assert "in set_extra_state" in traceback
    assert 'RuntimeError("no thanks")' in traceback
    assert (1, [1.0] * 4, b"") == (pair.receiver.version, pair.model.weight.flatten().tolist(), pair.model.words)


@pytest.mark.parametrize("sync", [True, False])
def test_a_payload_of_many_buckets_arrives_whole(store: Any, sync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "BUCKET_NBYTES", 10_000)
    pair = StorePair(store, sync=sync)
    with contextlib.closing(pair), torch.no_grad():
        for parameter in pair.source.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
        pair.sync()

        for name, tensor in pair.source.state_dict().items():
            assert torch.equal(tensor, pair.model.state_dict()[name])


def test_two_thousand_small_tensors_are_applied(store: Any) -> None:
    pair = StorePair(
        store, model=lambda fill: filled(nn.ParameterList(nn.Parameter(torch.zeros(64)) for _ in range(2000)), fill)
    )
    with contextlib.closing(pair):
        assert pair.sync().ok
        assert {1.0} == constants(pair.model)


def test_a_frame_larger_than_the_stores_value_limit_arrives(store: Any) -> None:
    pair = StorePair(store, model=lambda fill: filled(LinearWithExtraState(2, 2), fill))
    pair.source.words = os.urandom(2**23 + 5)  # type: ignore[assignment]
    with contextlib.closing(pair):
        pair.sync()

        assert pair.source.words == pair.model.words


def test_one_worker_serves_several_models(crew: Crew, store: Any) -> None:
    (worker,) = crew.start(None)
    with contextlib.ExitStack() as stack:
        for fill, model_id in ((2.0, "policy"), (5.0, "value.net")):
            scheme = stack.enter_context(DistributedWeightSyncScheme())
            scheme.init_on_sender(model_id, store=store, num_workers=1, model=large(fill))
            worker.do(meet, store.port, 1, large, model_id)
            worker.tell(serve, 1)
            assert scheme.get_sender().send(timeout=PATIENCE).ok
            assert 1 == worker.answer()
        worker.do(select_model, "policy")
        assert {2.0} == worker.do(shows)[2]
        worker.do(select_model, "value.net")
        assert {5.0} == worker.do(shows)[2]


def test_sends_work_beside_the_users_own_process_group(crew: Crew, store: Any) -> None:
    (worker,) = crew.start(None)
    worker.tell(join_process_group, store.port, 1, 2)
    join_process_group(None, store.port, 0, 2)  # type: ignore[arg-type]
    worker.answer()
    try:
        worker.tell(sums, 2.0)
        assert 3.0 == sums(None, 1.0) == worker.answer()
        scheme = DistributedWeightSyncScheme()
        scheme.init_on_sender("policy", store=store, num_workers=1, model=large(4.0))
        worker.do(meet, store.port, 1)
        with scheme:
            worker.tell(serve, 1)
            assert scheme.get_sender().send(timeout=PATIENCE).ok
            worker.answer()
            worker.tell(sums, 20.0)
            assert 30.0 == sums(None, 10.0) == worker.answer()
        assert {4.0} == worker.do(shows)[2]
    finally:
        worker.tell(leave_process_group)
        dist.destroy_process_group()
        worker.answer()


def test_a_second_sender_takes_over_and_the_first_is_fenced(pair: StorePair) -> None:
    pair.sync()
    second = DistributedWeightSyncScheme()
    second.init_on_sender("policy", store=pair.store, num_workers=1, model=large(7.0))
    with second:
        second.get_sender().send_async()
        while pair.receiver.incarnation == pair.sender.incarnation:
            pair.receiver.receive(timeout=0.2)
        assert second.get_sender().wait_async(timeout=PATIENCE).ok
        assert {7.0} == constants(pair.model)

        with pytest.raises(WorkerLostError, match="newer sender"):
            pair.sender.send(timeout=PATIENCE)
        assert {7.0} == constants(pair.model)


def test_a_worker_that_connects_after_the_send_gets_the_version(store: Any) -> None:
    scheme, late = DistributedWeightSyncScheme(), DistributedWeightSyncScheme()
    scheme.init_on_sender("policy", store=store, num_workers=1, model=large(6.0))
    model = large()
    with scheme, late:
        scheme.get_sender().send_async()
        late.init_on_worker("policy", store=store, rank=1, model=model)
        assert late.get_receiver().receive(timeout=PATIENCE)

        assert scheme.get_sender().wait_async(timeout=PATIENCE).ok
        assert {6.0} == constants(model)


def test_a_worker_whose_receiver_closes_is_removed_and_may_join_again(pair: StorePair) -> None:
    pair.sync()
    pair.schemes[0].close()
    again, model = DistributedWeightSyncScheme(), large()
    with again:
        again.init_on_worker("policy", store=pair.store, rank=1, model=model)
        until = time.monotonic() + PATIENCE
        while 0 in pair.sender.worker_ids and time.monotonic() < until:
            pair.sender.poll()
        pair.sender.add_worker(0, (pair.store, 1))

        assert again.get_receiver().receive(timeout=PATIENCE)
        assert {1.0} == constants(model)


def test_prefix_stores_keep_two_trainings_apart(store: Any) -> None:
    pairs = [StorePair(dist.PrefixStore(name, store)) for name in ("a", "b")]
    filled(pairs[1].source, 8.0)
    try:
        for pair in pairs:
            pair.sync()
        assert [{1.0}, {8.0}] == [constants(pair.model) for pair in pairs]
    finally:
        for pair in pairs:
            pair.close()


def test_stores_other_than_a_tcp_store_are_refused(tmp_path: Any) -> None:
    for store in (dist.HashStore(), dist.FileStore(str(tmp_path / "store"), 2)):
        with pytest.raises(ConfigurationError, match="TCPStore"):
            DistributedWeightSyncScheme().init_on_sender("policy", store=store, num_workers=1, model=small())


def test_missing_and_invalid_arguments_are_named_in_the_error(store: Any) -> None:
    with pytest.raises(ValueError, match="num_workers"):
        DistributedWeightSyncScheme().init_on_sender("policy", store=store, model=small())
    with pytest.raises(ValueError, match="rank"):
        DistributedWeightSyncScheme().init_on_worker("policy", store=store, model=small())
    with pytest.raises(ValueError, match="rank 0"):
        DistributedWeightSyncScheme().init_on_worker("policy", store=store, rank=0, model=small())
    with pytest.raises(ValueError, match="store_info"):
        DistributedWeightSyncScheme().init_on_worker("policy", rank=1, model=small())
    with pytest.raises(ValueError, match="'gloo' or 'nccl'"):
        DistributedWeightSyncScheme(backend="carrier pigeon")


@pytest.mark.parametrize(
    "info",
    [5, "127.0.0.1", {"host": "127.0.0.1"}, {"host": 5, "port": 1}, {"host": "\0", "port": 1}]
    + [{"host": "127.0.0.1", "port": port} for port in ("1", 0, -1, 2**16, True)],
)
def test_an_invalid_store_info_raises_configuration_error(info: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^store_info= is "):
        DistributedWeightSyncScheme().init_on_worker("policy", store_info=info, rank=1, model=small())


def test_the_store_timeout_is_a_number_of_seconds_or_none() -> None:
    for timeout in ("10", -1, float("nan"), True):
        with pytest.raises(ConfigurationError, match=r"^timeout= is "):
            DistributedWeightSyncScheme(timeout=timeout)
    for endless in (None, float("inf"), 1e30):
        with DistributedWeightSyncScheme(timeout=endless) as scheme:
            scheme.init_on_sender("policy", num_workers=1, model=small())
            assert scheme.get_store_info()["port"] > 0


def test_a_scheme_without_a_store_opens_one_and_pickles_its_address() -> None:
    scheme = DistributedWeightSyncScheme()
    scheme.init_on_sender("policy", num_workers=1, model=large(2.0))
    travelled, model = pickle.loads(pickle.dumps(scheme)), large()
    with scheme, travelled:
        with pytest.raises(StateError):
            travelled.get_sender()
        assert scheme.get_store_info() == travelled.get_store_info()
        travelled.init_on_worker("policy", rank=1, model=model)
        scheme.get_sender().send_async()
        assert travelled.get_receiver().receive(timeout=PATIENCE)
        assert scheme.get_sender().wait_async(timeout=PATIENCE).ok
    assert {2.0} == constants(model)


def test_close_leaves_no_thread_and_no_descriptor(store: Any) -> None:
    gc.collect()
    before, threads = _sockets_and_eventfds(descriptors), set(threading.enumerate())
    for _ in range(2):
        pair = StorePair(store)
        pair.sync()
        pair.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(30)  # as in tests/conftest.py

    assert not set(threading.enumerate()) - threads
    until = time.monotonic() + 10
    while len(_sockets_and_eventfds(descriptors)) > len(before) and time.monotonic() < until:
        gc.collect()  # torch closes a connection with the last reference to it
        time.sleep(0.05)
    assert len(before) >= len(_sockets_and_eventfds(descriptors))


def test_a_forked_child_is_uninitialized_and_the_parents_links_keep_working(pair: StorePair) -> None:
    pair.sync()
    child = os.fork()
    if child == 0:
        states = {pair.sender.state.value, pair.receiver.state.value}
        os._exit(0 if states == {"uninitialized"} else 1)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    filled(pair.source, 2.0)
    assert pair.sync().ok
    assert {2.0} == constants(pair.model)


def test_g11_a_payload_that_finds_no_memory_is_refused_and_the_next_one_is_applied(
    pair: StorePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(nbytes: int) -> Any:
        raise NoRoom(f"No memory for {nbytes} bytes.")

    monkeypatch.setattr(group, "BUCKET_NBYTES", 64 * 1024)
    with monkeypatch.context() as patched:
        patched.setattr(framing, "anonymous", none_left)
        pair.sender.send_async()
        assert pair.receiver.receive(timeout=PATIENCE) is False
    with pytest.raises(RefusedError, match="could not be received: No memory for 161200 bytes"):
        pair.sender.wait_async(timeout=PATIENCE)

    assert pair.sync().ok
    assert {1.0} == constants(pair.model)


def _sockets_and_eventfds(look: Any) -> dict[str, str]:
    found: dict[str, str] = look()
    return {fd: name for fd, name in found.items() if name.startswith(("socket:", "anon_inode:[eventfd]"))}


@pytest.mark.parametrize(("another", "wanted"), [(True, "127.0.0.9"), (False, "127.0.0.1")])
def test_a_worker_in_another_network_still_receives_versions(
    store: Any, monkeypatch: pytest.MonkeyPatch, another: bool, wanted: str
) -> None:
    """Its sender could not reach it at the address of the store, which is a loopback's."""
    names = itertools.count()
    dialled: list[str] = []
    if another:
        monkeypatch.setattr(link_threads, "own_network", lambda: f"{next(names):032x}")
    monkeypatch.setattr(stream, "host_address", lambda: "127.0.1.1")  # as on Debian
    monkeypatch.setattr(stream, "_routed_address", lambda: "127.0.0.9")
    dial = link_threads.dial
    monkeypatch.setattr(link_threads, "dial", lambda address, name: dialled.append(address) or dial(address, name))
    with contextlib.closing(StorePair(store)) as pair:
        assert pair.sync().ok
    assert [wanted] == [address.rpartition(":")[0] for address in dialled]
