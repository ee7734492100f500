"""Slots on a real GPU: memory from the CUDA driver, long kernels, processes that are killed during kernels."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Crew, WorkerSetup, filled, serve, serve_until_gone
from test_kernels import copied, mapped
from torch import nn

from weightsync import MultiProcessWeightSyncScheme, OutcomeKind, SharedMemWeightSyncScheme
from weightsync.engine.background import Background
from weightsync.transports.buffers import Segment
from weightsync.transports.mapping import Mapping
from weightsync.weights.device.base import DeviceMemory
from weightsync.weights.device.driver import Driver
from weightsync.weights.device.registry import device_of
from weightsync.weights.device.transfer import pack_from
from weightsync.weights.layout import ITEMSIZES
from weightsync.weights.packing import digest_of, pack
from weightsync.weights.reading import layout_of, ordered, read_weights
from weightsync.weights.tensors import address_of, borrowed
from weightsync.weights.tree_digest import digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="GPUS WERE NOT TESTED: there is no CUDA device"),
]

#: Clock cycles of a kernel that takes some 50 ms, much longer than a send.
LONG = 100_000_000


def on_gpu(fill: float = 0.0) -> nn.Module:
    """A model on the GPU with eight parameters of 4 MiB each."""
    return filled(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))), fill).cuda()


def join_gpu(setup: WorkerSetup) -> None:
    setup.model = on_gpu()
    setup.scheme.init_on_worker("policy", pipe=setup.pipe, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()
    setup.kept["side"] = torch.cuda.Stream()
    setup.kept["seen"] = []


def join_gpu_in_bfloat16(setup: WorkerSetup) -> None:
    setup.model = on_gpu().bfloat16()
    setup.scheme.init_on_worker("policy", pipe=setup.pipe, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()


def read_slowly(setup: WorkerSetup) -> None:
    """Launch kernels in a side stream that read the parameters one after another, with a pause behind each."""
    with torch.cuda.stream(setup.kept["side"]):
        ends = []
        for layer in setup.model:
            ends += [layer.weight.min(), layer.weight.max()]
            torch.cuda._sleep(LONG // 8)
        setup.kept["seen"].append((setup.receiver.version, torch.stack(ends)))


def serve_with_slow_reads(setup: WorkerSetup, last: int) -> list[tuple[int, set[float]]]:
    """Serve version after version, with slow reads under way at each swap. Returns the values that they read."""
    while (setup.receiver.version or 0) < last:
        if setup.receiver.version:
            read_slowly(setup)
        assert setup.receiver.receive(timeout=PATIENCE)
    torch.cuda.synchronize()
    return [(version, set(values.tolist())) for version, values in setup.kept["seen"]]


def place(setup: WorkerSetup) -> list[int]:
    return [parameter.data_ptr() for parameter in setup.model.parameters()]


def contents(setup: WorkerSetup) -> set[float]:
    return {value for parameter in setup.model.parameters() for value in parameter.unique().tolist()}


def receive_during_a_kernel(setup: WorkerSetup) -> None:
    torch.cuda._sleep(100 * LONG)
    setup.receiver.receive(timeout=PATIENCE)


def command_gpu(setup: WorkerSetup) -> int:
    setup.scheme.init_on_sender("policy", pipes=setup.pipe, model=on_gpu(1.0))
    sender = setup.scheme.get_sender()
    sender.await_workers(PATIENCE)
    return [sender.send(timeout=PATIENCE).version for _ in range(2)][-1]


@contextlib.contextmanager
def trainer(scheme: Any, *workers: Any, model: nn.Module) -> Iterator[Any]:
    scheme.init_on_sender("policy", pipes=[worker.pipe for worker in workers], model=model)
    with contextlib.closing(scheme):
        yield scheme.get_sender()


def synced(sender: Any, worker: Any, model: nn.Module, version: int, fill: float) -> None:
    """Fill the model with a value, send it as this version, and wait until the worker has applied it."""
    filled(model, fill)
    worker.tell(serve, version)
    assert sender.send(timeout=PATIENCE).outcomes[0].kind is OutcomeKind.APPLIED
    assert worker.answer() == version


def test_gpu_memory_and_its_seal_are_visible_in_another_mapping() -> None:
    source = torch.arange(1000, dtype=torch.uint8, device="cuda")
    device = device_of([source])
    assert device is not None
    made = device.allocate(1000)
    opened = device.open(made.fd, made.nbytes)
    device.copy([made.flat[:1000]], [source])
    device.finish()
    assert opened.flat.data_ptr() != made.flat.data_ptr()
    assert torch.equal(opened.flat[:1000], source)
    view = memoryview(bytearray(1000))
    opened.read(view)
    assert bytes(view) == bytes(source.tolist())
    made.seal_with(bytes(range(16)))
    assert opened.seal == bytes(range(16))
    assert torch.equal(opened.flat[:1000], source)
    made.unseal()
    assert opened.seal == bytes(16)


def test_gpu_memory_is_released_with_its_last_view() -> None:
    device = device_of([torch.ones(1, device="cuda")])
    assert device is not None
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(10):
        memory: DeviceMemory | None = device.allocate(256 * 2**20)
        assert memory is not None
        view = memory.flat[:10]
        memory = None
        assert view.sum().item() >= 0
        del view
    assert torch.cuda.mem_get_info()[0] >= free - 2**26


@pytest.mark.parametrize("scheme", [mapped, copied])
def test_g3_no_kernel_reads_two_versions(crew: Crew, scheme: Any) -> None:
    worker, model = crew.start(scheme())[0], on_gpu(1.0)
    worker.do(join_gpu)
    with trainer(scheme(), worker, model=model) as sender:
        worker.tell(serve_with_slow_reads, 20)
        for version in range(1, 21):
            filled(model, float(version))
            assert sender.send(timeout=PATIENCE).outcomes[0].kind is OutcomeKind.APPLIED
        assert [entry for entry in worker.answer() if entry[1] != {float(entry[0])}] == []


def test_the_optimizer_may_go_on_once_send_async_has_returned(crew: Crew) -> None:
    worker, model = crew.start(mapped())[0], on_gpu(1.0)
    worker.do(join_gpu)
    with trainer(mapped(), worker, model=model) as sender:
        for version in range(1, 6):
            torch.cuda._sleep(LONG)
            filled(model, float(version))  # queued behind the kernel above, in the stream of the snapshot
            worker.tell(serve, version)
            sender.send_async()
            filled(model, -1.0)
            sender.wait_async(timeout=PATIENCE)
            worker.answer()
            assert worker.do(contents) == {float(version)}


def test_parameters_move_into_slots_only_with_map_on_device(crew: Crew) -> None:
    workers, model = [*crew.start(mapped()), *crew.start(copied())], on_gpu(1.0)
    for worker in workers:
        worker.do(join_gpu)
    before = [worker.do(place) for worker in workers]
    with trainer(mapped(), *workers, model=model) as sender:
        for version in (1, 2):
            for worker in workers:
                worker.tell(serve, version)
            sender.send(timeout=PATIENCE)
            assert [worker.answer() for worker in workers] == [version, version]
        after = [worker.do(place) for worker in workers]
    assert (after[0] != before[0], after[1] == before[1]) == (True, True)


@pytest.mark.parametrize("given", [{"verify": "auto"}, {"verify": "digest"}, {"wire_dtype": "bfloat16"}])
def test_sent_weights_arrive_with_each_verify_and_wire_dtype(crew: Crew, given: dict[str, Any]) -> None:
    scheme = SharedMemWeightSyncScheme("state_dict", **given)
    (worker,), model = crew.start(scheme), on_gpu(1.0)
    worker.do(join_gpu_in_bfloat16 if "wire_dtype" in given else join_gpu)
    with trainer(SharedMemWeightSyncScheme("state_dict", **given), worker, model=model) as sender:
        for version in (1, 2, 3):
            synced(sender, worker, model, version, float(version))
        assert worker.do(contents) == {3.0}


def test_a_worker_killed_during_a_kernel_leaks_no_gpu_memory(crew: Crew) -> None:
    (first, second), model = crew.start(mapped(), 2), on_gpu(1.0)
    for worker in (first, second):
        worker.do(join_gpu)
    with trainer(mapped(), first, second, model=model) as sender:
        for version in (1, 2, 3):
            for worker in (first, second):
                worker.tell(serve, version)
            sender.send(timeout=PATIENCE)
            assert [worker.answer() for worker in (first, second)] == [version, version]
        first.tell(receive_during_a_kernel)
        second.tell(serve, 4)
        sender.send_async()
        second.answer()
        first.kill()
        report = sender.wait_async(timeout=PATIENCE, on_failure="report")
        assert [report.outcomes[each].kind for each in (0, 1)] == [OutcomeKind.LOST, OutcomeKind.APPLIED]
        sender.remove_worker(0)
        free = torch.cuda.mem_get_info()[0]
        for version in range(5, 15):
            second.tell(serve, version)
            sender.send(timeout=PATIENCE)
            second.answer()
        assert torch.cuda.mem_get_info()[0] >= free - 2**26


def test_workers_keep_their_served_weights_after_the_trainer_is_killed(crew: Crew) -> None:
    (worker,) = crew.start(mapped())
    leader = crew.lead(mapped(), [worker])
    worker.do(join_gpu)
    worker.tell(serve, 2)
    assert leader.do(command_gpu) == 2
    assert worker.answer() == 2
    leader.kill()
    worker.do(serve_until_gone)
    assert worker.do(contents) == {1.0}


def test_a_worker_on_the_host_and_one_on_the_gpu_get_the_same_version(crew: Crew) -> None:
    (there, here), model = crew.start(mapped(), 2), on_gpu(1.0)
    there.do(join_gpu)
    here.do(join_host)
    with trainer(mapped(), there, here, model=model) as sender:
        for version in (1, 2, 3):
            filled(model, float(version))
            for worker in (there, here):
                worker.tell(serve, version)
            sender.send(timeout=PATIENCE)
            assert [worker.answer() for worker in (there, here)] == [version, version]
        assert [worker.do(contents) for worker in (there, here)] == [{3.0}, {3.0}]


@pytest.mark.parametrize(("trainer_on", "worker_on"), [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("verify", ["auto", "digest"])
def test_weights_are_copied_between_the_host_and_the_gpu_through_pinned_memory(
    crew: Crew, trainer_on: str, worker_on: str, verify: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheme = SharedMemWeightSyncScheme("state_dict", verify=verify)
    (worker,), model = crew.start(scheme), on_gpu(1.0).to(trainer_on)
    worker.do(join_gpu if worker_on == "cuda" else join_host)
    with trainer(SharedMemWeightSyncScheme("state_dict", verify=verify), worker, model=model) as sender:
        for version in range(1, 6):
            synced(sender, worker, model, version, float(version))
            assert worker.do(contents) == {float(version)}
        if worker_on == "cuda":
            assert worker.do(pinned_mappings) == (2 if Driver().pins_read_only(0) else 0)
    assert "cannot be pinned" not in caplog.text


def pinned_mappings(setup: WorkerSetup) -> int:
    """The number of the trainer's segments that the worker has pinned."""
    (link,) = setup.receiver.driver._links.values()
    return sum(each._pinned is not None for each in link._mapped._mappings.values())


def test_pinned_memory_is_copied_to_and_from_the_gpu_unchanged() -> None:
    device = device_of([torch.ones(1, device="cuda")])
    assert device is not None
    segment = Segment(2**22)
    mapping = Mapping(segment.fd, pinnable=True)
    segment.pin(partial(device.register, read_only=False))
    assert segment._pinned is not None
    source = torch.randint(0, 256, (2**22,), dtype=torch.uint8, device="cuda")
    torch.frombuffer(segment.view, dtype=torch.uint8).copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    pinned = mapping.pinned(2**22, partial(device.register, read_only=True))
    assert (pinned is not None) is Driver().pins_read_only(0)
    if pinned is None:
        return  # copies go through other memory
    there = borrowed(address_of(pinned), 2**22).to("cuda")
    assert torch.equal(there, source)
    assert bytes(mapping.view[:100]) == bytes(source[:100].tolist())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", sorted(ITEMSIZES))
def test_every_bit_of_every_dtype_arrives(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    dtype = getattr(torch, name)
    every = torch.arange(256, dtype=torch.int16).repeat(8).remainder(2 if name == "bool" else 256).to(torch.uint8)
    source = {"weight": every.view(dtype).cuda(), "beside": torch.ones(3, device="cuda")}
    weights = read_weights(source)
    layout = layout_of(weights)
    device = device_of(source.values())
    assert device is not None
    memory = device.allocate(layout.nbytes)
    memory.write(weights, layout)
    host, crossed, expected = (memoryview(bytearray(layout.nbytes)) for _ in range(3))
    memory.read(host)
    pack_from(device, weights, layout, crossed)
    pack(read_weights({each: tensor.cpu() for each, tensor in source.items()}), layout, expected)
    assert digest_of(weights, layout, b"") == digest(expected, b"")
    out = {each: torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype) for each, tensor in source.items()}
    device.copy(ordered(read_weights(out), layout), memory.views(layout))
    device.finish()
    assert bytes(host) == bytes(crossed) == bytes(expected)
    assert all(torch.equal(out[each].view(torch.uint8), tensor.view(torch.uint8)) for each, tensor in source.items())


def join_by_default(setup: WorkerSetup) -> None:
    torch.set_default_device("cuda")
    join_gpu(setup)


@pytest.mark.parametrize("verify", ["auto", "digest"])
@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
@pytest.mark.parametrize("trainer_on", ["cpu", "cuda"])
def test_versions_arrive_if_torch_creates_tensors_on_the_gpu_by_default(
    crew: Crew, scheme: Any, verify: str, trainer_on: str
) -> None:
    given = scheme("state_dict", verify=verify)
    (worker,), model = crew.start(given), on_gpu(1.0).to(trainer_on)
    worker.do(join_by_default)
    with torch.device("cuda"), trainer(scheme("state_dict", verify=verify), worker, model=model) as sender:
        for version in (1, 2, 3):
            synced(sender, worker, model, version, float(version))
            assert worker.do(contents) == {float(version)}


def several(fill: float = 0.0) -> nn.Module:
    """A model with buffers, one of them an integer, a non-contiguous parameter, and one larger than a piece."""
    model = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 8, bias=False), nn.Linear(3000, 3000))
    model[1].weight = nn.Parameter(torch.zeros(32, 8).t())
    return filled(model, fill).cuda()


def join_several(setup: WorkerSetup) -> None:
    setup.model = several()
    setup.scheme.init_on_worker("policy", pipe=setup.pipe, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()


def all_contents(setup: WorkerSetup) -> set[float]:
    return {value for tensor in setup.model.state_dict().values() for value in tensor.unique().tolist()}


@pytest.mark.parametrize("scheme", [mapped, copied])
@pytest.mark.parametrize("trainer_on", ["cpu", "cuda"])
def test_tensors_of_all_kinds_arrive(crew: Crew, scheme: Any, trainer_on: str) -> None:
    (worker,), model = crew.start(scheme()), several(1.0).to(trainer_on)
    worker.do(join_several)
    with trainer(scheme(), worker, model=model) as sender:
        for version in (1, 2, 3, 4):
            synced(sender, worker, model, version, float(version))
            assert worker.do(all_contents) == {float(version)}


def capture(setup: WorkerSetup) -> None:
    """Capture a forward as a CUDA graph."""
    setup.kept["in"] = torch.ones(1, 1024, device="cuda")
    with torch.inference_mode(), torch.cuda.stream(setup.kept["side"]):
        setup.model(setup.kept["in"])  # the first forward sets up state outside the capture
    torch.cuda.synchronize()
    setup.kept["graph"] = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(setup.kept["graph"]):
        setup.kept["out"] = setup.model(setup.kept["in"])


def capture_and_freeze(setup: WorkerSetup) -> None:
    """Capture a forward, and freeze all objects in the garbage collector, as inference engines do."""
    capture(setup)
    gc.freeze()


def replay(setup: WorkerSetup) -> bool:
    """Whether the graph computes the same as the model."""
    setup.kept["graph"].replay()
    torch.cuda.synchronize()
    with torch.inference_mode():
        return bool(torch.equal(setup.kept["out"], setup.model(setup.kept["in"])))


@pytest.mark.parametrize("scheme", [mapped, copied])
@pytest.mark.parametrize("sends_before", [0, 1, 3])
def test_a_captured_graph_computes_with_each_version(crew: Crew, scheme: Any, sends_before: int) -> None:
    (worker,), model = crew.start(scheme()), on_gpu(1.0)
    worker.do(join_gpu)
    with trainer(scheme(), worker, model=model) as sender:
        for version in range(1, sends_before + 4):
            if version == sends_before + 1:
                worker.do(capture)
                before = worker.do(place)
            synced(sender, worker, model, version, 2.0**-version)
            if version > sends_before:
                assert (worker.do(contents), worker.do(replay)) == ({2.0**-version}, True)
        assert worker.do(place) == before


def test_g3_a_captured_graph_is_found_among_frozen_objects(crew: Crew) -> None:
    (worker,), model = crew.start(mapped()), on_gpu(1.0)
    worker.do(join_gpu)
    worker.do(capture_and_freeze)
    before = worker.do(place)
    with trainer(mapped(), worker, model=model) as sender:
        for version in (1, 2, 3):
            synced(sender, worker, model, version, 2.0**-version)
            assert (worker.do(contents), worker.do(replay)) == ({2.0**-version}, True)
        assert worker.do(place) == before


def receive_in_background(setup: WorkerSetup) -> None:
    setup.kept["reader"] = Background(setup.receiver, lambda: None)
    setup.kept["reader"].start()


def capture_until(setup: WorkerSetup, version: int) -> None:
    while (setup.receiver.version or 0) < version:
        capture(setup)


@pytest.mark.parametrize("scheme", [mapped, copied])
def test_graphs_are_captured_while_a_background_reader_receives(crew: Crew, scheme: Any) -> None:
    (worker,), model = crew.start(scheme()), on_gpu(1.0)
    worker.do(join_gpu)
    worker.do(receive_in_background)
    with trainer(scheme(), worker, model=model) as sender:
        worker.tell(capture_until, 20)
        for version in range(1, 21):
            filled(model, 2.0**-version)
            assert sender.send(timeout=PATIENCE).outcomes[0].kind is OutcomeKind.APPLIED
        worker.answer()
        assert (worker.do(contents), worker.do(replay)) == ({2.0**-20}, True)


def serve_inferring(setup: WorkerSetup, version: int) -> int | None:
    with torch.inference_mode():
        return serve(setup, version)


def trains(setup: WorkerSetup) -> bool:
    setup.model(torch.ones(1, 1024, device="cuda")).sum().backward()
    return all(parameter.grad is not None for parameter in setup.model.parameters())


def test_a_worker_may_receive_in_inference_mode(crew: Crew) -> None:
    (worker,), model = crew.start(mapped()), on_gpu(1.0)
    worker.do(join_gpu)
    with trainer(mapped(), worker, model=model) as sender:
        for version in (1, 2, 3):
            filled(model, float(version))
            worker.tell(serve_inferring, version)
            sender.send(timeout=PATIENCE)
            worker.answer()
            assert worker.do(contents) == {float(version)}
        assert worker.do(trains)


def compile_model(setup: WorkerSetup) -> None:
    setup.model.compile()
    compute(setup)


def compute(setup: WorkerSetup) -> bool:
    """Whether the compiled model computes with its current weights."""
    given = torch.ones(1, 1024, device="cuda")
    with torch.inference_mode():
        expected = given
        for layer in setup.model:
            expected = layer(expected)
        return bool(torch.allclose(setup.model(given), expected))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [mapped, copied])
def test_a_compiled_model_computes_with_each_version(crew: Crew, scheme: Any) -> None:
    (worker,), model = crew.start(scheme()), on_gpu(1.0)
    worker.do(join_gpu)
    worker.do(compile_model)
    with trainer(scheme(), worker, model=model) as sender:
        for version in (1, 2, 3):
            synced(sender, worker, model, version, 2.0**-version)
            assert worker.do(compute)


def join_host(setup: WorkerSetup) -> None:
    setup.model = on_gpu().cpu()
    setup.scheme.init_on_worker("policy", pipe=setup.pipe, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()
