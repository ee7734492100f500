"""The recorder: what it writes, when it writes nothing, which machines are born; and that its faults are found."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from recorded import Cast, judged, lines_of, model, play, recorded, recorded_in_two_files, write

import weightsync
from weightsync.engine import recorder as tracing
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.recorded_drivers import RecordedReceiverDriver, RecordedSenderDriver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.verify import verify

SCHEMES = [weightsync.MultiProcessWeightSyncScheme, weightsync.SharedMemWeightSyncScheme]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_runs_over_pipes_and_shared_memory_conform(tmp_path: Path, scheme: Callable[[], Any]) -> None:
    verdict = judged(recorded(tmp_path, lambda: play(scheme())))

    assert verdict.findings == ()
    assert len(verdict.runs) == 1
    assert verdict.events > 100


def test_tracing_md_names_every_kind_of_line() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith("| `what` ")]

    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(
        {"what", *(each.value for each in tracing.LineKind)} - {"header"}
    )


def test_machines_that_exchanged_no_messages_belong_to_separate_runs(tmp_path: Path) -> None:
    verdict = judged(recorded(tmp_path, lambda: [_conversation(), _conversation()]))

    assert [len(run.machines) for run in verdict.runs if len(run.machines) > 1] == [3, 3]


def _conversation() -> None:
    cast = Cast()
    cast.sender.send_async(model(1.0))
    cast.receive()
    cast.sender.wait_async()
    cast.close()


def test_a_refused_call_is_recorded_with_its_event_and_error(tmp_path: Path) -> None:
    def scenario() -> None:
        sender, receiver = RecordedSenderDriver("policy", records), RecordedReceiverDriver("policy", records)
        with pytest.raises(weightsync.StateError):
            sender.take(sending.Wait())
        with pytest.raises(weightsync.StateError):
            receiver.take(receiving.Answered())

    records = tracing.Recorder(tmp_path)
    scenario()
    records.end()
    [file] = tmp_path.glob(tracing.PATTERN)
    found = [(line["role"], line["event"]["is"], line["error"]) for line in lines_of(file) if line["what"] == "refused"]

    assert found == [("sender", "Wait", "StateError"), ("receiver", "Answered", "StateError")]
    assert judged(file).findings == ()


@pytest.mark.parametrize("interrupted", ["note", "born", "end"])
def test_an_interrupt_after_a_line_was_written_leaves_a_valid_trace(
    tmp_path: Path, interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = os.write
    waiting = [f'"what":"{interrupted}"'.encode()]

    def write_then_interrupt(fd: int, body: bytes) -> int:
        nbytes = written(fd, body)
        if waiting and waiting[0] in body:
            waiting.clear()
            signal.raise_signal(signal.SIGINT)
        return nbytes

    monkeypatch.setattr(tracing.os, "write", write_then_interrupt)
    records = tracing.Recorder(tmp_path)

    def record() -> None:
        records.note("first")
        RecordedSenderDriver("policy", records)
        records.end()

    with pytest.raises(KeyboardInterrupt):
        record()
    record()

    assert not waiting
    assert verify([tmp_path]).conforms


# --------------------------------------------------------------------------------------------------- births


def test_new_copied_and_unpickled_senders_are_each_recorded_as_born(tmp_path: Path) -> None:
    def scenario() -> None:
        cast = Cast()
        cast.sender.connect()
        for copied in (copy.copy(cast.sender), copy.deepcopy(cast.sender), pickle.loads(pickle.dumps(cast.sender))):
            copied.close()
        cast.close()

    file = recorded(tmp_path, scenario)

    assert sum(line["what"] == "born" and line["role"] == "sender" for line in lines_of(file)) == 4
    assert judged(file).conforms


def test_a_forked_child_records_its_copies_of_machines_in_its_own_file(tmp_path: Path) -> None:
    with tracing.record(tmp_path):
        cast = Cast()
        cast.sender.connect()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if cast.sender.state is weightsync.State.UNINITIALIZED else 1)
        assert os.waitpid(pid, 0)[1] == 0
        cast.close()

    files = {lines_of(file)[0]["pid"]: lines_of(file) for file in tmp_path.glob(tracing.PATTERN)}

    assert set(files) == {os.getpid(), pid}
    assert files[pid][0]["parent"] == os.getpid()
    assert {line["what"] for line in files[pid][1:]} == {"born"}
    assert not {line["m"] for line in files[pid][1:]} & {line.get("m") for line in files[os.getpid()]}
    assert verify([tmp_path]).conforms


def test_a_forked_child_without_machines_does_not_write_to_its_parents_file(tmp_path: Path) -> None:
    with tracing.record(tmp_path) as recorder:
        recorder.note("the parent's")
        # Free the machines that other tests have left: the child would have copies of them, which are born.
        gc.collect()
        pid = os.fork()
        if pid == 0:
            recorder.note("the child's")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0

    files = [lines_of(file) for file in tmp_path.glob(tracing.PATTERN)]
    notes = {lines[0]["pid"]: [line["text"] for line in lines if line["what"] == "note"] for lines in files}
    assert notes == {os.getpid(): ["the parent's"], pid: ["the child's"]}


def _receive_and_be_killed(end: Any) -> None:
    receiver = weightsync.WeightReceiver(weightsync.MultiProcessWeightSyncScheme())
    receiver.register_model(model())
    receiver.register_worker_transport(end)
    receiver.receive(30.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_trace_of_a_killed_worker_conforms_up_to_its_end(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with tracing.record(tmp_path):
        ours, theirs = context.Pipe()
        child = context.Process(target=_receive_and_be_killed, args=(theirs,))
        child.start()
        theirs.close()
        sender = weightsync.WeightSender(weightsync.MultiProcessWeightSyncScheme())
        sender.add_worker(0, ours)
        report = sender.send(model(1.0), on_failure="report")
        child.join(30)
        sender.close()

    verdict = verify([tmp_path])

    assert report[0].kind.name in ("APPLIED", "LOST")
    assert len(verdict.files) == 2
    assert verdict.findings == ()
    # The other runs are of copies, in the child, of machines that this process had.
    assert [len(run.machines) for run in verdict.runs if len(run.machines) > 1] == [2]


@pytest.mark.parametrize("size", [16, 64, 65, 1000])
def test_bytes_that_differ_anywhere_are_recorded_differently(size: int) -> None:
    texts = {tracing.plain(bytes(size - 1 - at) + b"x" + bytes(at)) for at in range(size)}

    assert len(texts) == size


def test_an_environment_variable_turns_recording_on_in_another_process(tmp_path: Path) -> None:
    program = "import weightsync; weightsync.WeightSender(weightsync.MultiProcessWeightSyncScheme()).close()"
    environment = {**os.environ, tracing.ENVIRONMENT: str(tmp_path / "traces")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=100)

    verdict = verify([tmp_path / "traces"])

    assert verdict.conforms
    assert verdict.events == 2


def test_recording_ends_with_its_with_block_and_the_machines_keep_working(tmp_path: Path) -> None:
    with tracing.record(tmp_path):
        cast = Cast()
        cast.sender.send_async(model(1.0))
        assert os.environ[tracing.ENVIRONMENT] == str(tmp_path)
    cast.receive()
    assert cast.sender.wait_async().ok
    cast.close()

    assert tracing.ENVIRONMENT not in os.environ or os.environ[tracing.ENVIRONMENT] != str(tmp_path)
    [file] = tmp_path.glob(tracing.PATTERN)
    assert lines_of(file)[-1]["what"] == "end"
    assert verify([tmp_path]).conforms


@pytest.mark.parametrize("hours_up", [0, 1_000_000], ids=["a host just started", "a host up for a century"])
def test_times_of_different_clocks_are_not_compared(tmp_path: Path, hours_up: int) -> None:
    _, file = recorded_in_two_files(tmp_path)
    lines = lines_of(file)
    first = min(line["t"] for line in lines)
    lines = [{**line, "t": line["t"] - first + hours_up * 3_600_000_000_000} for line in lines]
    lines[0]["clock"] = "another host's"
    write(file, lines)

    assert verify([tmp_path]).findings == ()


def test_messages_of_unrecorded_machines_are_counted_and_not_refused(tmp_path: Path) -> None:
    cast = Cast()
    with tracing.record(tmp_path):
        seen = cast.worker()
        ours, theirs = multiprocessing.Pipe()
        seen.register_worker_transport(theirs)
        cast.sender.add_worker(2, ours)
        cast.sender.send_async(model(1.0))
        seen.receive(1.0)
        seen.close()
    cast.close()

    verdict = verify([tmp_path])

    assert verdict.conforms
    assert [len(run.unseen) for run in verdict.runs] == [2]


# ----------------------------------------------------------------------------------------------------- off


def _executed(call: Callable[[], None]) -> tuple[int, set[str]]:
    """Count the instructions that a call takes, and name the files whose code it runs."""
    count, files = itertools.count(), set[str]()

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        files.add(frame.f_code.co_filename)
        if event == "opcode":
            next(count)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return next(count), files


def _instructions() -> tuple[int, set[str]]:
    cast = Cast()
    cast.sender.connect()
    cast.receive(0)
    cast.sender.poll()

    def steps() -> None:
        cast.sender.send_async(model(1.0), worker_ids=[0])
        cast.workers[0].receive(0.0)
        cast.sender.poll()
        cast.sender.wait_async()

    try:
        steps()
        return _executed(steps)
    finally:
        cast.close()


def test_a_step_executes_no_recorder_code_while_recording_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.ENVIRONMENT, raising=False)
    monkeypatch.setattr(tracing, "_recorders", [])

    cast = Cast()
    drivers = {type(cast.sender._driver), type(cast.workers[0]._driver)}
    cast.close()
    count, files = _instructions()

    assert drivers == {SenderDriver, ReceiverDriver}
    assert count > 1000
    assert {Path(file).name for file in files} & {"sender.py", "receiver.py"}
    assert not {file for file in files if Path(file).stem in ("recorder", "recorded_drivers")}


def test_the_unrecorded_drivers_do_not_refer_to_the_recorder() -> None:
    for driver in (SenderDriver, ReceiverDriver):
        names = {name for each in vars(driver).values() for name in _names(each)}
        names.discard("trace_context")  # a field of updates, for OpenTelemetry
        assert not {name for name in names if "trac" in name or "record" in name or "life" in name}, driver


def _names(function: Any) -> set[str]:
    code = getattr(function, "__code__", None)
    return set() if code is None else {*code.co_names, *code.co_freevars}


def test_the_probe_sees_recorder_code_while_recording_is_on(tmp_path: Path) -> None:
    with tracing.record(tmp_path):
        on, files = _instructions()

    assert {file for file in files if Path(file).stem in ("recorder", "recorded_drivers")}
    assert on > 0


# ------------------------------------------------------------------------------ faults planted in the recorder


def _no_late_steps(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if what is not tracing.LineKind.STEP or said["input"].name != "STALE":
        _tell(self, what, model_id, **said)


def _no_messages_received(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if what is not tracing.LineKind.RECEIVED:
        _tell(self, what, model_id, **said)


def _no_messages_sent(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if what is not tracing.LineKind.SENT:
        _tell(self, what, model_id, **said)


def _no_closes(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if what is not tracing.LineKind.CLOSED:
        _tell(self, what, model_id, **said)


def _no_invalidation(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if what is not tracing.LineKind.STEP or not isinstance(said["event"], receiving.Invalidate):
        _tell(self, what, model_id, **said)


def _no_births(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if what is not tracing.LineKind.BORN:
        _tell(self, what, model_id, **said)


def _state_before_in_place_of_after(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if what is tracing.LineKind.STEP:
        said["after"] = said["before"]
    _tell(self, what, model_id, **said)


def _no_effects(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if what is tracing.LineKind.STEP:
        said["effects"] = ()
    _tell(self, what, model_id, **said)


def _initial_data_in_every_line(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if "data" in said:
        said["data"] = type(said["data"])()
    _tell(self, what, model_id, **said)


def _link_1_in_every_line(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if "link" in said and what is not tracing.LineKind.LINK:
        said["link"] = 1
    _tell(self, what, model_id, **said)


def _every_tenth_line_lost(self: Any, what: Any, model_id: str, **said: Any) -> None:
    if next(_lost) % 10:
        _tell(self, what, model_id, **said)
    else:
        next(self._numbers)


_tell = tracing.MachineTrace.tell
_lost = itertools.count(1)


@pytest.mark.parametrize(
    "fault",
    [
        _no_late_steps,
        _no_messages_received,
        _no_messages_sent,
        _no_closes,
        _no_invalidation,
        _no_births,
        _state_before_in_place_of_after,
        _no_effects,
        _initial_data_in_every_line,
        _link_1_in_every_line,
        _every_tenth_line_lost,
    ],
    ids=lambda fault: fault.__name__.strip("_"),
)
def test_a_faulty_recorder_writes_a_trace_that_does_not_conform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    monkeypatch.setattr(tracing.MachineTrace, "tell", fault)

    assert not judged(recorded(tmp_path)).conforms


@pytest.mark.parametrize("driver", [RecordedSenderDriver, RecordedReceiverDriver])
@pytest.mark.parametrize("name", ["_step", "_write", "_close_link"])
def test_a_recorder_without_one_of_its_hooks_writes_a_trace_that_does_not_conform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: type, name: str
) -> None:
    monkeypatch.delattr(driver, name)

    assert not judged(recorded(tmp_path)).conforms


@pytest.mark.parametrize("folder", [None, 3, "", b"traces", "tra\0ces"])
def test_a_folder_that_is_not_a_path_is_refused_and_nothing_is_recorded(folder: Any) -> None:
    before = dict(os.environ), tracing.recorder()
    with pytest.raises(weightsync.ConfigurationError, match=r"^recorder.record\(\) was given"), tracing.record(folder):
        raise AssertionError("it is a path")

    assert (dict(os.environ), tracing.recorder()) == before
