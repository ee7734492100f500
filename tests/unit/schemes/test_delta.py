"""`delta=True`: a version travels as its difference from the one before, or whole to a worker without that base."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Pair, large, small
from pools import statistics
from torch import nn

from weightsync import (
    ConfigurationError,
    DistributedWeightSyncScheme,
    Loader,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    RefusedError,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightSyncScheme,
)
from weightsync.engine.delta import HeldBase
from weightsync.protocol.messages import Ack, BaseRef, NoBase, Update
from weightsync.protocol.report_codec import decode_report, encode_report
from weightsync.transports.pipe.link import PipeLink

WHOLE = sum(each.nbytes for each in large().state_dict().values())
deltas = partial(MultiProcessWeightSyncScheme, delta=True)


@pytest.fixture
def one() -> Iterator[Pair]:
    """A sender of deltas, and a receiver that serves the first version."""
    with _pair() as made:
        made.sync()
        yield made


@contextlib.contextmanager
def _pair(scheme: Any = deltas, workers: int = 1, model: Callable[..., nn.Module] = large) -> Iterator[Pair]:
    pair = Pair(scheme, workers, model)
    try:
        yield pair
    finally:
        pair.close()


def step(pair: Pair, row: int = 0) -> None:
    """Take a small step of training."""
    with torch.no_grad():
        pair.source.get_parameter("0.weight")[row] += 1.0


def bits(model: nn.Module) -> dict[str, bytes]:
    """The bytes of all weights."""
    return {name: bytes(each.flatten().view(torch.uint8).numpy().data) for name, each in model.state_dict().items()}


def send_delta_then_whole(pair: Pair) -> SyncReport:
    """Send a delta that is refused for its base, and then the whole version. Returns the report."""
    pair.sender.send_async()
    assert pair.receiver.receive(0) is False
    pair.sender.poll()
    assert pair.receiver.receive(0) is True
    return pair.sender.wait_async(timeout=PATIENCE)


def test_the_first_version_travels_whole_and_the_next_as_a_delta() -> None:
    with _pair() as one:
        first = one.sync()
        step(one)
        second = one.sync()

        assert first.payload_nbytes == {0: WHOLE}
        assert second.payload_nbytes == {0: 16 + 8 + 200 * 6}
        assert bits(one.model) == bits(one.source)
        assert one.receiver.digest() == one.sender.digest()
        assert f"{WHOLE} bytes, {second.payload_nbytes[0]} sent to 1 workers, in" in str(second)
        assert second.to_dict()["payload_nbytes"] == {"0": second.payload_nbytes[0]}
        assert decode_report(encode_report(second)) == second


def test_the_trainers_scheme_alone_enables_deltas() -> None:
    ours, theirs = multiprocessing.Pipe()
    with deltas() as trainer, MultiProcessWeightSyncScheme() as worker, ours, theirs:
        source, model = large(1.0), large()
        trainer.init_on_sender("policy", pipes=[ours], model=source)
        worker.init_on_worker("policy", pipe=theirs, model=model)
        for expected in (WHOLE, 16):
            trainer.get_sender().send_async()
            worker.get_receiver().receive(0)
            assert trainer.get_sender().wait_async(timeout=PATIENCE).payload_nbytes == {0: expected}


def test_without_deltas_no_base_is_kept_and_the_report_has_no_payload_sizes() -> None:
    with _pair(MultiProcessWeightSyncScheme) as plain:
        report = plain.sync()

        assert report.payload_nbytes == {}
        assert plain.receiver.driver.held._update is None


def test_a_version_that_changes_most_weights_travels_whole(one: Pair) -> None:
    for parameter in one.source.parameters():
        parameter.data += 1.0
    report = one.sync()

    assert report.payload_nbytes == {0: WHOLE}
    assert bits(one.model) == bits(one.source)


class Everything(nn.Module):
    """A module with elements of each kind, and with extra state."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        for number, dtype in enumerate(
            (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.int8, torch.bool, torch.complex64)
        ):
            values = torch.full((7, 300), fill).to(dtype)
            self.register_buffer(f"b{number}", values)
        self.extra: Any = {"fill": fill}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_deltas_of_each_kind_of_dtype_arrive_bit_identical_with_extra_state() -> None:
    with _pair(model=Everything) as pair:
        pair.sync()
        patterns = {"b0": [0x7FC00001, -1, 1 << 31], "b1": [0x7FC1, -1], "b2": [-1, 1], "b3": [-1, 2**62], "b5": [1, 0]}
        widths = {"b0": torch.int32, "b1": torch.int16, "b2": torch.int8, "b3": torch.int64, "b5": torch.uint8}
        for name, values in patterns.items():
            found = pair.source.get_buffer(name).view(widths[name])[3]
            found[: len(values)] = torch.tensor(values).to(widths[name])
        pair.source.extra = {"step": 2}
        report = pair.sync()

        assert report.payload_nbytes[0] < report.nbytes / 10
        assert bits_of_buffers(pair.model) == bits_of_buffers(pair.source)
        assert pair.model.extra == {"step": 2}


def test_payload_nbytes_distinguish_deltas_from_whole_versions_with_extra_state() -> None:
    with _pair(model=Everything) as pair:
        first = pair.sync()
        pair.source.get_buffer("b0").add_(1)
        second = pair.sync()
        pair.receiver.driver.held.drop()
        third = send_delta_then_whole(pair)

        assert first.payload_nbytes == {0: first.nbytes}
        assert second.payload_nbytes[0] < second.nbytes
        assert third.payload_nbytes[0] > third.nbytes


def bits_of_buffers(model: nn.Module) -> list[bytes]:
    return [bytes(each.flatten().view(torch.uint8).numpy().data) for each in model.buffers()]


def test_a_worker_without_the_base_gets_the_whole_version_within_the_same_send(one: Pair) -> None:
    step(one)
    one.receiver.driver.held.drop()
    report = send_delta_then_whole(one)
    delta = 16 + 8 + 200 * 6

    assert (report[0].kind, report.version) == (OutcomeKind.APPLIED, 2)
    assert report.payload_nbytes == {0: delta + WHOLE}
    assert bits(one.model) == bits(one.source)
    step(one, 1)
    assert one.sync().payload_nbytes == {0: delta}


def test_a_duplicate_base_refusal_is_followed_by_the_whole_version_only_once(one: Pair) -> None:
    step(one)
    one.receiver.driver.held.drop()
    one.sender.send_async()
    one.receiver.receive(0)
    again = NoBase(model_id="policy", incarnation=one.sender.incarnation, version=2)
    one.receiver.driver.links()[0].send(again)
    one.sender.poll()
    one.receiver.receive(0)
    report = one.sender.wait_async(timeout=PATIENCE)

    assert report.payload_nbytes == {0: 16 + 8 + 200 * 6 + WHOLE}


@pytest.mark.parametrize(("version", "older"), [(1, 0), (2, 1), (7, 0)])
def test_a_base_refusal_for_another_version_or_incarnation_is_ignored(one: Pair, version: int, older: int) -> None:
    one.sender.send_async()
    refused = NoBase(model_id="policy", incarnation=one.sender.incarnation - older, version=version)
    one.receiver.driver.links()[0].send(refused)
    one.sender.poll()
    one.receiver.receive(0)
    report = one.sender.wait_async(timeout=PATIENCE)

    assert (report.ok, report.payload_nbytes) == (True, {0: 16})


def test_a_worker_whose_link_fails_while_the_whole_version_is_resent_is_lost(
    one: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("broken")

    step(one)
    one.receiver.driver.held.drop()
    one.sender.send_async()
    one.receiver.receive(0)
    monkeypatch.setattr(PipeLink, "send", fails)
    one.sender.poll()
    report = one.sender.wait_async(timeout=PATIENCE, on_failure="report")

    assert (report[0].kind, report[0].reason) == (OutcomeKind.LOST, "broken")


def test_a_superseded_delta_whose_base_is_refused_is_not_resent(one: Pair) -> None:
    one.receiver.driver.held.drop()
    step(one)
    one.sender.send_async()
    step(one)
    one.sender.send_async(on_pending="supersede")
    assert one.receiver.receive(0) is True
    report = one.sender.wait_async(timeout=PATIENCE)

    assert report.payload_nbytes == {0: WHOLE}
    assert one.receiver.receive(0) is False
    assert (one.receiver.version, bits(one.model)) == (3, bits(one.source))


def test_a_superseded_delta_is_not_resent_even_if_another_worker_still_applies_it() -> None:
    with _pair(workers=2) as two:
        two.sync()
        two.receiver.driver.held.drop()
        step(two)
        two.sender.send_async()
        step(two)
        two.sender.send_async(worker_ids=[0], on_pending="supersede")
        assert two.receiver.receive(0) is True
        report = two.sender.wait_async(timeout=PATIENCE)

        assert report.payload_nbytes == {0: WHOLE}
        assert two.receiver.receive(0) is False
        assert two.receivers[1].receive(0) is True
        assert [receiver.version for receiver in two.receivers] == [3, 2]
        two.sender.poll()
        assert two.sender.stale_answers == 2  # one says superseded, the other says applied


def test_an_abandoned_delta_is_a_base_only_once_it_was_acked(one: Pair) -> None:
    step(one)
    one.sender.send_async()
    step(one)
    one.sender.send_async(on_pending="supersede")
    one.receiver.receive(0)
    report = one.sender.wait_async(timeout=PATIENCE)

    assert report.payload_nbytes == {0: WHOLE}
    assert bits(one.model) == bits(one.source)


def test_after_a_refusal_the_next_version_travels_whole(one: Pair) -> None:
    step(one)
    one.sender.send_async()
    one.receiver.take_update(PATIENCE)
    one.receiver.nack(ValueError("not now"))
    with pytest.raises(RefusedError, match="not now"):
        one.sender.wait_async(timeout=PATIENCE)

    assert one.sync().payload_nbytes == {0: WHOLE}
    assert bits(one.model) == bits(one.source)


def test_take_update_of_a_delta_returns_whole_weights_which_are_the_base_once_acked(one: Pair) -> None:
    step(one)
    one.sender.send_async()
    weights = one.receiver.take_update(PATIENCE)
    one.receiver.ack()
    one.sender.wait_async(timeout=PATIENCE)
    step(one)

    assert torch.equal(weights["0.weight"], one.source.get_parameter("0.weight") - one_row())
    assert one.sync().payload_nbytes[0] < WHOLE / 10
    assert bits(one.model) == bits(one.source)


def one_row() -> torch.Tensor:
    found = torch.zeros(100, 200)
    found[0] = 1.0
    return found


def test_apply_weights_does_not_change_the_base(one: Pair) -> None:
    one.receiver.apply_weights({name: torch.full_like(each, 9.0) for name, each in one.model.state_dict().items()})
    step(one)
    report = one.sync()

    assert report.payload_nbytes[0] < WHOLE / 10
    assert bits(one.model) == bits(one.source)


@pytest.mark.parametrize("model", [small, large])
def test_a_loader_that_writes_into_its_tensors_does_not_change_the_base(model: Callable[[float], nn.Module]) -> None:
    loaded: dict[str, torch.Tensor] = {}

    def load(weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        loaded.update({name: tensor.mul_(2) for name, tensor in weights})

    with _pair(model=lambda fill: model(fill) if fill else Loader(load)) as pair:
        for version in range(1, 4):
            report = pair.sync()
            sent = pair.source.state_dict()

            assert report[0].kind is OutcomeKind.APPLIED
            assert (report.payload_nbytes[0] < report.nbytes) is (version > 1)
            assert all(torch.equal(loaded[name], sent[name] * 2) for name in sent)
            step(pair)


def test_an_overwritten_base_is_detected_by_the_digest_of_the_result(one: Pair) -> None:
    one.receiver.driver.held._payload[12345] ^= 1
    step(one)
    before = bits(one.model)
    with pytest.raises(RefusedError, match="damaged"):
        one.sync()

    assert bits(one.model) == before
    assert one.sync().payload_nbytes == {0: WHOLE}
    assert bits(one.model) == bits(one.source)


def test_each_worker_gets_a_delta_only_if_it_serves_the_version_before() -> None:
    with _pair(workers=3) as three:
        three.sync()
        step(three)
        three.sync(worker_ids=[0, 1])
        step(three)
        report = three.sync()
        delta = 16 + 8 + 200 * 6

        assert report.payload_nbytes == {0: delta, 1: delta, 2: WHOLE}
        assert [bits(model) for model in three.models] == [bits(three.source)] * 3


def test_a_new_link_carries_no_deltas_until_a_version_was_acked_over_it(one: Pair) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, deltas() as scheme:
        model = large()
        one.schemes[0].close()
        one.sender.poll()
        scheme.init_on_worker("policy", pipe=theirs, model=model)
        one.sender.add_worker(0, ours)
        step(one)
        reports = []
        for version in (2, 3):
            one.sender.send_async()
            while scheme.get_receiver().version != version:
                one.sender.poll()
                scheme.get_receiver().receive(0)
            reports.append(one.sender.wait_async(timeout=PATIENCE).payload_nbytes)

        # The version behind the handshake and the one after that travel whole, the next one as a delta.
        assert reports == [{0: WHOLE}, {0: 16}]
        assert bits(model) == bits(one.source)


def test_chosen_weights_that_are_cast_travel_as_deltas() -> None:
    def narrow(fill: float) -> nn.Module:
        return large(fill) if fill else large(fill).bfloat16()

    ours, theirs = multiprocessing.Pipe()
    with deltas(wire_dtype="bfloat16") as trainer, deltas() as worker, ours, theirs:
        source, model = narrow(1.0), narrow(0.0)
        trainer.init_on_sender("policy", pipes=[ours], model=source, names=["0.*"])
        worker.init_on_worker("policy", pipe=theirs, model=model, names=["0.*"])
        for expected in (2 * (200 * 100 + 100), 16 + 8 + 200 * 4):
            trainer.get_sender().send_async()
            worker.get_receiver().receive(0)
            assert trainer.get_sender().wait_async(timeout=PATIENCE).payload_nbytes == {0: expected}
            with torch.no_grad():
                source.get_parameter("0.weight")[3] += 1.0
        assert not model.get_parameter("1.weight").any()


def test_weights_whose_layout_has_changed_travel_whole() -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, deltas() as trainer, deltas() as worker:
        trainer.init_on_sender("policy", pipes=[ours])
        loaded: dict[str, torch.Tensor] = {}
        worker.init_on_worker("policy", pipe=theirs, model=Loader(lambda weights, _: loaded.update(weights)))
        for count in (20_000, 25_000):
            weights = {"w": torch.arange(float(count))}
            trainer.get_sender().send_async(weights)
            worker.get_receiver().receive(0)
            report = trainer.get_sender().wait_async(timeout=PATIENCE)

            assert report.payload_nbytes == {0: 4 * count}
            assert torch.equal(loaded["w"], weights["w"])


def test_per_worker_weights_travel_whole() -> None:
    with deltas(per_worker_weights=True) as trainer, contextlib.ExitStack() as ends:
        pipes = [multiprocessing.Pipe() for _ in range(2)]
        for pipe in pipes:
            for end in pipe:
                ends.enter_context(end)
        trainer.init_on_sender("policy", pipes=[ours for ours, _ in pipes], model=large(1.0))
        workers = [ends.enter_context(deltas()) for _ in pipes]
        models = [large() for _ in pipes]
        for worker, (_, theirs), model in zip(workers, pipes, models, strict=True):
            worker.init_on_worker("policy", pipe=theirs, model=model)
        sender = trainer.get_sender()
        for round_ in range(2):
            for worker_id in range(2):
                sender.send_async(large(float(worker_id + round_)), worker_id)
                workers[worker_id].get_receiver().receive(0)
                assert sender.wait_async(timeout=PATIENCE).payload_nbytes == {worker_id: WHOLE}

        assert [bits(model) for model in models] == [bits(large(1.0)), bits(large(2.0))]


_HELD = Update(model_id="m", incarnation=3, version=2, layout_digest=b"", digest=b"d" * 16, base=BaseRef())


@pytest.mark.parametrize(
    ("incarnation", "base", "holds"),
    [
        (3, BaseRef(version=2, digest=b"d" * 16), True),
        (4, BaseRef(version=2, digest=b"d" * 16), False),
        (3, BaseRef(version=1, digest=b"d" * 16), False),
        (3, BaseRef(version=2, digest=b"e" * 16), False),
        (3, None, False),
    ],
    ids=["it", "another sender's", "another version", "other weights", "no delta"],
)
def test_a_held_base_matches_only_if_sender_version_and_digest_match(
    incarnation: int, base: BaseRef | None, holds: bool
) -> None:
    held = HeldBase()
    update = Update(model_id="m", incarnation=incarnation, version=5, layout_digest=b"", base=base)
    assert not held.holds(update)
    held.keep(_HELD, memoryview(bytearray(4)))

    assert held.holds(update) is holds


@pytest.mark.parametrize("scheme", [deltas, MultiProcessWeightSyncScheme], ids=["deltas", "none"])
def test_deltas_need_no_additional_buffer_in_the_trainer(scheme: Any) -> None:
    with _pair(scheme) as one:
        for _ in range(5):
            one.sync()
            step(one)

        assert statistics(one.sender._packer._pool).buffers == 2


@pytest.mark.untraced("puts an update on the wire that no step has asked for")
def test_a_duplicate_delta_is_acked_again_although_its_base_is_gone(one: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, Any]] = []
    send = PipeLink.send

    def watched(link: PipeLink, message: Any, payload: Any = None) -> None:
        sent.append((message, payload))
        send(link, message, payload)

    step(one)
    monkeypatch.setattr(PipeLink, "send", watched)
    report = one.sync()
    update = next(each for each in sent if isinstance(each[0], Update))
    send(one.sender.transports()[0], *update)
    assert one.receiver.receive(0) is False
    one.sender.poll()

    assert (update[0].base.version, report.ok, one.sender.stale_answers) == (1, True, 1)
    assert [type(each) for each, _ in sent] == [Update, Ack, Ack]


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, partial(WeightSyncScheme.from_backend, "shared")])
def test_shared_memory_refuses_deltas(scheme: Any) -> None:
    with pytest.raises(ConfigurationError, match="faster than any delta"):
        scheme(delta=True)


@pytest.mark.parametrize("scheme", [MultiProcessWeightSyncScheme, DistributedWeightSyncScheme])
def test_delta_requires_digests_and_a_bool(scheme: Any) -> None:
    with pytest.raises(ConfigurationError, match="verify='layout'"):
        scheme(delta=True, verify="layout")
    with pytest.raises(ConfigurationError, match="delta='yes' is not a bool"):
        scheme(delta="yes")
