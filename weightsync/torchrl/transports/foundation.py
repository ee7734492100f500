"""What both halves of a transport facade stand on."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from weightsync.clock import Timeout
from weightsync.engine.copies import is_clean
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.errors import ConfigurationError, StateError
from weightsync.schemes.arguments import POLICY, Form
from weightsync.schemes.facade_services import FacadeServices
from weightsync.schemes.link_transport import LinkTransport
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.transports.process import forget_after_fork
from weightsync.weights.strategy import WeightStrategy


class Foundation(LinkTransport):
    """A transport facade's configuration, its links, and how it ends and is copied.

    Behind the verbs stand a `WeightSender` or a `WeightReceiver`, one a model, made on first use: a late ack is never
    taken for a newer one, a dead peer ends a wait, and every failure is raised. A pickled, copied or forked transport
    carries its configuration only.

    Args:
        form: which generation's results it gives.
        timeout: seconds that `send_weights`, `wait_ack` and `check_ack` wait; None: for ever; default:
            `WEIGHTSYNC_TIMEOUT` or 60.
        strategy: the format of the weights handed out, and how modules are extracted.
    """

    #: What `__getstate__` leaves behind.
    _live: tuple[str, ...] = (
        "_senders",
        "_receivers",
        "_outstanding",
        "_told",
        "_last",
        "_lock",
        "_services",
        "_closed",
    )

    def __init__(
        self,
        *,
        form: Form = Form.A,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        strategy: WeightStrategy | str = "tensordict",
    ) -> None:
        self._form = form
        self.timeout = timeout
        self._strategy = strategy
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._services = FacadeServices(self, self._strategy)
        self._senders: dict[str, WeightSender] = {}
        self._receivers: dict[str, WeightReceiver] = {}
        # Models whose update is outstanding, oldest first; and those of them whose failure was told.
        self._outstanding: list[str] = []
        self._told: set[str] = set()
        self._last: str | None = None
        self._closed = False
        forget_after_fork(self)

    # ------------------------------------------------------------------------------- what a transport gives

    def _endpoints(self) -> Mapping[int, Any]:
        """Whom `send_weights` reaches: worker id to what `_lay_link` takes. Here: one, itself.

        Raises:
            ConfigurationError: the transport was not told whom it reaches. Nothing was sent.
        """
        return {0: None}

    def _lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """The sender's end of a link.

        Raises:
            ConfigurationError: the transport was not told whom it reaches, or does not send. Nothing was sent.
        """
        raise ConfigurationError(f"{type(self).__name__} does not send: use it at the worker's end.")

    def _listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Have ``accept`` called with each link by which a sender reaches us; what is returned ends that.

        Raises:
            ConfigurationError: the transport was not told where, or does not receive.
        """
        raise ConfigurationError(f"{type(self).__name__} does not receive: use it at the trainer's end.")

    def _waiting(self) -> Sequence[str]:
        """The models for which something may have arrived here."""
        return (POLICY,)

    def _user_messages(self) -> UserMessages:
        raise ConfigurationError(f"{type(self).__name__} has no pipe that could carry messages of your own.")

    def _published(self, model_id: str, weights: Any) -> None:
        """Called with each version's weights before it is dispatched."""

    @abc.abstractmethod
    def check_connection(self) -> bool:
        """Whether the transport can be used now."""

    # ------------------------------------------------------------------------------ for schemes that made it

    def link(self, model_id: str, peer: str) -> Link:
        """A link to the worker that this transport reaches.

        Raises:
            ConfigurationError: the transport was not told whom it reaches, or reaches several.
        """
        endpoints = list(self._endpoints().values())
        if len(endpoints) != 1:
            raise ConfigurationError(
                f"{type(self).__name__} reaches {len(endpoints)} workers: a scheme's create_transport() makes one "
                "transport for each."
            )
        return self._lay_link(endpoints[0], model_id, peer)

    def listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Have ``accept`` called with each link by which a sender reaches us; what is returned ends that.

        Raises:
            ConfigurationError: the transport was not told where, or does not receive.
        """
        return self._listen(model_id, accept)

    def user_messages(self) -> UserMessages:
        """The user's own messages on the transport's pipe.

        Raises:
            ConfigurationError: it has none.
        """
        return self._user_messages()

    @property
    def connection(self) -> Any:
        """The connection below.

        Raises:
            ConfigurationError: there is none.
        """
        raise ConfigurationError(f"{type(self).__name__} has no pipe.")

    def over(self, receiver: WeightReceiver) -> Any:
        """None: a scheme's receiver is used directly."""
        return None

    # -------------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Close for good: links close, what is outstanding is ABANDONED. Closing twice is allowed."""
        with self._lock:
            self._closed = True
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the senders and receivers behind; the next use makes new ones."""
        with self._lock:
            sides = [*self._senders.values(), *self._receivers.values()]
            self._senders, self._receivers = {}, {}
            self._outstanding, self._told, self._last = [], set(), None
        for side in sides:
            side.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not is_clean(error):
            for receiver in list(self._receivers.values()):
                receiver.fail(error)
        self.close()

    def _require_open(self, asked: str) -> None:
        if self._closed:
            raise StateError(type(self).__name__, "closed", asked, ["close"])

    # -------------------------------------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def forget(self) -> None:
        """Become a copy: called in a forked child."""
        self._begin()
