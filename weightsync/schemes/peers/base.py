"""Weights for workers that lack our receiver; their answers are in `weightsync.transports.calls.without_receiver`."""

from __future__ import annotations

import threading
from typing import Any

from weightsync.protocol.messages import Update, WeightsForm
from weightsync.transports.buffers import Buffer
from weightsync.weights.layout import Layout
from weightsync.weights.unpacking import present_as


class Presenter:
    """Turns updates into weights. A link's first update brings the layout, which is kept for those after it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts: dict[bytes, Layout] = {}

    def read_layout(self, update: Update) -> None:
        """Keep the layout that an update brings, if it brings one."""
        if update.layout:
            with self._lock:
                self._layouts[update.layout_digest] = Layout.decode(update.layout)

    def present(self, update: Update, payload: memoryview, form: WeightsForm | None = None) -> Any:
        """The weights of an update as fresh tensors, in a form (None: the form in which the trainer gave them)."""
        self.read_layout(update)
        return present_as(form or update.form, self._layouts[update.layout_digest], payload, update.extras)


def payload_of(update: Update, payload: Buffer | None) -> memoryview:
    """The bytes of an update."""
    return memoryview(b"") if payload is None else payload.view[: update.nbytes]
