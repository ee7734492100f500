"""The background reader: one thread reads and stages versions, which go live between two forwards."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from weightsync.clock import Deadline
from weightsync.engine.driver import Shield
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.serving_lock import PATIENCE, Hook, calling_frame, compiled_frame
from weightsync.errors import ConfigurationError, ProtocolError, TransportError, WeightSyncError, thread_not_started
from weightsync.protocol import receiver as pure
from weightsync.protocol._tables import State
from weightsync.protocol.report import SyncReport
from weightsync.transports.process import forget_after_fork
from weightsync.weights.device.registry import apart_from_captures

logger = logging.getLogger("weightsync")

#: Seconds that `Background.stop` waits for the thread.
JOIN_SECONDS: Final = 10.0

#: Seconds until a swap is tried again that found other tensors in place of the model's parameters.
LOOK_AGAIN: Final = 0.01

#: Passes the version served on to other workers, and returns the report, or None.
RelayCall = Callable[[], SyncReport | None]


class _BeforeForward(Hook):
    """Runs before a forward."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            _begin_uncompiled(self._receiver)
        else:
            self._receiver.begin_serving(calling_frame())


class _AfterForward(Hook):
    """Runs after a forward, also after one that raised."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            _end_uncompiled(self._receiver)
        else:
            self._receiver.end_forward()


def _begin_forward(receiver: WeightReceiver) -> None:
    receiver.begin_serving(compiled_frame())


def _end_forward(receiver: WeightReceiver) -> None:
    receiver.end_forward()


def _exclude_from_compiler(function: Callable[[WeightReceiver], None]) -> Callable[[WeightReceiver], None]:
    """The function, excluded from torch's compiler with all that it calls: otherwise whole swaps would be compiled."""
    reason = "a model that receives in the background is guarded, so it cannot be compiled with fullgraph=True"
    found: Callable[[WeightReceiver], None] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return found


_begin_uncompiled, _end_uncompiled = _exclude_from_compiler(_begin_forward), _exclude_from_compiler(_end_forward)


class ForwardGuard:
    """Makes each forward of a module a block of `WeightReceiver.serving`, of one module at a time.

    In a forked child nothing is guarded.

    Args:
        receiver: serves the module.
    """

    def __init__(self, receiver: WeightReceiver) -> None:
        self.receiver = receiver
        self._lock = threading.Lock()
        self._model: Any = None
        self._hooks: list[RemovableHandle] = []
        forget_after_fork(self)

    def set(self, model: Any) -> None:
        """Guard this model from now on, if it is a module, and no longer the previous one.

        Raises ConfigurationError: the module takes no hooks (a ScriptModule); the previous one stays guarded.
        """
        with Shield(lambda: None), self._lock:  # a signal handler may close the receiver
            if model is self._model:
                return
            hooks = self._register_hooks(model) if isinstance(model, nn.Module) else []
            self._remove()
            self._hooks, self._model = hooks, model

    def _register_hooks(self, model: nn.Module) -> list[RemovableHandle]:
        try:
            before = model.register_forward_pre_hook(_BeforeForward(self.receiver), prepend=True)
            after = model.register_forward_hook(_AfterForward(self.receiver), always_call=True)
        except RuntimeError as error:
            raise ConfigurationError(
                f"a {type(model).__name__} takes no hooks ({error}), and connect() needs them to keep a version from "
                f"going live within a forward of {self.receiver.model_id!r}: put it into a plain module in trainer and "
                "workers, or call get_receiver().receive() between forwards instead of connect()."
            ) from error
        return [before, after]

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._model = [], None

    def clear(self) -> None:
        """Stop guarding the model."""
        with Shield(lambda: None), self._lock:
            self._remove()

    def forget(self) -> None:
        """In a forked child: guard no model."""
        self._lock = threading.Lock()
        self._remove()


class Background:
    """Receives for one receiver on a thread of its own, and guards the forwards of its model.

    The thread is the only reader of the receiver's links. A version that it has staged goes live at the start of the
    model's next outermost forward, in that forward's thread, or in the reader's thread if no forward is under way: no
    forward sees two versions, a busy worker cannot delay a swap forever, an idle one still answers. The thread ends
    when the receiver is closed or has no link left; a new link starts it again. A forked child has no such thread.

    Args:
        receiver: its links are read. Its model's forwards are guarded if that is a module; use
            ``with receiver.serving():`` around code that bypasses ``__call__``.
        relay: called before each version goes live. Returns a function that passes the version on to other workers
            before it is acked, or None if there are no such workers.
    """

    def __init__(self, receiver: WeightReceiver, relay: Callable[[], RelayCall | None]) -> None:
        self._receiver = receiver
        self._relay = relay
        # Entered itself: a Condition is entered in Python code, where a handler may raise just after it took the lock.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        #: The calls of `stop` that have begun and were not undone by an interrupt.
        self._stops: set[object] = set()
        #: Whether `stop` has ended: the receiver's own callers read the links again.
        self._stopped = False
        #: How many links were added.
        self._links_added = 0
        self._guard = ForwardGuard(receiver)
        self._error: BaseException | None = None
        #: The version that the receiver had applied or refused last when this was made.
        self._decided_before = receiver.driver.data.decided
        #: The version that was applied or refused last when `receive` returned last, and the one that was live then.
        self._reported: tuple[object, object] = None, None
        #: Passes on the version that goes live next, or that went live and is not acked yet.
        self._prepared_relay: RelayCall | None = None
        forget_after_fork(self)

    @property
    def decided(self) -> bool:
        """Whether a version was applied or refused since this was made."""
        return self._decided_since(self._decided_before)

    def _decided_since(self, before: object) -> bool:
        """Whether a version was applied or refused since; compared by identity, as one may be applied a second time."""
        decided = self._receiver.driver.data.decided
        return decided is not None and decided is not before

    def start(self) -> None:
        """Become the receiver's background reader, guard its model and start to read."""
        self._stops, self._stopped = set(), False
        self._receiver.set_background_reader(self)
        self.model_set(self._receiver.model)
        atexit.register(self.stop)

    def mark_seen(self) -> None:
        """Ignore what has happened so far: `receive` waits for the next version."""
        data = self._receiver.driver.data
        self._reported = data.decided, data.served

    def stop(self) -> None:
        """End the thread and the guard. The receiver stays as it is.

        A thread that runs code of the user's cannot be stopped: it is waited for `JOIN_SECONDS`, and ends when that
        code returns. If an interrupt, such as KeyboardInterrupt, ends the wait, nothing is stopped.
        """
        stop_request = object()
        try:
            with self._lock:
                self._stops.add(stop_request)
                thread = self._thread
            self._receiver.driver.waker.fire()
            if thread is not None and thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)
        except BaseException:
            with self._lock:
                self._stops.discard(stop_request)  # another thread may still wait for the end
            self._spawn()
            raise
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            logger.warning(
                "model %r: after %g s its background reader still runs your own code (a hook, or a relay); the thread "
                "ends when that code returns",
                self._receiver.model_id,
                JOIN_SECONDS,
            )
        self._release_receiver(thread)

    def discard(self) -> None:
        """As `stop`, but if an interrupt ends the wait, the thread ends by itself."""
        try:
            self._stops.add(self)
            self.stop()
        except BaseException:
            self._release_receiver(self._thread)
            raise

    def _release_receiver(self, thread: threading.Thread | None) -> None:
        """The receiver's own callers read its links from now on, and its model is not guarded."""
        self._receiver.set_background_reader(None)
        self._relay_unacked_version(thread)
        with self._lock:
            self._stopped = True
            self._condition.notify_all()
        self._guard.clear()
        atexit.unregister(self.stop)

    def _relay_unacked_version(self, thread: threading.Thread | None) -> None:
        """Pass on and ack a version that a forward made live once the thread had ended.

        Until its ack is sent, nothing more is read.
        """
        with self._receiver.driver.lock:  # such a forward has it until the version is live
            left = self._receiver.driver.deferring
        if left and (thread is None or not thread.is_alive()):
            self._relay_and_ack()

    def forget(self) -> None:
        """In a forked child: there is no thread."""
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._thread = None
        atexit.unregister(self.stop)

    @property
    def running(self) -> bool:
        """Whether the thread reads."""
        return self._thread is not None

    def _spawn(self) -> None:
        with Shield(lambda: None), self._lock:  # an interrupt would leave a thread that never starts
            if self._thread is not None or self._stops:
                return
            name = f"weightsync receiver of {self._receiver.model_id!r}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                raise thread_not_started(f"the {name}", error) from error

    def model_set(self, model: Any) -> None:
        """Guard this model from now on, and no longer the previous one."""
        self._guard.set(model)
        self._receiver.driver.waker.fire()
        self._spawn()

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except BaseException as raised:  # by a log handler of the user's
            if self._thread is threading.current_thread():
                self._fail(raised)
            raise

    def _run_once(self) -> bool:
        """Run one round of the thread's loop, and wait for the next; False: the thread has ended."""
        driver, links_before = self._receiver.driver, self._links_added
        try:
            fired = driver.waker.fired
            if not self._must_end():
                self._receive_once()
            if not self._must_end():
                # A forward that an interrupt has ended wakes no waiting thread.
                waits = PATIENCE if driver.data.pending is not None else None
                driver.wait(LOOK_AGAIN if self._receiver.awaits_parameters else waits, fired)
        except ProtocolError as error:  # that link is down; others may still work
            logger.error("model %r: %s", self._receiver.model_id, error)
            self._notify(error)
        except TransportError as error:
            try:
                logger.info("%s", error)
            finally:  # whatever a log handler raises
                reads_on = self._end_unless_link_added(error, links_before)
            return reads_on
        except BaseException as error:  # noqa: BLE001 - SystemExit of the user's code would end the thread silently
            if not self._must_end():
                try:
                    logger.error("model %r: its background reader stopped", self._receiver.model_id, exc_info=error)
                finally:
                    self._fail(error)
                return False
        with self._lock:  # an interrupted `stop` may have it go on
            return self._end(self._receiver.broken) if self._must_end() else True

    def _fail(self, raised: BaseException) -> None:
        """End the thread because of an error, and the links too, unless the error says what to do."""
        self._end(raised)
        if not isinstance(raised, WeightSyncError):  # reading continues after those
            self._receiver.fail_links(raised)

    def _receive_once(self) -> None:
        receiver = self._receiver
        with apart_from_captures():
            receiver.receive_and_apply_here()
            if receiver.driver.deferring:
                self._relay_and_ack()
        self._notify()

    def _must_end(self) -> bool:
        return bool(self._stops) or self._receiver.state is State.CLOSED

    def _end(self, error: BaseException | None) -> bool:
        with self._lock:
            self._thread = None
            self._error = error or self._error
            self._condition.notify_all()
        return False

    def _end_unless_link_added(self, error: TransportError, links_before: int) -> bool:
        """End the thread, as the last link has ended; True: another was added meanwhile, and the thread goes on.

        `link_added` starts no thread while there is one, so both decide under the same lock.

        Args:
            links_before: how many links had been added when this round began.
        """
        with self._lock:
            return self._links_added != links_before or self._end(error)

    def _notify(self, error: Exception | None = None) -> None:
        with self._lock:
            self._error = error or self._error
            self._condition.notify_all()

    def link_added(self) -> None:
        """Read the new link too. The loss of an earlier link is no longer reported."""
        with self._lock:
            self._links_added += 1
            self._error = None if isinstance(self._error, TransportError) else self._error
        self._spawn()

    def version_decided(self) -> None:
        """Wake callers that wait in `receive`, and the thread if there is something to pass on or to write."""
        with self._lock:
            self._condition.notify_all()
        self._receiver.driver.waker.fire()

    def prepare_relay(self) -> bool:
        """Note how the version that is about to go live is passed on before it is acked; False: it is not passed on."""
        self._prepared_relay = self._relay()
        return self._prepared_relay is not None

    def _relay_and_ack(self) -> None:
        relay, self._prepared_relay = self._prepared_relay, None
        nested = relay() if relay is not None else None
        driver = self._receiver.driver
        driver.take(pure.SendAck(nested))
        driver.waker.fire()

    def receive(self, timeout: float | None) -> bool:
        """Wait for a version to go live or be refused, if none has since the last call.

        A caller that waits when this reader is stopped goes on without it: it then reads the links itself.

        Returns:
            Whether one went live since the last call, also if a later one was refused.

        Raises:
            TransportError: the sender is gone.
            WeightSyncError: an error on the thread since the last call. It is raised once.
        """
        driver, (decided_before, served_before), deadline = self._receiver.driver, self._reported, Deadline(timeout)
        if not self.wait_until(lambda: self._stopped or self._decided_since(decided_before), deadline):
            return False
        if not self._decided_since(decided_before):
            return self._receiver.receive(deadline.remaining)
        data = driver.data
        self._reported = data.decided, data.served
        return data.served is not None and data.served is not served_before

    def wait_until(self, is_met: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``is_met()``, which is called whenever something has happened; False: time is up.

        Raises TransportError, WeightSyncError: as for `receive`.
        """
        while True:
            if not self.running and self._error is None and self._receiver.broken is None:
                self._receiver.check_links()
                self._spawn()
            with self._lock:
                self._condition.wait_for(lambda: is_met() or self._error is not None or not self.running, deadline.nap)
                error = self._error or self._receiver.broken
                if is_met() and (error is None or isinstance(error, TransportError)):
                    return True  # the next call reports a link that ended after that
                self._error = None
                if error is not None:
                    raise error
                if deadline.passed:
                    return False
