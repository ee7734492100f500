"""Weights for workers that lack our receiver; their answers are in `weightsync.transports.calls.without_receiver`."""

from __future__ import annotations

import threading
import weakref
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


class SharedWeights:
    """A version's weights, kept while some call carries them."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights


class SharedPresenter:
    """Presents each version once for all workers of a sender."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._presenter = Presenter()
        self._shared: weakref.WeakValueDictionary[tuple[str, int, int, WeightsForm], SharedWeights] = (
            weakref.WeakValueDictionary()
        )

    def present(self, update: Update, payload: Buffer | None, form: WeightsForm | None) -> SharedWeights:
        """The weights of an update in a form (None: as they were given). The payload may be overwritten afterwards."""
        key = update.model_id, update.incarnation, update.version, form or update.form
        with self._lock:
            self._presenter.read_layout(update)
            shared = self._shared.get(key)
            if shared is None:
                weights = self._presenter.present(update, payload_of(update, payload), form)
                shared = self._shared[key] = SharedWeights(weights)
            return shared


def payload_of(update: Update, payload: Buffer | None) -> memoryview:
    """The bytes of an update."""
    return memoryview(b"") if payload is None else payload.view[: update.nbytes]
