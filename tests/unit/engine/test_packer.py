"""A version is packed into a buffer without readers, and the packer owns the buffer until it is handed over."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import fake_device
from pools import statistics
from tensordict import TensorDict, TensorDictParams
from torch import Tensor, nn

from weightsync import ConfigurationError, LayoutError, NonFiniteError
from weightsync.engine import packer as packing
from weightsync.engine.device_slots import write_slot
from weightsync.engine.packer import OutgoingWeights, Packer
from weightsync.options import Verify, WireDtype
from weightsync.protocol.messages import WeightsForm
from weightsync.transports import buffers
from weightsync.transports.buffers import INLINE_BELOW_NBYTES, Pool
from weightsync.transports.device import DeviceBuffer
from weightsync.weights.layout import Layout
from weightsync.weights.packing import digest_of_weights
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.selection import Selection
from weightsync.weights.tree_digest import digest


def weights(fill: float = 1.0) -> dict[str, Tensor]:
    return {"a": torch.full((3,), fill), "b": torch.full((2, 2), fill, dtype=torch.float64)}


class Remembers(nn.Module):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def get_extra_state(self) -> str:
        return "remembered"

    def set_extra_state(self, state: str) -> None:
        """Do nothing."""


def test_a_packed_update_has_its_size_its_digest_and_its_form() -> None:
    packer, module = Packer(), Remembers()
    packed, flat = packer.pack(module), packer.pack(weights())

    assert packed.layout == packer.layout_of(module)
    assert packed.nbytes == packed.layout.nbytes + len(packed.extras) > packed.layout.nbytes
    assert packed.digest == packed.digested() == digest_of_weights(module) != b""
    assert packed.digest == digest(packed.buffer.view[: packed.layout.nbytes], packed.extras)
    assert (packed.form, flat.form) == (WeightsForm.FLAT, WeightsForm.FLAT)
    packer.close()


def test_an_unverified_update_has_no_digest_until_one_is_requested() -> None:
    packed = Packer(Verify.LAYOUT).pack(weights())

    assert (packed.digest, packed.digested()) == (b"", digest_of_weights(weights()))


def test_a_buffer_is_reused_only_after_it_was_handed_over() -> None:
    packer = Packer()
    first, second = packer.pack(weights(1.0)), packer.pack(weights(2.0))
    assert second.buffer is not first.buffer
    assert (first.buffer.pinned, second.buffer.pinned) == (True, True)
    assert first.digested() == first.digest

    packer.release_packed(first)
    assert not first.buffer.pinned
    assert packer.pack(weights(3.0)).buffer is first.buffer
    assert statistics(packer._pool).buffers == 2
    packer.close()
    assert statistics(packer._pool).buffers == 0


class Interrupted(set[Any]):
    """The pins of a buffer. `add` pins and then raises, as if a signal had arrived during the call."""

    def add(self, pin: Any) -> None:
        super().add(pin)
        raise KeyboardInterrupt


def test_an_interrupt_while_a_buffer_is_pinned_leaves_it_free() -> None:
    packer = Packer()
    packed = packer.pack(weights())
    packer.release_packed(packed)
    buffer, buffer.pins = packed.buffer, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        packer.pack(weights())
    assert not buffer.pinned

    buffer.pins = set()
    assert packer.pack(weights()).buffer is buffer
    packer.close()


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """A function that makes SIGUSR1 call its argument, once."""

    def set_handler(call: Callable[[], object]) -> None:
        calls = iter([call])
        signal.signal(signal.SIGUSR1, lambda *_: next(calls, lambda: None)())

    before = signal.getsignal(signal.SIGUSR1)
    yield set_handler
    signal.signal(signal.SIGUSR1, before)


def raise_signal_on_allocation(packer: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise SIGUSR1 whenever pages of a buffer are allocated: this may take seconds, without the packer's lock."""

    def populate(_: object) -> None:
        assert packer._lock.acquire(blocking=False), "the handler would wait for its own thread forever"
        packer._lock.release()
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(buffers, "_populate", populate)


def test_a_signal_handler_may_close_the_packer_while_its_thread_makes_a_buffer(
    on_signal: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    packer = Packer()
    on_signal(packer.close)
    raise_signal_on_allocation(packer, monkeypatch)

    packed = packer.pack(weights())
    assert packed.digested() == digest_of_weights(weights())


def test_a_signal_handler_may_close_the_packer_while_its_thread_reserves_buffers(
    on_signal: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    packer, closed = Packer(), list[bool]()
    packer.layout_of({"a": torch.zeros(INLINE_BELOW_NBYTES)})
    on_signal(lambda: closed.append(packer.close() is None))
    raise_signal_on_allocation(packer, monkeypatch)

    packer.reserve()
    assert closed == [True]


def test_a_signal_handler_that_packs_while_its_thread_acquires_a_buffer_gets_another(
    on_signal: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one of the two versions would overwrite the other's weights."""
    packer, acquire, handlers = Packer(), Pool.acquire, list[Any]()
    packer.release_packed(packer.pack(weights()))  # leaves a buffer in the pool
    on_signal(lambda: handlers.append(packer.pack(weights(2.0))))

    def struck(pool: Pool, nbytes: int) -> Any:
        taken = acquire(pool, nbytes)
        signal.raise_signal(signal.SIGUSR1)
        return taken

    monkeypatch.setattr(Pool, "acquire", struck)
    packed = packer.pack(weights(1.0))
    assert handlers[0].buffer is not packed.buffer
    packer.close()


def test_weights_that_cannot_be_copied_leave_no_buffer_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(*_: object, **__: object) -> None:
        raise LayoutError("'a' cannot be copied.", mismatched={})

    packer = Packer()
    with monkeypatch.context() as patch:
        patch.setattr(packing, "pack_digested", pack)
        with pytest.raises(LayoutError, match="cannot be copied"):
            packer.pack(weights())

    assert statistics(packer._pool).pinned == 0
    assert packer.pack(weights()).digest == digest_of_weights(weights())


class Sharing:
    """Workers that all map the packed memory."""

    def all_share(self, payload: Any, nbytes: int) -> bool:
        return True

    def reached(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(("verify", "digested"), [(Verify.AUTO, False), (Verify.DIGEST, True), (Verify.LAYOUT, False)])
def test_if_all_workers_map_a_version_only_verify_digest_hashes_it_during_the_copy(
    verify: Verify, digested: bool
) -> None:
    large = {"b": torch.arange(INLINE_BELOW_NBYTES // 8)}
    packed = Packer(verify).pack(large, readers=Sharing())

    assert (packed.digest != b"", bytes(packed.buffer.view)) == (digested, bytes(large["b"].numpy()))


class Alarmed(Exception):
    """Raised by a signal handler."""


@pytest.mark.parametrize(("larger_by", "ended"), [(0, False), (1, True)])
def test_a_signal_does_not_interrupt_the_copy_of_a_version_that_takes_threads(
    larger_by: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer, copied = Packer(), []
    copy: Callable[..., None] = packing._copy

    def interrupted(*given: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        copy(*given)
        copied.append(given)

    def alarm(number: int, frame: FrameType | None) -> None:
        raise Alarmed

    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        monkeypatch.setattr(packing, "LEAST_PART", packer.layout_of(weights()).nbytes - larger_by)
        monkeypatch.setattr(packing, "_copy", interrupted)
        with pytest.raises(Alarmed):
            packer.pack(weights())
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert (len(copied) == 1, statistics(packer._pool).pinned) == (ended, 0)


def test_a_tensor_that_a_device_cannot_copy_is_named_and_other_device_errors_are_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(*_: object) -> None:
        raise RuntimeError("the kernel failed")

    given = read_weights(weights())
    layout = layout_of(given)
    with fake_device() as device:
        buffer = DeviceBuffer(device.allocate(layout.nbytes))
        monkeypatch.setattr(type(buffer.slot.memory), "write", write)
        with pytest.raises(RuntimeError, match="the kernel failed"):
            write_slot(buffer, given, layout, packing.nobody)
        given.tensors["a"] = given.tensors["a"].to_sparse()
        with pytest.raises(LayoutError, match=r"^'a' has the layout "):
            write_slot(buffer, given, layout, packing.nobody)


def test_an_unchanged_layout_is_the_same_object_for_every_version() -> None:
    packer = Packer()
    layout = packer.layout_of(weights())

    assert packer.pack(weights(2.0)).layout is layout
    assert packer.layout_of(weights(3.0)) is layout
    assert packer.layout_of({"a": torch.ones(4)}) != layout


def test_names_and_extra_state_too_large_for_a_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packer, module = Packer(), Remembers()
    packed = packer.pack(module)
    needed = len(packed.layout.encode()) + len(packed.extras)
    monkeypatch.setattr(packing, "MAX_NAMES_AND_EXTRAS_NBYTES", needed)
    assert isinstance(packer.pack(module).layout, Layout)

    monkeypatch.setattr(packing, "MAX_NAMES_AND_EXTRAS_NBYTES", needed - 1)
    carries = rf"take {needed} bytes, but one update carries at most {needed - 1} in addition"
    with pytest.raises(LayoutError, match=carries):
        packer.pack(module)


class Trainer:
    """The parts of a scheme and of a driver that outgoing weights use."""

    model_id = "policy"

    def __init__(self, model: Any = None, extract_as: str = "state_dict") -> None:
        self.strategy = SimpleNamespace(extract_as=extract_as)
        self.model, self.layout = model, None
        self.contexts: list[Any] = []
        self.packer = Packer()

    def weights_to_send(self, given: Any, model_id: str, context: Any = None) -> Any:
        assert model_id == "policy"
        self.contexts.append(context)
        if given is None and self.model is None:
            raise ConfigurationError("there is no model")
        return self.model if given is None or isinstance(given, str) else given

    def published(self, model_id: str, weights: Any) -> None:
        """Do nothing."""

    def all_share(self, payload: Any, nbytes: int) -> bool:
        return False

    def reached(self) -> tuple[()]:
        return ()

    def outgoing(self) -> OutgoingWeights:
        services: Any = self
        return OutgoingWeights(services, services, self.packer, lambda: "the context")


def test_module_weights_have_the_strategys_form_and_other_weights_the_given_form() -> None:
    module, found = nn.Linear(2, 1), TensorDict({"a": torch.ones(2)})

    for extract_as, form in (("state_dict", WeightsForm.FLAT), ("tensordict", WeightsForm.TENSORDICT)):
        assert Trainer(module, extract_as).outgoing().pack(None).form is form
    assert Trainer(extract_as="tensordict").outgoing().pack(weights()).form is WeightsForm.FLAT
    assert Trainer().outgoing().pack(found).form is WeightsForm.TENSORDICT
    assert Trainer().outgoing().pack(TensorDictParams(found)).form is WeightsForm.TENSORDICT


def test_the_context_is_used_only_for_weights_that_are_found_on_it() -> None:
    trainer = Trainer(nn.Linear(2, 1))
    outgoing = trainer.outgoing()

    outgoing.pack(None)
    outgoing.registered_layout()
    assert trainer.contexts == ["the context"] * 2
    trainer = Trainer(weights())
    trainer.outgoing().pack(weights())
    assert trainer.contexts == [None, "the context"]  # the second context was used to look up the registered model
    trainer.contexts.clear()
    trainer.outgoing().pack("policy")
    assert trainer.contexts[0] == "the context"


def test_the_hint_about_non_persistent_buffers_refers_to_the_model_on_the_context() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("mask", torch.ones(2), persistent=False)
    trainer = Trainer(module)

    with pytest.raises(LayoutError, match=r"send the model itself, or its state_dict\(\)"):
        trainer.outgoing().pack(TensorDict.from_module(module))
    assert trainer.contexts[1:] == ["the context"] * 2


def test_a_packer_with_a_selection_packs_only_the_selected_tensors() -> None:
    packed = Packer(selection=Selection("a")).pack(weights())
    assert packed.layout.names == ("a",)


def test_weights_of_another_model_are_refused_with_missing_unexpected_and_mismatched_names() -> None:
    trainer = Trainer({"a": torch.ones(2), "b": torch.ones(2)})

    with pytest.raises(LayoutError) as caught:
        trainer.outgoing().pack({"a": torch.ones(2), "c": torch.ones(2)})
    assert (list(caught.value.missing), list(caught.value.unexpected)) == (["b"], ["c"])
    with pytest.raises(LayoutError) as caught:
        trainer.outgoing().pack({"a": torch.ones(2), "b": torch.ones(3)})
    assert (list(caught.value.missing), list(caught.value.unexpected)) == ([], [])
    assert list(caught.value.mismatched) == ["b"]


def of_integers(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.ones(2, dtype=dtype)}


def test_with_a_wire_dtype_only_dtypes_that_still_differ_from_the_agreed_layout_are_refused() -> None:
    trainer = Trainer()
    trainer.packer = Packer(wire_dtype=WireDtype.BFLOAT16)
    outgoing = trainer.outgoing()
    outgoing.pack(of_integers("a", torch.int32))
    trainer.layout = trainer.packer.layout_of(of_integers("a", torch.int64))  # type: ignore[assignment]
    outgoing.pack(of_integers("b", torch.int32))
    with pytest.raises(LayoutError, match=r"wire_dtype='bfloat16' casts wider floating tensors only") as caught:
        outgoing.pack(of_integers("a", torch.int32))

    error = caught.value
    assert (list(error.missing), list(error.unexpected), list(error.mismatched)) == ([], [], ["a"])
    trainer.packer = Packer()
    trainer.outgoing().pack(of_integers("a", torch.int32))


def test_a_packer_checks_for_finite_weights_and_sends_deltas_only_if_told_to() -> None:
    with pytest.raises(NonFiniteError, match="policy"):
        Packer(finite_model_id="policy").pack({"a": torch.tensor([1.0, torch.nan])})
    assert (Packer().sends_deltas, Packer(sends_deltas=True).sends_deltas) == (False, True)
