"""`MultiProcessWeightSyncScheme`, and what all schemes over multiprocessing pipes share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from weightsync.engine.arguments import require_context, require_worker_id
from weightsync.engine.copies import close_at_exit, pipes_travel
from weightsync.engine.device_slots import open_slot
from weightsync.engine.sender import WeightSender
from weightsync.errors import ConfigurationError
from weightsync.options import Verify, WireDtype, items_of, switch
from weightsync.protocol.sender import LinkState
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.collector_kinds import WorkerKind
from weightsync.schemes.facade_services import LinkTransport, connection_of, nothing_to_stop, torchrl_transport
from weightsync.schemes.peers.base import BareTransport
from weightsync.schemes.sources import given_or_found
from weightsync.transports.base import Link, Payloads
from weightsync.transports.pipe.connection import Channel
from weightsync.transports.pipe.link import PipeLink
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.weights.strategy import WeightStrategy


class PipeScheme(WeightSyncScheme):
    """A scheme whose control path is one duplex `multiprocessing.Pipe` per worker.

    Without ``pipes`` it makes them itself. The workers' ends are then pickled with the scheme when a process is spawned
    with it, and inherited by a forked one; each worker takes its own by its ``worker_idx`` and closes the others.

    `init_on_sender` takes ``processes``: the workers' processes, started or not yet, in the order of ``pipes`` or by
    worker id. A worker that dies before it has connected is then LOST at once; without ``processes`` it is TIMED_OUT if
    another process, such as the trainer, still holds the worker's end of its pipe.

    Args:
        strategy: "state_dict" or "tensordict", or a `WeightStrategy`.
        sync: whether the scheme's own `send` waits for its answers. If not, the next `send`, or `shutdown`, reports
            them.
        per_worker_weights: whether ``send({worker_idx: weights})`` may leave workers out; they keep what they serve.
        verify: "auto", "digest" or "layout": see `WeightSyncScheme`.
        wire_dtype: "bfloat16", "float16" or "float32": see `WeightSyncScheme`.
        delta: whether a version may be sent as a delta: see `WeightSyncScheme`.
    """

    _sender_arguments = ("pipes", "processes")
    _reached = WorkerKind.PROCESSES
    _worker_arguments = ("pipe",)
    _not_copied = (*WeightSyncScheme._not_copied, "_own")
    #: In a worker: its own end.
    _own: Connection[Any, Any] | None

    def __init__(
        self,
        strategy: WeightStrategy | str = "state_dict",
        sync: bool = True,
        *,
        per_worker_weights: bool = False,
        verify: Verify | str = Verify.AUTO,
        wire_dtype: torch.dtype | WireDtype | str | None = None,
        delta: bool = False,
    ) -> None:
        #: The workers' ends of the pipes that we made, until the workers take them.
        self._ends: dict[int, Connection[Any, Any]] = {}
        super().__init__(strategy, verify=verify, wire_dtype=wire_dtype, delta=delta)
        self.sync = switch(sync, "sync")
        self.per_worker_weights = switch(per_worker_weights, "per_worker_weights")

    def init_on_sender(self, model_id: str | None = "policy", context: Any = None, **kwargs: Any) -> None:
        """Make the sender and add the workers to it: see `WeightSyncScheme.init_on_sender`."""
        previous_ends = dict(self._ends)
        try:
            super().init_on_sender(model_id, context, **kwargs)
        except BaseException:  # the workers of another init must not take the pipes of this one
            new_ends, self._ends = self._ends, previous_ends
            for worker, end in new_ends.items():
                if previous_ends.get(worker) is not end:
                    end.close()
            raise

    def create_sender(self) -> WeightSender:
        """A sender without workers: see `WeightSyncScheme.create_sender`. It is closed when the program ends."""
        sender = super().create_sender()
        close_at_exit(sender)
        return sender

    def _endpoints(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """Our end of one pipe per worker, from ``pipes=`` or ``context.pipes``, or of pipes made here."""
        if self._creates_links_at_connect(keywords, context):
            return self._make_pipes(keywords)
        pipes = _require_pipe_list(given_or_found(keywords, context, "pipes"))
        count = given_or_found(keywords, context, "num_workers")
        if count not in (None, len(pipes)):
            raise ConfigurationError(
                f"num_workers is {count}, but there are {len(pipes)} pipes: give one pipe per worker."
            )
        _refuse_unusable(pipes)
        return dict(zip(sorted(keywords.get("params_map", range(len(pipes)))), pipes, strict=True))

    def _creates_links_at_connect(self, keywords: Mapping[str, Any], context: Any) -> bool:
        """True if we make the pipes. ``ctx=`` asks for that, since a TorchRL collector's ``.pipes`` are for its own
        use."""
        return "pipes" not in keywords and ("ctx" in keywords or given_or_found(keywords, context, "pipes") is None)

    def _make_pipes(self, keywords: Mapping[str, Any]) -> dict[int, Any]:
        if "num_workers" not in keywords:
            raise ConfigurationError(
                "init_on_sender() needs pipes= (the trainer's end of one multiprocessing.Pipe() per worker), or the "
                "number of workers, to make the pipes itself: num_workers=, params_map=, devices=, or a context with "
                ".pipes or .num_workers."
            )
        ctx = keywords.get("ctx", multiprocessing)
        require_context(ctx)
        sender_ends = {}
        for worker in sorted(keywords.get("params_map", range(keywords["num_workers"]))):
            sender_ends[worker], self._ends[worker] = ctx.Pipe()
        return sender_ends

    def _endpoint(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """This worker's end: ``pipe=``, or that of ``worker_idx`` in this copy, or ``context.pipe``."""
        if "pipe" not in keywords and self._ends:
            return self._own_end(given_or_found(keywords, context, "worker_idx"))
        pipe = given_or_found(keywords, context, "pipe")
        if pipe is None:
            raise ConfigurationError(
                "init_on_worker() and init_on_receiver() need pipe=, or a context with .pipe: this worker's end of a "
                "multiprocessing.Pipe(). A scheme that makes its pipes itself has it only in a process that is started "
                "with the scheme after init_on_sender()."
            )
        return pipe

    def _own_end(self, worker_idx: Any) -> Any:
        if worker_idx is None and self.worker_idx is None and len(self._ends) > 1:
            raise ConfigurationError(
                f"init_on_receiver() needs worker_idx=, or a context with .worker_idx: which of {sorted(self._ends)}."
            )
        given = self.worker_idx if worker_idx is None else worker_idx
        worker = next(iter(self._ends)) if given is None else require_worker_id(given, "worker_idx")
        if worker not in self._ends:
            raise ConfigurationError(
                f"worker {worker} has no pipe here: this scheme carries those of {sorted(self._ends)}. For a worker "
                "that was restarted give a new pipe to get_sender().add_worker() and its other end to "
                "init_on_receiver(pipe=...)."
            )
        own = self._own = self._ends[worker]
        return own

    def _reset(self) -> None:
        super()._reset()
        self._own = None

    def _become_worker(self, keywords: Mapping[str, Any], context: Any) -> None:
        """Close other workers' ends, unless this is the trainer's process too."""
        super()._become_worker(keywords, context)
        if not self.initialized_on_sender:
            for end in self._ends.values():
                if end is not self._own:
                    end.close()
            self._ends = {}

    def _workers_answered(self) -> None:
        """Close our copies of the ends that workers have taken."""
        if not self.initialized_on_receiver:
            up = {worker for worker, entry in self.get_sender().workers.items() if entry.link_state is LinkState.UP}
            ends = self._ends  # another thread may close the scheme, or be doing the same
            for worker in up & ends.keys():
                if (end := ends.pop(worker, None)) is not None:
                    end.close()

    def close(self) -> None:
        """Close whichever sides were initialised, and the ends of pipes that we hold for workers."""
        try:
            super().close()
        finally:
            for end in (*self._ends.values(), *([] if self._own is None else [self._own])):
                end.close()
            self._ends = {}

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_ends"] = dict(self._ends) if pipes_travel() else {}
        return state

    def create_transport(self, pipe_or_context: Any = None, *, pipe: Any = None, **queues: Any) -> Any:
        """TorchRL's transport class over a pipe's end, or a context that has one; incomplete, its first send raises.

        Args:
            pipe_or_context: our end of a pipe, or an object whose ``.pipe`` is that.
            pipe: the same, by TorchRL's older name.
            **queues: generation B's ``weight_queue``, ``ack_queue`` and ``timeout``.
        """
        given = pipe if pipe_or_context is None else pipe_or_context
        transport = torchrl_transport("MPTransport")
        return transport(given, **queues) if given is not None else transport(**queues)

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link over a pipe's end, or an object whose ``.pipe`` is that: see `WeightSyncScheme.create_link`."""
        if self._uses_transport(endpoint):
            return super().create_link(endpoint, model_id, peer)
        payloads = Payloads.INLINE if self._delta else Payloads.SHARED
        return PipeLink(connection_of(endpoint), model_id, peer=peer, payloads=payloads, opener=open_slot)

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Give ``accept`` the one link of this worker's pipe: see `WeightSyncScheme.listen`."""
        if self._uses_transport(endpoint):
            return super().listen(endpoint, model_id, accept)
        accept(self.create_link(endpoint, model_id, "the sender"))
        return nothing_to_stop

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages on the pipe."""
        if self._uses_transport(endpoint):
            return super().user_messages(endpoint)
        return UserMessages(Channel.of(connection_of(endpoint)))

    def _uses_transport(self, endpoint: Any) -> bool:
        """Whether a transport creates the links: ``endpoint`` is one, or a user's subclass makes its own."""
        overridden = not type(self).create_transport.__module__.startswith("weightsync.schemes.")
        return overridden or isinstance(endpoint, BareTransport | LinkTransport)


class MultiProcessWeightSyncScheme(PipeScheme):
    """Over multiprocessing pipes, and shared memory for large payloads. Workers copy weights into their own parameters.

    Args:
        strategy: "state_dict" (default) or "tensordict", or a `WeightStrategy`.
        sync: whether the scheme's own `send` waits for its answers (default). If not, it returns a report with PENDING
            outcomes, and the next `send`, or `shutdown`, reports the results.
        per_worker_weights: whether ``send({worker_idx: weights})`` may leave workers out; they keep what they serve.
            Always so for a TorchRL collector with several policy factories.
        verify: "auto", "digest" or "layout": see `WeightSyncScheme`.
        wire_dtype: "bfloat16", "float16" or "float32": see `WeightSyncScheme`.
        delta: whether a version may be sent as a delta: see `WeightSyncScheme`. Payloads then go through the pipe and
            not through shared memory. Use it only for pipes to other hosts: within a host, shared memory is faster.

    Raises:
        ConfigurationError: an argument has an unknown value or another type, or ``delta=True`` with
            ``verify="layout"``.
    """

    _carries_deltas = True


def _require_pipe_list(pipes: Any) -> list[Any]:
    """The pipes, one for each worker. Raises ConfigurationError: this is not a list of them."""
    items = None if isinstance(pipes, Mapping) else items_of(pipes)
    if items is None:
        raise ConfigurationError(
            f"pipes= is {pipes!r}: give a list with the trainer's end of one multiprocessing.Pipe() per worker. "
            "Nothing has changed."
        )
    return items


def _refuse_unusable(pipes: Sequence[Any]) -> None:
    """Refuse unusable pipes before a link is created over any of them, so that the good ones can be given again."""
    connections = []
    for index, pipe in enumerate(pipes):
        try:
            connections.append(connection_of(pipe))
            Channel.of(connections[-1])
        except ConfigurationError as error:
            raise ConfigurationError(
                f"pipes= has an entry that cannot be used, at index {index}. {error} Nothing has changed."
            ) from None
    if len({id(connection) for connection in connections}) < len(connections):
        raise ConfigurationError("A pipe occurs twice in pipes=: give one pipe per worker.")
