"""A loader in place of a model: it gets each version whole, and the ack says that it has taken all of it."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from fleet import PATIENCE, SCHEMES, Pair, large, small
from torch import Tensor, nn

from weightsync import (
    ConfigurationError,
    Evidence,
    Layout,
    LayoutError,
    Loader,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    PartlyLoadedError,
    State,
    WeightSyncError,
    WorkerLostError,
)
from weightsync.weights.loader import buckets, draw, renamed
from weightsync.weights.packing import pack
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.tensors import address_of


class LinearWithExtraState(nn.Linear):
    """A layer with extra state."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def get_extra_state(self) -> int:
        return 3


class Engine:
    """An engine that keeps what its loader gets, and then calls a function that the test has set."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.versions: list[int] = []
        self.then: Callable[[], None] = lambda: None

    def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.held = {name: tensor.clone() for name, tensor in weights}
        self.versions.append(version)
        self.then()


def model_or_loader(
    engine: Engine, trainer: Callable[[float], nn.Module] = small, **options: Any
) -> Callable[[float], Any]:
    """A function that makes the trainer's model, and for the argument 0 the worker's loader."""
    return lambda fill: trainer(fill) if fill else Loader(**{"load": engine.load, **options})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def pair(engine: Engine, scheme_class: Any) -> Iterator[Pair]:
    made = Pair(scheme_class, model=model_or_loader(engine))
    yield made
    made.close()


def loss_reason(pair: Pair) -> str:
    """Make the receiver break down. Returns the reason for the worker's loss in the trainer's report."""
    pair.sender.send_async()
    with pytest.raises(WeightSyncError, match="the model serves nothing"):
        pair.receiver.receive(timeout=0)
    with pytest.raises(WorkerLostError) as caught:
        pair.sender.wait_async(timeout=PATIENCE)
    assert (pair.receiver.state, pair.receiver.version) == (State.CLOSED, None)
    reason: str = caught.value.report[0].reason
    return reason


@pytest.mark.parametrize("trainer", [small, large])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_loader_gets_every_tensor_and_the_ack_follows_its_return(name: str, trainer: Any, engine: Engine) -> None:
    pair = Pair(SCHEMES[name], model=model_or_loader(engine, trainer))
    nn.init.normal_(pair.source[0].weight)
    engine.then = lambda: kinds.append(pair.sender.poll()[0].kind)
    kinds: list[OutcomeKind] = []
    outcome = pair.sync()[0]

    assert kinds == [OutcomeKind.PENDING]
    assert (outcome.kind, outcome.evidence) == (OutcomeKind.APPLIED, Evidence.ANSWER)
    assert (engine.versions, pair.receiver.version) == ([1], 1)
    sent = pair.source.state_dict()
    assert engine.held.keys() == sent.keys()
    assert all(torch.equal(engine.held[each], sent[each]) for each in sent)
    pair.close()


def test_a_loader_that_raises_refuses_the_version_and_the_next_one_is_loaded(pair: Pair, engine: Engine) -> None:
    pair.sync()
    engine.then = lambda: (_ for _ in ()).throw(RuntimeError("out of blocks"))
    pair.sender.send_async()
    assert pair.receiver.receive(timeout=0) is False
    outcome = pair.sender.wait_async(timeout=PATIENCE, on_failure="report")[0]

    assert (outcome.kind, outcome.evidence) == (OutcomeKind.REFUSED, Evidence.ANSWER)
    assert outcome.reason == "RuntimeError: out of blocks"
    assert "in load" in outcome.remote_traceback
    assert "\nRuntimeError: out of blocks\n" in str(outcome)
    assert (pair.receiver.version, pair.receiver.state) == (1, State.READY)
    engine.then = lambda: None
    assert pair.sync().ok
    assert pair.receiver.version == 3


def test_the_refusal_of_a_loader_that_raises_midway_advises_partly_loaded_error(scheme_class: Any) -> None:
    def load(weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        next(weights)
        raise MemoryError

    pair = Pair(scheme_class, model=model_or_loader(Engine(), load=load))
    pair.sender.send_async()
    assert pair.receiver.receive(timeout=0) is False
    outcome = pair.sender.wait_async(timeout=PATIENCE, on_failure="report")[0]

    assert (outcome.kind, outcome.reason) == (OutcomeKind.REFUSED, "MemoryError")
    assert outcome.remote_traceback.splitlines()[-2] == "MemoryError"
    assert "had taken 1 of " in outcome.remote_traceback.splitlines()[-1]
    assert "it has to raise PartlyLoadedError" in outcome.remote_traceback.splitlines()[-1]
    pair.close()


def test_partly_loaded_error_closes_the_receiver_which_serves_nothing(pair: Pair, engine: Engine) -> None:
    pair.sync()
    engine.then = lambda: (_ for _ in ()).throw(PartlyLoadedError("layer 7 of 32 is loaded"))
    assert "had begun to change the engine: layer 7 of 32 is loaded" in loss_reason(pair)


def test_an_interrupted_loader_closes_the_receiver_which_serves_nothing(pair: Pair, engine: Engine) -> None:
    engine.then = lambda: (_ for _ in ()).throw(SystemExit(3))
    assert "interrupted: SystemExit(3)" in loss_reason(pair)


def test_a_loader_that_takes_only_some_tensors_is_never_acked(scheme_class: Any) -> None:
    half: list[str] = []

    def load(weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        half.extend(next(weights)[0] for _ in range(2))

    pair = Pair(scheme_class, model=model_or_loader(Engine(), load=load))
    assert f"returned after 2 of {len(pair.source.state_dict())} tensors" in loss_reason(pair)
    pair.close()


@pytest.mark.parametrize("make", [lambda: load_later([], 1), Future], ids=["coroutine", "future"])
def test_a_loader_that_returns_a_coroutine_or_future_is_never_acked(scheme_class: Any, make: Callable[[], Any]) -> None:
    def load(weights: Iterator[tuple[str, Tensor]], version: int) -> Any:
        list(weights)
        return make()

    pair = Pair(scheme_class, model=model_or_loader(Engine(), load=load))
    assert "which nothing awaits here: it must return once all is loaded" in loss_reason(pair)
    pair.close()


def test_a_version_of_which_a_loader_takes_no_tensor_is_refused(scheme_class: Any) -> None:
    async def load(weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Never run: the coroutine is not awaited."""

    pair = Pair(
        scheme_class, model=model_or_loader(Engine(), load=lambda weights, version: load(weights, version).close())
    )
    pair.sender.send_async()
    assert pair.receiver.receive(timeout=0) is False
    outcome = pair.sender.wait_async(timeout=PATIENCE, on_failure="report")[0]
    assert outcome.kind is OutcomeKind.REFUSED
    assert "without taking any of the" in outcome.reason
    assert pair.receiver.state is State.READY
    pair.close()


def test_a_weights_iterator_that_a_loader_keeps_yields_nothing_afterwards(scheme_class: Any) -> None:
    kept: list[Iterator[Any]] = []

    def load(weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        kept.append(weights)
        next(weights)
        raise RuntimeError("no room for the others")

    pair = Pair(scheme_class, model=model_or_loader(Engine(), load=load))
    pair.sender.send_async()
    assert pair.receiver.receive(timeout=0) is False
    assert list(kept[0]) == []
    pair.close()


def test_a_loader_that_writes_into_its_tensors_changes_no_other_worker_or_later_version(scheme_class: Any) -> None:
    seen: list[set[float]] = []

    def load(weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        found = [tensor for _, tensor in weights]
        seen.append({value for tensor in found for value in tensor.flatten().tolist()})
        for tensor in found:
            tensor.zero_()

    pair = Pair(scheme_class, workers=2, model=model_or_loader(Engine(), trainer=large, load=load))
    pair.scheme.get_sender().send_async()
    for version in range(1, 5):
        for receiver in pair.receivers:
            receiver.receive(timeout=PATIENCE)
        pair.sender.wait_async(timeout=PATIENCE)
        with torch.no_grad():
            for parameter in pair.source.parameters():
                parameter.fill_(version + 1.0)
        pair.sender.send_async()
    pair.sender.abandon()
    assert seen == [{1.0}, {1.0}, {2.0}, {2.0}, {3.0}, {3.0}, {4.0}, {4.0}]
    pair.close()


def test_name_map_renames_tensors_and_a_map_of_unknown_names_is_refused(engine: Engine, scheme_class: Any) -> None:
    pair = Pair(scheme_class, model=model_or_loader(engine, name_map={"0.weight": "model.embed.weight"}))
    assert pair.sync().ok
    assert "model.embed.weight" in engine.held
    assert "0.weight" not in engine.held
    pair.close()
    pair = Pair(scheme_class, model=model_or_loader(engine, name_map={"lm_head.weight": "head"}))
    pair.sender.send_async()
    assert pair.receiver.receive(timeout=0) is False
    outcome = pair.sender.wait_async(timeout=PATIENCE, on_failure="report")[0]
    assert "name_map= maps 'lm_head.weight', but the weights have no such tensors" in outcome.reason
    assert engine.versions == [1]
    pair.close()


def test_a_name_map_that_gives_two_tensors_one_name_is_refused() -> None:
    layout = Layout([("a", "float32", (1,)), ("b", "float32", (1,))])
    with pytest.raises(LayoutError, match="several tensors the name 'b'"):
        renamed(layout, {"a": "b"})
    assert renamed(layout, {"a": "b", "b": "a"}) == ["b", "a"]


def test_a_loader_gets_tensors_in_the_wire_dtype(engine: Engine) -> None:
    pair = Pair(lambda: MultiProcessWeightSyncScheme(wire_dtype="bfloat16"), model=model_or_loader(engine))
    assert pair.sync().ok
    kinds = {tensor.dtype for tensor in engine.held.values()}
    assert kinds == {torch.bfloat16, torch.int64}  # BatchNorm's counter is not cast
    pair.close()


def test_extra_state_is_refused_before_the_loader_is_called(engine: Engine) -> None:
    pair = Pair(MultiProcessWeightSyncScheme, model=model_or_loader(engine, lambda _: LinearWithExtraState()))
    pair.sender.send_async()
    assert pair.receiver.receive(timeout=0) is False
    assert "A loader takes tensors, but the weights have the extra state of ['']" in pair.receiver.last_refusal
    assert engine.versions == []
    pair.close()


def test_weights_of_an_engine_can_be_neither_read_nor_applied_by_hand(pair: Pair) -> None:
    pair.sync()
    with pytest.raises(ConfigurationError, match="cannot be read here"):
        pair.receiver.digest()
    with pytest.raises(ConfigurationError, match="cannot be read here"):
        _ = pair.receiver.target().layout
    with pytest.raises(ConfigurationError, match="a loader instead of a model"):
        pair.receiver.apply_weights({"a": torch.ones(1)})
    assert pair.sync().ok


def test_apply_weights_with_the_pending_versions_weights_loads_them(pair: Pair, engine: Engine) -> None:
    pair.sender.send_async()
    pair.receiver.apply_weights(pair.source.state_dict())
    assert pair.sender.wait_async(timeout=PATIENCE).ok
    assert engine.versions == [1]


# --------------------------------------------------------------------------------------------- buckets and views


def packed(readonly: bool = False) -> tuple[Layout, memoryview, dict[str, Tensor]]:
    weights = {f"w{i}": torch.full((100 + i,), float(i)) for i in range(10)} | {"n": torch.arange(7)}
    read = read_weights(weights)
    layout = layout_of(read)
    flat = torch.empty(layout.nbytes, dtype=torch.uint8).numpy().data
    pack(read, layout, flat)
    return layout, flat.toreadonly() if readonly else flat, weights


def test_loader_tensors_are_views_of_the_arrived_payload() -> None:
    layout, payload, weights = packed()
    found = dict(draw(layout, payload, None, 1024))
    start = address_of(payload)
    assert all(start <= tensor.data_ptr() < start + layout.nbytes for tensor in found.values())
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert found.keys() == weights.keys()


@pytest.mark.parametrize("readonly", [False, True])
def test_a_loader_gets_tensors_of_a_dtype_that_has_only_empty_tensors(readonly: bool) -> None:
    weights = {"w": torch.arange(3.0), "none": torch.empty(0, 2, dtype=torch.float16)}
    layout = layout_of(read_weights(weights))
    payload = torch.zeros(layout.nbytes, dtype=torch.uint8).numpy().data
    pack(read_weights(weights), layout, payload)
    found = dict(draw(layout, payload.toreadonly() if readonly else payload, None, 1024))

    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (each.dtype, each.shape) for name, each in weights.items()
    }


def test_a_loader_can_save_tensors_of_several_dtypes_with_torch() -> None:
    layout, payload, weights = packed()
    file = io.BytesIO()
    torch.save(dict(draw(layout, payload, None, 1 << 30)), file)
    file.seek(0)
    saved = torch.load(file)

    assert len({tensor.dtype for tensor in saved.values()}) > 1
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


def test_a_readonly_payload_is_copied_one_bucket_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, payload, weights = packed(readonly=True)
    copied: list[int] = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda self: (copied.append(self.numel()), clone(self))[1])
    drawn = draw(layout, payload, None, 1024)
    found = {}
    for number, (name, tensor) in enumerate(drawn):
        found[name] = tensor
        assert sum(copied[:-1]) < sum(each.nbytes for each in found.values()) + 64, number  # no bucket is copied ahead
    assert len(copied) > 3
    assert max(copied) <= 1024
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_small_buckets_hold_one_tensor_each_and_large_buckets_a_whole_group() -> None:
    layout, _, _ = packed()
    assert [last - first for first, last in buckets(layout, 1)] == [1] * len(layout.entries)
    runs = list(buckets(layout, 1 << 30))
    assert [index for first, last in runs for index in range(first, last)] == list(range(len(layout.entries)))
    assert len(runs) == len(layout.groups)


@pytest.mark.parametrize("nbytes", [1, 400, 900, 1 << 10, 1 << 11, 1 << 30])
def test_a_bucket_is_filled_up_to_the_size_asked_for(nbytes: int) -> None:
    layout, _, _ = packed()
    entries, runs = layout.entries, list(buckets(layout, nbytes))
    ends = {group.last for group in layout.groups}

    def size(first: int, last: int) -> int:
        return entries[last - 1].offset + entries[last - 1].nbytes - entries[first].offset

    assert [index for first, last in runs for index in range(first, last)] == list(range(len(entries)))
    assert all(size(first, last) <= nbytes or last == first + 1 for first, last in runs)
    assert all(last in ends or size(first, last + 1) > nbytes for first, last in runs)


# ---------------------------------------------------------------------------------------------------- arguments


async def load_later(weights: object, version: int) -> None:
    """A loader that would never run, since its coroutine is not awaited."""


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"loader": 3}, "give a function"),
        ({"loader": load_later}, "which is async"),
        ({"loader": print, "model": nn.Linear(1, 1)}, "model= and loader="),
        ({"model": nn.Linear(1, 1), "name_map": {"a": "b"}}, "name_map= can be given with loader= only"),
        ({"loader": print, "name_map": ["a"]}, "give a mapping"),
        ({"loader": print, "name_map": {"a": None}}, "give a mapping"),
        ({"loader": print, "bucket_bytes": 0}, "1 or more"),
        ({"loader": print, "bucket_bytes": True}, "1 or more"),
        ({}, "need model=, loader="),
    ],
)
def test_invalid_or_contradictory_loader_arguments_are_refused(
    given: dict[str, Any], match: str, pipe_pair: Any
) -> None:
    scheme = MultiProcessWeightSyncScheme()
    with pytest.raises(ConfigurationError, match=match):
        scheme.init_on_worker("policy", pipe=pipe_pair[1], **given)
    assert not scheme.initialized_on_receiver


@pytest.fixture
def pipe_pair() -> Iterator[Any]:
    pair = Pair(MultiProcessWeightSyncScheme, workers=1)
    yield pair.pipes[0]
    pair.close()


def test_a_generation_b_worker_with_a_loader_receives_version_numbers(engine: Engine, scheme_class: Any) -> None:
    pair = Pair(scheme_class, model=model_or_loader(engine))
    worker = pair.schemes[0]
    ends = threading.Thread(target=lambda: pair.sender.send(timeout=PATIENCE))
    ends.start()
    worker.connect(timeout=PATIENCE)
    ends.join(PATIENCE)
    assert engine.versions == [1]
    ends = threading.Thread(target=lambda: pair.sender.send(timeout=PATIENCE))
    ends.start()
    assert worker.receive(timeout=PATIENCE) == 2
    ends.join(PATIENCE)
    worker.shutdown()
    pair.close()
