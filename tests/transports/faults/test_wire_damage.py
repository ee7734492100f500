"""Other contents of a pipe: user messages, torn and damaged frames, other protocol versions, false messages."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from edits import with_checksum
from fleet import PATIENCE, Pair, constants, filled, large, raw, small
from torch import nn

from weightsync import ProtocolError, RefusalKind, State, TransportError, WorkerLostError
from weightsync.protocol import codec
from weightsync.protocol._tables import PROTOCOL_VERSION
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Refusal, Update
from weightsync.transports.pipe.framing import PREAMBLE
from weightsync.weights.layout import Layout

USER_MESSAGES = [
    {"step": 3},
    b"",
    b"W",
    b"WSY",
    PREAMBLE[:-1],
    "text",
    None,
    [1, 2],
    b"x" * 100_000,
    ("update_weights", {"a": 1}),
]
BY_HAND = pytest.mark.untraced("writes messages that no machine has sent")


@pytest.fixture(params=[small, large], ids=["inline", "segment"])
def sized(request: pytest.FixtureRequest, scheme_class: Any) -> Iterator[Pair]:
    made = Pair(scheme_class, model=request.param)
    yield made
    made.close()


def framed(data: bytes) -> bytes:
    """The data with the length prefix of `multiprocessing`."""
    return struct.pack("!i", len(data)) + data


def write(connection: Any, data: bytes) -> None:
    """Write raw bytes to the connection, bypassing the library."""
    with raw(connection) as out:
        out._send(data)


# ------------------------------------------------------------------------------------ the user's own messages


def test_user_messages_are_kept_in_order_and_returned_unchanged(pair: Pair) -> None:
    ours, theirs = pair.pipes[0]
    for number, message in enumerate(USER_MESSAGES):
        raw(ours).send(message)
        raw(theirs).send(message)
        filled(pair.source, float(number))
        assert pair.sync().ok

    assert [pair.receiver.pipe.recv() for _ in USER_MESSAGES] == USER_MESSAGES
    assert [pair.sender.pipe(0).recv() for _ in USER_MESSAGES] == USER_MESSAGES
    assert not pair.receiver.pipe.poll()
    assert not pair.sender.pipe(0).poll()


def test_user_messages_sent_through_links_are_received_through_links(pair: Pair) -> None:
    for message in USER_MESSAGES:
        pair.sender.pipe(0).send(message)
        pair.receiver.pipe.send(message)
    assert pair.sync().ok

    assert [pair.receiver.pipe.recv() for _ in USER_MESSAGES] == USER_MESSAGES
    assert [pair.sender.pipe(0).recv() for _ in USER_MESSAGES] == USER_MESSAGES


def test_a_user_pickle_is_unpickled_only_by_the_users_recv(pair: Pair) -> None:
    raw(pair.pipes[0][0]).send_bytes(pickle.dumps(_Bomb()))
    assert pair.sync().ok
    assert pair.receiver.pipe.poll()

    with pytest.raises(ZeroDivisionError):
        pair.receiver.pipe.recv()


class _Bomb:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_user_messages_are_readable_after_the_end_of_the_link(pair: Pair) -> None:
    pair.sync()
    pair.sender.pipe(0).send("stop")
    pair.scheme.close()
    with pytest.raises(TransportError):
        pair.receiver.receive(timeout=PATIENCE)

    assert pair.receiver.pipe.recv() == "stop"
    with pytest.raises(EOFError):
        pair.receiver.pipe.recv()


# ------------------------------------------------------------------------------------------- damaged frames


def hello(**changes: Any) -> Hello:
    return Hello(**{"model_id": "policy", "incarnation": 1, **changes})


def damaged() -> dict[str, bytes]:
    whole = codec.encode(hello())
    other = bytearray(whole)
    other[4:6] = struct.pack("!H", PROTOCOL_VERSION + 1)
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    kind = bytearray(whole)
    kind[6] = 77
    beyond = codec.encode(hello(pid=2**31 - 1)).replace(struct.pack("!Q", 2**31 - 1), struct.pack("!Q", 2**31))
    huge = bytearray(whole)
    huge[12:16] = b"\xff" * 4
    return {
        "another protocol version": framed(bytes(other)),
        "a flipped bit": framed(bytes(flipped)),
        "an unknown kind": framed(bytes(kind)),
        "a header alone": framed(whole[: codec.HEADER_NBYTES]),
        "half a header": framed(whole[:30]),
        "our magic alone": framed(codec.MAGIC),
        "our preamble and little more": framed(PREAMBLE + b"W"),
        "too long": framed(whole + b"x"),
        "a body that claims 4 GiB": framed(bytes(huge)),
        "a negative length": struct.pack("!i", -2),
        "a process id that no process has": framed(with_checksum(beyond)),
    }


DAMAGED = damaged()


@pytest.mark.parametrize("case", list(DAMAGED))
def test_a_damaged_frame_to_a_worker_is_a_protocol_error_with_its_bytes(sized: Pair, case: str) -> None:
    sized.sync()
    write(sized.pipes[0][0], DAMAGED[case])
    with pytest.raises(ProtocolError) as broken:
        sized.receiver.receive(timeout=PATIENCE)

    assert broken.value.unread
    assert (sized.receiver.version, constants(sized.model)) == (1, {1.0})
    assert sized.receiver.state is State.UNINITIALIZED
    with pytest.raises(TransportError):
        sized.receiver.receive()
    with pytest.raises(WorkerLostError):
        sized.sender.send(timeout=PATIENCE)
    assert sized.sender.state is State.READY


@pytest.mark.parametrize("case", list(DAMAGED))
def test_a_damaged_frame_to_the_trainer_loses_only_that_worker(three: Pair, case: str) -> None:
    three.sync()
    write(three.pipes[1][1], DAMAGED[case])
    filled(three.source, 2.0)
    report_of = three.sender.send_async()
    for index in (0, 2):
        three.receivers[index].receive(timeout=0)
    report = three.sender.wait_async(timeout=PATIENCE, on_failure="report")

    assert report_of.version == 2
    assert [report[i].kind.name for i in range(3)] == ["APPLIED", "LOST", "APPLIED"]
    assert [constants(model) for model in three.models] == [{2.0}, {1.0}, {2.0}]


def test_another_protocol_version_is_named_in_the_error(pair: Pair) -> None:
    write(pair.pipes[0][0], DAMAGED["another protocol version"])
    with pytest.raises(ProtocolError, match=rf"version {PROTOCOL_VERSION + 1}.*version {PROTOCOL_VERSION}"):
        pair.receiver.receive(timeout=PATIENCE)


@pytest.mark.parametrize("side", ["worker", "trainer"])
def test_a_frame_cut_by_the_death_of_its_writer_ends_the_link(scheme_class: Any, side: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    half = framed(codec.encode(hello()))[:40]
    with scheme_class() as scheme:
        if side == "worker":
            scheme.init_on_worker("policy", pipe=theirs, model=small())
            ours._send(half)
            ours.close()
            with pytest.raises(TransportError):
                scheme.get_receiver().receive(timeout=PATIENCE)
        else:
            scheme.init_on_sender("policy", pipes=[ours], model=small())
            theirs._send(half)
            theirs.close()
            with pytest.raises(WorkerLostError):
                scheme.get_sender().send(timeout=PATIENCE)


@BY_HAND
def test_a_frame_that_arrives_byte_by_byte_is_read(pair: Pair) -> None:
    ours, _ = pair.pipes[0]
    pair.sync()
    data = framed(codec.encode(Bye(model_id="policy", incarnation=pair.sender.incarnation, reason="by the byte")))
    for number in data[:-1]:
        write(ours, bytes([number]))
        assert pair.receiver.receive(timeout=0) is False
    write(ours, data[-1:])

    with pytest.raises(TransportError, match="by the byte"):
        pair.receiver.receive(timeout=0)


def never_serve(receiver: Any) -> None:
    while True:
        assert receiver.receive(timeout=0) is False


@BY_HAND
def test_random_damage_of_a_handshake_or_an_update_is_never_applied(scheme_class: Any) -> None:
    draw = random.Random(7)
    fresh = Layout([("weight", "float32", (2, 2)), ("bias", "float32", (2,))])
    update = Update(
        model_id="policy", incarnation=5, version=1, layout_digest=fresh.digest, layout=fresh.encode(), nbytes=24
    )
    whole = framed(codec.encode(hello(incarnation=5))) + framed(codec.encode(update) + bytes(24))
    for _ in range(60):
        ours, theirs = multiprocessing.Pipe()
        data = bytearray(whole)
        position = draw.randrange(len(whole) - 24)
        data[position] ^= 1 << draw.randrange(8)
        destination = filled(nn.Linear(2, 2), 9.0)
        with scheme_class() as scheme:
            scheme.init_on_worker("policy", pipe=theirs, model=destination)
            ours._send(bytes(data))
            ours.close()
            with pytest.raises((ProtocolError, TransportError)):
                never_serve(scheme.get_receiver())

            assert constants(destination) == {9.0}, position
            assert scheme.get_receiver().version is None


# -------------------------------------------------------------------------------------------------- false messages


def talk(pair: Pair, message: Message, payload: bytes = b"") -> None:
    """Send the worker a forged message of the sender."""
    write(pair.pipes[0][0], framed(codec.encode(message) + payload))


def answer(pair: Pair, message: Message) -> None:
    """Send the sender a forged message of the worker."""
    write(pair.pipes[0][1], framed(codec.encode(message)))


@BY_HAND
def test_an_ack_of_another_digest_loses_the_link(pair: Pair) -> None:
    pair.sync()
    pair.sender.send_async()
    answer(pair, Ack(model_id="policy", incarnation=pair.sender.incarnation, version=2, digest=b"0" * 16))
    with pytest.raises(WorkerLostError, match="digest"):
        pair.sender.wait_async(timeout=PATIENCE)


@BY_HAND
@pytest.mark.parametrize("change", [{"version": 1}, {"version": 3}, {"incarnation": 1}])
def test_an_ack_of_another_version_or_incarnation_is_stale(pair: Pair, change: dict[str, int]) -> None:
    pair.sync()
    pair.sender.send_async()
    answer(pair, Ack(**{"model_id": "policy", "incarnation": pair.sender.incarnation, "version": 2, **change}))
    with pytest.raises(TimeoutError):
        pair.sender.wait_async(timeout=0.02)

    assert pair.sender.stale_answers >= 1
    pair.receiver.receive(timeout=0)
    assert pair.sender.wait_async().ok


@BY_HAND
def test_an_update_from_a_worker_loses_the_link(pair: Pair) -> None:
    pair.sync()
    answer(pair, Update(model_id="policy", incarnation=pair.sender.incarnation, version=9, layout_digest=b"0" * 16))
    with pytest.raises(WorkerLostError, match="Update"):
        pair.sender.send(timeout=PATIENCE)


@BY_HAND
@pytest.mark.parametrize("kind", [Ack, Refusal])
def test_an_answer_from_a_sender_takes_the_link_down(pair: Pair, kind: type) -> None:
    pair.sync()
    more = {"kind": RefusalKind.STALE} if kind is Refusal else {}
    talk(pair, kind(model_id="policy", incarnation=pair.sender.incarnation, version=1, **more))
    with pytest.raises(ProtocolError):
        pair.receiver.receive(timeout=0)

    assert pair.receiver.version == 1


@BY_HAND
def test_an_update_before_any_handshake_takes_the_link_down(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as scheme:
        scheme.init_on_worker("policy", pipe=theirs, model=small())
        update = Update(model_id="policy", incarnation=1, version=1, layout_digest=Layout([]).digest)
        ours._send(framed(codec.encode(update)))
        with pytest.raises(ProtocolError):
            scheme.get_receiver().receive(timeout=PATIENCE)
        assert scheme.get_receiver().version is None
        answer = codec.decode(ours.recv_bytes().removeprefix(PREAMBLE))

    assert isinstance(answer, Refusal)
    ours.close()


@BY_HAND
@pytest.mark.parametrize(
    ("change", "payload"),
    [
        ({"layout_digest": b"1" * 16}, b""),
        ({"layout": b"nonsense"}, b""),
        ({"nbytes": 4}, b"1234"),
        ({"extras": b"nonsense"}, b""),
    ],
)
def test_an_update_that_contradicts_itself_changes_nothing(pair: Pair, change: dict[str, Any], payload: bytes) -> None:
    pair.sync()
    layout = Layout([])
    fields = {"model_id": "policy", "incarnation": pair.sender.incarnation, "version": 2}
    talk(pair, Update(**{**fields, "layout_digest": layout.digest, "layout": layout.encode(), **change}), payload)
    try:
        assert pair.receiver.receive(timeout=0) is False
    except ProtocolError:
        assert pair.receiver.state is State.UNINITIALIZED

    assert (pair.receiver.version, constants(pair.model)) == (1, {1.0})


@BY_HAND
def test_an_update_whose_tensors_were_damaged_is_refused_by_its_digest(pair: Pair) -> None:
    pair.sync()
    layout = pair.sender._driver.layout
    assert layout is not None
    update = Update(
        model_id="policy",
        incarnation=pair.sender.incarnation,
        version=2,
        layout_digest=layout.digest,
        digest=b"2" * 16,
        nbytes=layout.nbytes,
    )
    talk(pair, update, bytes(layout.nbytes))

    assert pair.receiver.receive(timeout=0) is False
    assert "damaged" in pair.receiver.last_refusal
    assert constants(pair.model) == {1.0}


@BY_HAND
def test_an_update_of_another_layout_is_refused_with_the_differences(pair: Pair) -> None:
    pair.sync()
    layout = Layout([("other", "float32", ())])
    fields = {"model_id": "policy", "incarnation": pair.sender.incarnation, "version": 2}
    talk(pair, Update(**fields, layout_digest=layout.digest, layout=layout.encode(), nbytes=4), bytes(4))

    assert pair.receiver.receive(timeout=0) is False
    assert "'other'" in pair.receiver.last_refusal
    assert (pair.receiver.version, constants(pair.model)) == (1, {1.0})


def test_an_older_trainer_is_fenced_and_can_return_with_the_reported_fence(scheme_class: Any) -> None:
    (old, first), (new, second), (again, third) = (multiprocessing.Pipe() for _ in range(3))
    schemes = [scheme_class() for _ in range(4)]
    older, newer, back, worker = schemes
    older.init_on_sender("policy", pipes=[old], model=small(1.0))
    newer.init_on_sender("policy", pipes=[new], model=small(2.0))
    worker.init_on_worker("policy", pipe=first, model=small())
    receiver = worker.get_receiver()
    older.get_sender().send_async()
    assert receiver.receive(timeout=0)
    older.get_sender().wait_async()
    receiver.register_worker_transport(second)
    newer.get_sender().send_async()
    assert receiver.receive(timeout=PATIENCE)
    assert newer.get_sender().wait_async().ok
    with pytest.raises(WorkerLostError, match="FENCED") as fenced:
        older.get_sender().send(timeout=PATIENCE)

    assert constants(receiver.model) == {2.0}
    assert fenced.value.fence == newer.get_sender().incarnation
    with pytest.raises(WorkerLostError) as again_fenced:
        older.get_sender().send(timeout=PATIENCE)
    for error in (fenced.value, again_fenced.value):
        assert "fence=error.fence" in str(error)
        assert "add_worker()" not in str(error)  # a worker added again would be FENCED, too
    back.init_on_sender("policy", pipes=[again], model=small(3.0), fence=fenced.value.fence)
    receiver.register_worker_transport(third)
    back.get_sender().send_async()
    assert receiver.receive(timeout=PATIENCE)
    assert back.get_sender().wait_async().ok
    assert constants(receiver.model) == {3.0}
    for scheme in schemes:
        scheme.close()


def test_a_handshake_below_the_fence_is_refused_with_the_fence(scheme_class: Any) -> None:
    (old, first), (new, second) = (multiprocessing.Pipe() for _ in range(2))
    older, newer, worker = (scheme_class() for _ in range(3))
    older.init_on_sender("policy", pipes=[old], model=small(1.0))
    newer.init_on_sender("policy", pipes=[new], model=small(2.0))
    worker.init_on_worker("policy", pipe=second, model=small())
    newer.get_sender().send_async()
    assert worker.get_receiver().receive(timeout=PATIENCE)
    worker.get_receiver().register_worker_transport(first)
    assert worker.get_receiver().receive(timeout=0) is False
    with pytest.raises(WorkerLostError, match="FENCED") as fenced:
        older.get_sender().send(timeout=PATIENCE)

    assert fenced.value.fence == newer.get_sender().incarnation
    assert newer.get_sender().wait_async().ok
    for scheme in (older, newer, worker):
        scheme.close()
