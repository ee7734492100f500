"""Which payloads one worker may still be reading. Its answers are what tells."""

from __future__ import annotations

from collections.abc import Hashable

from weightsync.messages import Ack, Message, Refusal, Update
from weightsync.transports.memory import Buffer

_Key = tuple[int, int]


class Pins:
    """The buffers that one link has shown to its worker.

    A worker maps what it serves. So a buffer stays pinned until the worker has acked a newer version, and so
    has nothing of the old left, or refused that one without ever having acked it, or is known dead.
    """

    def __init__(self) -> None:
        self._held: list[tuple[_Key, Buffer]] = []
        self._sent: _Key = (0, 0)
        self._acked: _Key = (0, 0)
        self._owner = object()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, update: Update, buffer: Buffer | None) -> None:
        """Pin what goes out with ``update``; None: the worker gets a copy of its own."""
        key = (update.incarnation, update.version)
        self._sent = max(self._sent, key)
        if buffer is not None:
            self._held.append((key, buffer))
            buffer.pin(self._token(key))

    def answered(self, message: Message) -> None:
        """Learn from what the worker says; an ack of what was never sent teaches nothing."""
        if isinstance(message, Ack):
            key = (message.incarnation, message.version)
            self._acked = max(self._acked, key) if key <= self._sent else self._acked
            self._release([held for held in self._held if held[0] < self._acked])
        elif isinstance(message, Refusal):
            key = (message.incarnation, message.version)
            if key != self._acked:
                self._release([held for held in self._held if held[0] == key])

    def release(self) -> None:
        """The worker's process is dead: nobody reads them."""
        self._release(list(self._held))

    def retire(self) -> None:
        """The worker can no longer be asked: none of them may be written again."""
        for _, buffer in self._held:
            buffer.retire()
        self.release()

    def _release(self, over: list[tuple[_Key, Buffer]]) -> None:
        self._held = [held for held in self._held if held not in over]
        for key, buffer in over:
            buffer.unpin(self._token(key))

    def _token(self, key: _Key) -> Hashable:
        return self._owner, key
