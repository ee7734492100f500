"""Tensors are sent in the order that the trainer has, and arrive whatever the order of the worker's tensors is."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from data_samples import bits, packed, snapshot
from torch import Tensor, nn

from weightsync import LayoutError, ProtocolError, WireDtype
from weightsync.engine.packer import Packer
from weightsync.weights.layout import Layout
from weightsync.weights.loader import draw
from weightsync.weights.packing import Pieces, digest_of_weights, movable, views
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.target import Mode, Target
from weightsync.weights.tensors import DTYPES, groups_of, order_of, owning
from weightsync.weights.tree_digest import digest

modes = pytest.mark.parametrize("mode", list(Mode))
SHAPE = (2, 3, 4, 5)
ORDERS = list(permutations(range(4)))


def with_order(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values, with dimensions that lie in memory in this order, outermost first."""
    return values.permute(order).contiguous().permute([order.index(at) for at in range(len(order))])


def module(order: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module with a small and a large parameter and a buffer in this order, and with a layer in the usual order."""
    draw_ = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, 3), nn.Module())
    with torch.no_grad():
        made[0].weight.fill_(seed)
        made[0].bias.fill_(-seed)
    for name, shape in (("small", SHAPE), ("large", (20, 30, 8, 9))):
        values = torch.randn(shape, generator=draw_).to(dtype)
        made[1].register_parameter(name, nn.Parameter(with_order(values, order)))
    made[1].register_buffer("kept", with_order(torch.randn(SHAPE, generator=draw_), order))
    return made


def strides(of: nn.Module) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in of.state_dict().values()]


# ------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.empty(3, 4), ()),
        (torch.empty(3, 4).t(), (1, 0)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), (0, 2, 3, 4, 1)),
        (torch.empty(4, 1, 3).transpose(0, 2), (1, 2, 0)),
        (torch.empty(1, 4).t(), ()),
        (torch.empty(5, 6)[2:].t(), (1, 0)),
        (torch.empty(4, 6)[:, ::2], ()),
        (torch.empty(4, 6)[:, :3].t(), ()),
        (torch.empty(2, 4)[:, :3], ()),
        (torch.empty(2, 4)[:, :3].t(), ()),
        (torch.empty(1, 4, 1, 3).permute(2, 3, 0, 1), (0, 2, 3, 1)),
        (torch.empty(3, 1).expand(3, 4), ()),
        (torch.empty(0, 4).t(), ()),
        (torch.empty(()), ()),
    ],
)
def test_the_order_of_a_tensor_is_that_of_its_elements_in_memory(tensor: Tensor, order: tuple[int, ...]) -> None:
    assert order_of(tensor) == order


@pytest.mark.parametrize("order", ORDERS)
def test_a_payload_keeps_the_trainers_element_order(order: tuple[int, ...]) -> None:
    values = torch.randn(SHAPE)
    source = with_order(values, order)
    layout, payload, _ = packed({"w": source})

    assert bytes(payload) == bits(values.permute(order))
    assert movable(layout, [source], least=0) == {0: source.data_ptr()}
    (view,) = views(layout, owning(payload))
    assert torch.equal(view, values)
    assert view.stride() == source.stride()


# ------------------------------------------------------------------------------------------------ the layout


def test_layouts_that_differ_only_in_orders_fit_but_are_not_equal() -> None:
    specs = [("a", "float32", (2, 3)), ("b", "float32", (4, 5))]
    plain, turned, both = (Layout(specs, ["m"], orders) for orders in ({}, {"a": (1, 0)}, {"a": (1, 0), "b": (1, 0)}))

    for one, other in permutations((plain, turned, both), 2):
        assert one != other
        assert one.fits(other)
        assert one.misfit(other) is None
        assert one.difference(other) is None
    assert pickle.loads(pickle.dumps(both)) == both
    assert not turned.fits(Layout([("a", "float32", (3, 2)), specs[1]], ["m"], {"a": (1, 0)}))
    assert not turned.fits(Layout(specs, [], {"a": (1, 0)}))


def test_the_encoding_of_a_layout_without_orders_is_unchanged() -> None:
    layout = Layout([("a", "int16", (2, 3))], ["m"])

    assert layout.encode() == (
        b"WSL\x01" + b"\1\0\0\0" + b"\1\0\0\0a" + b"\x0e\2" + b"\2" + bytes(7) + b"\3" + bytes(7) + b"\1\0\0\0\1\0\0\0m"
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 0, 1), (1, 2, 3), (255, 0, 1)])
def test_an_impossible_order_is_refused(order: tuple[int, ...]) -> None:
    encoded = Layout([("a", "uint8", (2, 3, 4))], (), {"a": (2, 1, 0)}).encode()

    with pytest.raises(ProtocolError, match="impossible order"):
        Layout.decode(encoded.replace(b"\2\1\0" + bytes(4), bytes(order) + bytes(4)))


# --------------------------------------------------------------------------------------------------- targets


@modes
@pytest.mark.parametrize("sent", ORDERS[::5])
@pytest.mark.parametrize("own", ORDERS[::5])
def test_weights_in_any_order_are_applied_to_a_model_in_any_other_order(
    mode: Mode, sent: tuple[int, ...], own: tuple[int, ...]
) -> None:
    worker = module(own)
    target, before, kept = Target(worker, mode), strides(worker), worker[1].kept

    for version in (1, 2, 3):
        source = module(sent, version)
        layout, payload, extras = packed(source)
        target.swap(target.stage(layout, payload, extras))

        assert snapshot(worker) == snapshot(source)
        assert strides(worker) == before
        assert worker[1].kept is kept
        assert target.digest() == digest(payload, extras) == digest_of_weights(source)


@pytest.mark.parametrize("order", ORDERS)
def test_parameters_in_the_sent_order_are_views_of_the_payload(order: tuple[int, ...]) -> None:
    worker, source = module(order), module(order, 1)
    layout, payload, extras = packed(source)
    target = Target(worker, Mode.MAP)

    target.swap(target.stage(layout, payload, extras))

    start = owning(payload).data_ptr()
    offsets = {entry.name: start + entry.offset for entry in layout.entries}
    assert {name: tensor.data_ptr() for name, tensor in worker.named_parameters()} == {
        name: offsets[name] for name, _ in source.named_parameters()
    }
    assert worker[1].kept.data_ptr() != offsets["1.kept"]


def test_a_slot_is_free_once_weights_of_another_order_are_applied() -> None:
    """Parameters that viewed the slot are copied into from then on, so they must get memory of their own."""
    first, second = (0, 2, 3, 1), (0, 1, 2, 3)
    worker = module(second)
    target, slots = Target(worker, Mode.MAP), []
    for version, order in enumerate((first, second, first, second, second, first), 1):
        source = module(order, version)
        layout, payload, extras = packed(source)
        target.swap(target.stage(layout, payload, extras, in_slot=True))
        for slot in slots:
            slot[:] = bytes(slot.nbytes)
        assert snapshot(worker) == snapshot(source)
        slots.append(payload)


def test_updates_staged_in_different_orders_are_each_read_in_their_own_order() -> None:
    worker = module(ORDERS[0])
    target, sources = Target(worker, Mode.MAP), [module(order, seed) for seed, order in enumerate(ORDERS[::8], 1)]
    staged = [target.stage(*packed(source)) for source in sources]

    for source, each in [*zip(sources, staged, strict=True)][::-1]:
        target.swap(each)
        assert snapshot(worker) == snapshot(source)


@pytest.mark.parametrize(("own", "sent"), [(ORDERS[0], ORDERS[9]), (ORDERS[9], ORDERS[0])])
def test_g3_weights_of_another_order_are_not_written_into_memory_that_other_processes_share(
    own: tuple[int, ...], sent: tuple[int, ...]
) -> None:
    worker = module(own).share_memory()
    elsewhere = [tensor.detach() for tensor in worker.state_dict().values()]
    before = [bits(tensor) for tensor in elsewhere]
    target = Target(worker, Mode.MAP)
    target.unshare()

    for version in (1, 2):
        source = module(sent, version)
        target.swap(target.stage(*packed(source)))
        assert snapshot(worker) == snapshot(source)

    assert [bits(tensor) for tensor in elsewhere] == before


def test_tensors_of_a_dict_stay_in_shared_memory_if_another_order_is_sent() -> None:
    shared = torch.zeros(4, 3).share_memory_()
    target = Target({"w": shared}, Mode.MAP)
    values = torch.randn(3, 4).t()

    target.swap(target.stage(*packed({"w": values})))

    assert torch.equal(shared, values)
    assert shared.is_shared()


@modes
def test_tied_parameters_stay_tied_and_must_agree_in_every_sent_order(mode: Mode) -> None:
    def tied(first: Tensor, second: Tensor) -> nn.Module:
        made = nn.Module()
        made.first, made.second = nn.Parameter(first), nn.Parameter(second)
        return made

    values = torch.randn(3, 4)
    one = nn.Parameter(torch.zeros(4, 3).t())
    worker = nn.Module()
    worker.first = worker.second = one
    target = Target(worker, mode)
    for first, second in (
        (values, values),
        (with_order(values, (1, 0)), with_order(values, (1, 0))),
        (with_order(values, (1, 0)), values),
    ):
        target.swap(target.stage(*packed(tied(first, second))))
        assert worker.first is worker.second is one
        assert torch.equal(one, values)
        target.swap(target.stage(*packed(tied(first + 1, second + 1))))
        for other in (second + 1, second.clone().mul_(-1)):
            with pytest.raises(LayoutError, match="tied"):
                target.stage(*packed(tied(first, other)))
        assert torch.equal(one, values + 1)


def test_weights_in_alternating_orders_are_applied_by_hand() -> None:
    """The order that the trainer sends stays the target's, so that its next version finds the same plan."""
    worker, sent = module(ORDERS[0]), module(ORDERS[9], 1)
    target = Target(worker, Mode.MAP)
    layout, payload, extras = packed(sent)
    target.swap(target.stage(layout, payload, extras))
    assert target.layout == layout

    for order in ORDERS:
        source = module(order, 2)
        target.apply(source)
        assert snapshot(worker) == snapshot(source)
        assert target.layout == layout
        target.apply(sent)
        assert snapshot(worker) == snapshot(sent)
        assert target.layout == layout


# --------------------------------------------------------------------------------------------------- packing


def test_transposed_weights_are_packed_in_the_agreed_order() -> None:
    packer = Packer()
    layout = packer.layout_of(module(ORDERS[9]))

    for order in ORDERS:
        source = module(order, 3)
        made = packer.pack(source)
        assert made.layout is layout
        assert made.digested() == Target(source).digest(layout)
        found = dict(zip(layout.names, views(layout, owning(made.buffer.view)), strict=True))
        assert all(torch.equal(found[name], tensor) for name, tensor in source.state_dict().items())
        packer.release_packed(made)


@pytest.mark.parametrize("make", [lambda seed: module(ORDERS[9], seed), lambda seed: module(ORDERS[23], seed)])
def test_weights_cast_to_the_wire_dtype_keep_their_order(make: Callable[[int], nn.Module]) -> None:
    source, packer = make(1), Packer(wire_dtype=WireDtype.BFLOAT16)
    made = packer.pack(source)
    worker = make(0).to(torch.bfloat16)
    target = Target(worker, Mode.MAP)

    target.swap(target.stage(made.layout, made.buffer.view[: made.layout.nbytes]))

    assert made.layout.orders == layout_of(read_weights(source)).orders
    assert snapshot(worker) == snapshot(source.to(torch.bfloat16))


def test_the_overflow_error_shows_the_value_of_a_transposed_tensor() -> None:
    weights = torch.zeros(3, 4)
    weights[2, 1] = 70000.0

    with pytest.raises(LayoutError, match="'w' has 1 value, such as 70000, that would be sent as inf"):
        Packer(wire_dtype=WireDtype.FLOAT16).pack({"w": with_order(weights, (1, 0))})


@pytest.mark.parametrize("aligned", [True, False])
def test_a_loader_gets_contiguous_tensors(aligned: bool) -> None:
    source = module(ORDERS[9], 1)
    layout, payload, _ = packed(source)
    given = payload if aligned else memoryview(bytes(payload))

    found = dict(draw(layout, given, None, 1 << 10))

    assert all(tensor.is_contiguous() for tensor in found.values())
    assert all(torch.equal(found[name], tensor) for name, tensor in source.state_dict().items())


def test_an_order_that_places_a_dimension_of_size_1_elsewhere_is_read_correctly() -> None:
    """The place of a dimension of size 1 in an order does not change the elements, but our orders put it elsewhere."""
    layout = Layout([("w", "float32", (1, 3, 4))], (), {"w": (2, 0, 1)})
    values = torch.randn(1, 3, 4)
    payload = torch.empty(layout.nbytes, dtype=torch.uint8).numpy().data
    payload[:] = bits(values.permute(2, 0, 1))
    worker = nn.Module()
    worker.w = nn.Parameter(with_order(torch.zeros(1, 3, 4), (0, 2, 1)))
    target = Target(worker, Mode.MAP)

    target.swap(target.stage(Layout.decode(layout.encode()), payload))

    assert torch.equal(worker.w, values)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "complex32"])
def test_narrow_floats_in_another_order_are_copied_as_integers_on_a_device(name: str) -> None:
    """The kernel of torch would convert the elements to float and back, which changes the bits of NaNs."""
    given = torch.arange(48, dtype=torch.uint8).view(DTYPES[name]).view(2, -1).t()
    into = torch.zeros(48, dtype=torch.uint8).view(DTYPES[name]).view(2, -1).t()

    (group,) = groups_of([into], [given])
    chosen = group.chosen([into], [given])

    assert [tensor.dtype for (tensor,) in chosen] == [group.bits] * 2
    assert not group.bits.is_floating_point
    assert not group.bits.is_complex
    torch._foreach_copy_(*chosen)
    assert bits(into) == bits(given)


def test_a_copy_plan_is_rebuilt_for_another_order() -> None:
    worker = module(ORDERS[0])
    target = Target(worker)
    plans: list[Pieces | None] = []
    for seed, order in enumerate((ORDERS[0], ORDERS[9], ORDERS[9], ORDERS[0]), 1):
        source = module(order, seed)
        target.swap(target.stage(*packed(source)))
        plans.append(target._pieces_of(target._plan))
        assert snapshot(worker) == snapshot(source)

    assert None not in plans
    assert plans[1] is plans[2]
    assert len({id(plan) for plan in plans}) == 3
