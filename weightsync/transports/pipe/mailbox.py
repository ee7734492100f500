"""Sorts frames by recipient: several models and the user may share a connection."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import Final

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Bye, Hello, Message, Refusal, Update
from weightsync.transports.base import Waker
from weightsync.transports.pipe.framing import Frame, UserMessage

#: The number of frames kept for models that are not registered yet.
MAX_UNCLAIMED: Final = 64
#: The number of the user's messages that are kept until they are read.
MAX_USER_MESSAGES: Final = 65_536
#: The bytes of each of the two, above which nothing more is kept. A single message may be larger.
MAX_KEPT_NBYTES: Final = 2**30


class Mailbox:
    """What has arrived for one model and was not collected yet."""

    def __init__(self, model_id: str, peer: str) -> None:
        self.model_id = model_id
        self.peer = peer
        self.frames: deque[Frame] = deque()
        self.waker = Waker()
        #: Whether its waker is readable, for something that its owner has not read from the socket itself.
        self.signalled = False
        #: Whether its owner has taken out a goodbye last: what follows is not for its link.
        self.said_goodbye = False

    def signal(self) -> None:
        """Make its waker readable: something arrived that its owner has not read from the socket itself."""
        if not self.signalled:
            self.signalled = True
            self.waker.fire()

    def unsignal(self) -> None:
        """Make its waker unreadable, as its owner takes out everything now."""
        self.signalled = False
        self.waker.clear()

    def put_back_behind_goodbye(self, frames: list[Frame]) -> list[Frame]:
        """Of frames that were taken out, put back those behind the first goodbye. Returns the others."""
        end = 1 + next(index for index, frame in enumerate(frames) if isinstance(frame.message, Bye))
        self.said_goodbye = True
        if frames[end:]:
            self.frames.extend(frames[end:])
            self.signal()
        return frames[:end]

    def successor_frames(self) -> list[Frame]:
        """Empty it as its link closes. Returns what is the next link's: from a handshake behind a goodbye on."""
        frames, said_goodbye = list(self.frames), self.said_goodbye
        self.frames.clear()
        for index, frame in enumerate(frames):
            if said_goodbye and _is_sender_handshake(frame.message):
                discard(frames[:index])
                return frames[index:]
            said_goodbye = said_goodbye or isinstance(frame.message, Bye)
        discard(frames)
        return []


class Sorter:
    """The mailboxes of one connection. Called under its lock."""

    def __init__(self) -> None:
        self._boxes: dict[str, Mailbox] = {}
        self._unclaimed: deque[Frame] = deque()
        #: Models whose mailbox was closed here, until a new link begins: what comes before was for the closed one.
        self._awaiting_link: set[str] = set()
        #: Models that are not registered, and whose senders were not answered yet.
        self.unmet: list[str] = []
        self._unclaimed_nbytes = 0
        self.user_messages: deque[UserMessage] = deque()
        self._user_nbytes = 0
        self._user_waker: Waker | None = None
        # The order of arrival of the user's messages, and of each model's newest update among them.
        self._sorted = 0
        self._user_positions: deque[int] = deque()
        self._update_positions: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._boxes)

    def user_waker(self) -> Waker:
        """Fired for each of the user's messages, once it has been asked for."""
        if self._user_waker is None:
            self._user_waker = Waker()
        return self._user_waker

    def register(self, model_id: str, peer: str) -> Mailbox:
        """A mailbox for a model, with the frames that have already arrived for it.

        After an earlier mailbox of the model's, it gets nothing until a new link begins.

        Raises ConfigurationError: the model has a mailbox.
        """
        if model_id in self._boxes:
            raise ConfigurationError(
                f"Model {model_id!r} already has a link over this connection: close that one first."
            )
        box = self._boxes[model_id] = Mailbox(model_id, peer)
        self.unmet = [each for each in self.unmet if each != model_id]
        box.frames.extend(frame for frame in self._unclaimed if frame.message.model_id == model_id)
        self._unclaimed = deque(frame for frame in self._unclaimed if frame.message.model_id != model_id)
        self._unclaimed_nbytes = sum(map(_nbytes, self._unclaimed))
        if box.frames:
            box.signal()
        return box

    def leave(self, box: Mailbox) -> bool:
        """Drop a mailbox, and later frames for its link; False if it was dropped before."""
        if self._boxes.get(box.model_id) is not box:
            return False
        del self._boxes[box.model_id]
        successor_frames = box.successor_frames()
        if not successor_frames:
            self._awaiting_link.add(box.model_id)
        for frame in successor_frames:
            self._keep_unclaimed(frame)
        box.waker.close()
        return True

    def answers_to_unmet(self) -> list[Refusal]:
        """The answers that senders are still to get, if any model is registered."""
        if not self._boxes:
            return []
        unmet, self.unmet = self.unmet, []
        return [_unmet_refusal(model_id, self._boxes) for model_id in unmet]

    def unclaimed(self) -> tuple[str, ...]:
        """The models that are not registered and for which frames have arrived."""
        return tuple(dict.fromkeys(frame.message.model_id for frame in self._unclaimed))

    def take_user_message(self) -> UserMessage | None:
        """The next of the user's messages, if there is one."""
        if not self.user_messages:
            return None
        self._user_positions.popleft()
        taken = self.user_messages.popleft()
        self._user_nbytes -= len(taken.data)
        return taken

    def user_message_is_first(self, model_id: str) -> bool:
        """Whether the user's next message arrived before the model's newest update."""
        return bool(self.user_messages) and self._user_positions[0] < self._update_positions.get(model_id, 0)

    def sort(self, frame: Frame | UserMessage, reader: Mailbox | None) -> None:
        """Put a frame where it belongs, and wake its owner unless the owner is the reader.

        Raises:
            ProtocolError: there are too many frames for models that are not registered.
            TransportError: there are too many unread messages of the user's.
        """
        self._sorted += 1
        if isinstance(frame, UserMessage):
            self._keep_user_message(frame)
            return
        model_id = frame.message.model_id
        box = self._boxes.get(model_id)
        if model_id in self._awaiting_link:
            if not _begins_link(frame.message, box):
                discard([frame])
                return
            self._awaiting_link.discard(model_id)
        if isinstance(frame.message, Update):
            self._update_positions[model_id] = self._sorted
        if box is not None:
            box.frames.append(frame)
            if box is not reader:
                box.signal()
        elif len(self._unclaimed) < MAX_UNCLAIMED and self._unclaimed_nbytes < MAX_KEPT_NBYTES:
            self._keep_unclaimed(frame)
        else:
            discard([frame])
            raise ProtocolError(
                f"{len(self._unclaimed)} messages of {self._unclaimed_nbytes} bytes are for models without a link, "
                f"and another arrived (for {model_id!r}): initialise that model at this end, with the same model_id."
            )

    def _keep_unclaimed(self, frame: Frame) -> None:
        model_id = frame.message.model_id
        self._unclaimed.append(frame)
        if _is_sender_handshake(frame.message) and model_id not in self.unmet:
            self.unmet.append(model_id)
        self._unclaimed_nbytes += _nbytes(frame)
        if self._user_waker is not None:
            self._user_waker.fire()

    def _keep_user_message(self, frame: UserMessage) -> None:
        if len(self.user_messages) >= MAX_USER_MESSAGES or self._user_nbytes >= MAX_KEPT_NBYTES:
            raise TransportError(
                f"{len(self.user_messages)} messages of your own ({self._user_nbytes} bytes) are unread: read them "
                "from receiver.pipe or sender.pipe(worker_id)"
            )
        self.user_messages.append(frame)
        self._user_nbytes += len(frame.data)
        self._user_positions.append(self._sorted)
        if self._user_waker is not None:
            self._user_waker.fire()

    def signal_all(self, except_box: Mailbox | None = None) -> None:
        """Wake all readers, or all but one: something concerns them."""
        for box in self._boxes.values():
            if box is not except_box:
                box.signal()
        if self._user_waker is not None:
            self._user_waker.fire()

    def clear(self) -> None:
        """Drop all mailboxes with their contents; the user's messages stay."""
        for box in list(self._boxes.values()):
            discard(box.frames)
            box.frames.clear()
            self.leave(box)
        discard(self._unclaimed)
        self._unclaimed.clear()
        self._unclaimed_nbytes = 0
        if self._user_waker is not None:
            self._user_waker.close()


def _nbytes(frame: Frame) -> int:
    return frame.payload.nbytes if frame.payload is not None else 0


def discard(frames: Iterable[Frame]) -> None:
    """Close the descriptors of frames that will not be opened."""
    for frame in frames:
        for descriptor in frame.descriptors:
            os.close(descriptor)


# A handshake for a model without a receiver is answered by a Refusal under incarnation 0, which no sender has: it
# settles nothing. The handshake is kept, and taken if the worker registers the model later.


def _is_sender_handshake(message: Message) -> bool:
    """Whether a message is a handshake that a sender began: a receiver's answer has a fence."""
    return isinstance(message, Hello) and not message.fence


def _begins_link(message: Message, box: Mailbox | None) -> bool:
    """Whether a message is the first that the other end sends over a new link: its handshake, or its answer to ours.

    Without a link here, nothing can be an answer.
    """
    if _is_sender_handshake(message) or box is None:
        return _is_sender_handshake(message)
    if isinstance(message, Hello) or (isinstance(message, Refusal) and message.version == 0):
        return True
    return isinstance(message, Bye) and message.incarnation == 0  # it ends before it has answered


def _unmet_refusal(model_id: str, registered: Iterable[str]) -> Refusal:
    """The answer to a handshake for a model that is not registered."""
    known = ", ".join(map(repr, sorted(registered)))
    reason = (
        f"the worker has a receiver of {known} over this connection, and none of {model_id!r} so far: give both sides "
        "the same model_id"
    )
    return Refusal(model_id=model_id, incarnation=0, version=0, kind=RefusalKind.REFUSED, reason=reason)


def unmet_reason(message: Message) -> str:
    """The reason in such an answer; empty: the message is another."""
    if not isinstance(message, Refusal) or message.kind is not RefusalKind.REFUSED:
        return ""
    return message.reason if message.incarnation == message.version == 0 else ""
