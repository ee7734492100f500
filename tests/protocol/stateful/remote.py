"""Worker processes that serve many examples. Each command gets one answer, so nothing depends on timing."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from policy import Policy

from weightsync.engine.receiver import WeightReceiver

#: Seconds after which a test gives up. Only a failure takes that long.
PATIENCE = 60.0


class SelfKillingPolicy(Policy):
    """A model that can kill its process in the middle of a swap."""

    def set_extra_state(self, state: int) -> None:
        if self.mood == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        super().set_extra_state(state)


class ActorServer:
    """The commands that a worker process executes."""

    def __init__(self, control: Connection[Any, Any]) -> None:
        self.control = control
        self.policy = SelfKillingPolicy()
        self.receiver: Any = None

    def begin(self, scheme: Any) -> None:
        """Begin a new life of the worker: a receiver without links."""
        if self.receiver is not None:
            self.receiver.close()
        self.policy = SelfKillingPolicy()
        self.receiver = WeightReceiver(scheme)
        self.receiver.register_model(self.policy)

    def listen(self) -> None:
        self.receiver.register_worker_transport(Connection(recv_handle(self.control)))

    def receive(self, timeout: float) -> bool:
        return bool(self.receiver.receive(timeout=timeout))

    def mood(self, mood: str) -> None:
        self.policy.mood = mood

    def close(self) -> None:
        self.receiver.close()

    def show(self) -> tuple[dict[str, Any], set[int], bytes]:
        """The visible state of the receiver, the numbers that its model holds, and its digest."""
        data = self.receiver._driver.data
        seen = {
            "state": self.receiver.state.value,
            "served": None if self.receiver.version is None else (self.receiver.incarnation, self.receiver.version),
            "fence": data.fence,
            "decided": data.decided,
            "pending": data.pending,
            "links": len(self.receiver._driver.links()),
        }
        return seen, self.policy.codes, self.receiver.digest()


def work(control: Connection[Any, Any]) -> None:
    """The main function of a worker process."""
    torch.set_num_threads(1)
    actor_server = ActorServer(control)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, arguments = control.recv()
            try:
                control.send((True, getattr(actor_server, name)(*arguments)))
            except Exception as error:  # noqa: BLE001 - the test gets it
                control.send((False, error))


class Remote:
    """A worker process, as the test controls it."""

    def __init__(self, context: Any) -> None:
        self.control, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a command to the worker."""
        self.control.send((name, arguments))

    def answer(self) -> Any:
        """Return the result of the last command, or raise its error."""
        assert self.control.poll(PATIENCE), f"{self.process} does not answer"
        fine, value = self.control.recv()
        if not fine:
            raise value
        return value

    def do(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        return self.answer()

    def listen(self, connection: Connection[Any, Any]) -> None:
        """Give the worker its end of a pipe."""
        self.tell("listen")
        send_handle(self.control, connection.fileno(), self.process.pid)
        self.answer()

    def died(self) -> None:
        """Wait until the process has died."""
        self.process.join(PATIENCE)
        assert not self.process.is_alive()
        self.control.close()

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.died()
