"""Workers as Ray actors: how each is started, reached, watched and ended."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final

from weightsync.clock import Deadline
from weightsync.errors import GIVE_RESTARTS, ConfigurationError, TransportError
from weightsync.group.channel import TrainerEnd
from weightsync.group.function import name_of
from weightsync.group.launcher import GroupArguments, Launched
from weightsync.group.members import MemberState, Running
from weightsync.group.reception import ChannelListener
from weightsync.group.stack_dump import StackDump
from weightsync.group.worker import Job, live
from weightsync.schemes.ray import RayWeightSyncScheme
from weightsync.schemes.ray_server import actor_server_of
from weightsync.transports.base import Waker
from weightsync.transports.calls.server import Frames
from weightsync.transports.ray.session import ACTOR_WATCH, is_ray_client, plain, require_ray, settle

#: Threads of an actor: one for the function, the others for the calls that bring weights.
_THREADS: Final = 9
#: Seconds in which what an actor said last arrives, once Ray has reported its end.
_LAST_WORDS_SECONDS: Final = 5.0
#: What the group decides itself.
_RESERVED_OPTIONS: Final = frozenset(
    {
        *("max_concurrency", "concurrency_groups", "max_restarts", "max_task_retries", "max_pending_calls"),
        *("name", "namespace", "get_if_exists", "lifetime"),
    }
)


class GroupActor:
    """What runs in the actor. The function has one of its threads; calls that bring weights have the others."""

    def __init__(self) -> None:
        self._listening = threading.Event()

    def live(self, job: Job) -> None:
        """Live one life of a worker."""
        try:
            live(job, self._listening.set)
        finally:
            self._listening.set()

    def _weightsync_call(self, model_id: str, *arguments: Any) -> Frames:
        """What senders call: see `weightsync.transports.ray.client.ActorCallClient`."""
        self._listening.wait()
        return actor_server_of(model_id).receive_and_apply(*arguments)


class ActorProcess:
    """An actor that lives one life of a worker.

    Args:
        handle: the actor.
        job: what it does.
        channel: the trainer's end.

    Raises:
        ConfigurationError: the job cannot be pickled.
    """

    fate = "killed"

    def __init__(self, handle: Any, job: Job, channel: TrainerEnd) -> None:
        life_call = _start_life(handle, job)
        self.handle = handle
        self._channel = channel
        #: By when its channel has ended too, which may be slower than Ray; None: Ray has reported nothing.
        self._ends: Deadline | None = None
        self._waker = Waker()
        #: Ends with its life; with an error if the actor has died.
        self._life: Future[None] = Future()
        peer = f"worker {job.index}"
        ACTOR_WATCH.watch(self._life, peer)
        self._life.add_done_callback(lambda _: self._waker.fire())
        life_call.future().add_done_callback(self._ended)

    def _ended(self, finished: Future[Any]) -> None:
        """Runs in a thread of Ray's."""
        error = finished.exception()
        settle(self._life, error=error if isinstance(error, Exception) else None)

    def fileno(self) -> int:
        """Readable once it is dead, or something of its last words has arrived."""
        return self._channel.fileno() if self._ends is not None else self._waker.fileno()

    @property
    def dead(self) -> bool:
        """Whether its life is over, or Ray was shut down here, and all that it has said is there."""
        if self._ends is None and self._life.done():
            self._ends = Deadline(_LAST_WORDS_SECONDS)
        if self._ends is None:
            return False
        return self._channel.ended or not self._channel.attached or self._ends.passed

    def how_it_ended(self, state: MemberState) -> str:  # noqa: ARG002 - Ray says why in either case
        """How it ended, in Ray's words, once it is dead."""
        error = self._life.exception()
        return "its actor has ended" if error is None else plain(str(error))

    def stack_dump(self) -> StackDump:
        """Unknown: an actor may be on any host."""
        return StackDump()

    def join(self, deadline: Deadline) -> None:
        """Wait until its life is over."""
        while not self.dead and not deadline.passed:
            wait([self._life], deadline.nap)

    def kill(self) -> None:
        """Have Ray kill the actor, and the processes that it has started."""
        ray = require_ray("WorkerGroup")
        if ray.is_initialized():  # otherwise Ray has ended all its actors, and would start again just to end this one
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(self.handle, no_restart=True)

    def close(self) -> None:
        """Kill it, and let go of it."""
        self.kill()
        ACTOR_WATCH.leave(self._life)
        self._waker.close()


def _start_life(handle: Any, job: Job) -> Any:
    """Ray's reference to the life that an actor begins now.

    Raises:
        ConfigurationError: the job cannot be pickled. The actor is killed.
    """
    try:
        return handle.live.remote(job)
    except Exception as error:
        ray = require_ray("WorkerGroup")
        ray.kill(handle, no_restart=True)
        unpicklable = _describe_unpicklable(ray, {"run": job.plan.run, "make_model": job.plan.make_model})
        if unpicklable:
            raise ConfigurationError(
                f"what worker {job.index} is to run cannot be pickled for Ray: {unpicklable}. Create it inside run= or "
                "make_model=, in the worker, not in the trainer. Nothing was started."
            ) from error
        raise


def _describe_unpicklable(ray: Any, arguments: Mapping[str, Any]) -> str:
    """Which of some arguments cannot be pickled, and at what; empty: none was found."""
    unpicklable = []
    for name, value in arguments.items():
        try:
            ray.cloudpickle.dumps(value)
        except Exception as error:  # noqa: BLE001 - whatever it is, this cannot be pickled
            _, failures = ray.util.inspect_serializability(value, name=name, print_file=io.StringIO())
            paths = sorted({" -> ".join(map(str, getattr(each, "path", (name, each)))) for each in failures})
            unpicklable.append(
                f"{name}= is {name_of(value)}, and fails at {', '.join(paths or [name])} ({plain(str(error))})"
            )
    return "; ".join(unpicklable)


class ActorLauncher:
    """Starts Ray actors, which get weights by calls and connect to the trainer's host for results.

    Args:
        scheme: Ray's.
        arguments: what the user has asked for.

    Raises:
        ConfigurationError: an argument is out of range, or not for actors; or an option is the group's own affair.
        MissingExtraError: Ray is not installed.
    """

    remedy = GIVE_RESTARTS

    def __init__(self, scheme: RayWeightSyncScheme, arguments: GroupArguments) -> None:
        arguments.refuse_others("ctx")
        options = arguments.actor_options or {}
        if not isinstance(options, Mapping):
            raise ConfigurationError(
                f"actor_options= is {options!r}: give a dict with the keywords of Ray's options(). Nothing was started."
            )
        reserved = sorted(_RESERVED_OPTIONS & options.keys())
        if reserved:
            raise ConfigurationError(
                f"actor_options= has {', '.join(reserved)}: the group sets that itself (its max_restarts= restarts a "
                "worker). Nothing was started."
            )
        self.scheme = scheme
        self.size = arguments.least_one_worker()
        # By value where the class is in the program itself, which actors do not import.
        self._plan = arguments.plan(require_ray("WorkerGroup").cloudpickle.dumps)
        self._options = {"num_cpus": 0, **options}
        self._reception: ChannelListener | None = None

    def open(self) -> None:
        """Listen for the workers' channels: see `Launcher.open`."""
        self._ray = require_ray("WorkerGroup")
        if not self._ray.is_initialized():
            raise ConfigurationError("Ray is not running in this process: call ray.init() before the group is started.")
        if is_ray_client():
            raise ConfigurationError(
                "A Ray Client (ray://) can start no WorkerGroup, since the workers connect to the trainer's node: run "
                "the trainer as a process of the cluster. Nothing was started."
            )
        try:
            self._class = self._ray.remote(GroupActor).options(
                max_concurrency=_THREADS, max_restarts=0, **self._options
            )
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"Ray takes no such actor_options=: {error} Nothing was started.") from error
        self._reception = ChannelListener(self._ray.util.get_node_ip_address())

    def init_arguments(self, lives: Sequence[Launched]) -> Mapping[str, Any]:
        """See `Launcher.init_arguments`."""
        return {"actor_refs": [life.endpoint for life in lives]}

    def launch(self, index: int, restarts: int) -> Launched:
        """Start an actor: see `Launcher.launch`."""
        if self._reception is None:
            raise TransportError("the group is closed.")
        if not self._ray.is_initialized():  # otherwise Ray would start a cluster for it
            raise TransportError(f"Ray was shut down: worker {index} cannot be started.")
        invitation, channel = self._reception.expect()
        handle = self._class.remote()
        job = Job(self._plan, index, restarts, self.scheme, {}, invitation, None)
        try:
            process = ActorProcess(handle, job, channel)
        except BaseException:
            channel.close()
            raise
        return Launched(Running(process, channel, channel.announce), handle, None)

    def close(self, unreached: Sequence[Launched]) -> None:  # noqa: ARG002 - actors leave nothing to close
        """Stop listening."""
        if self._reception is not None:
            self._reception.close()
            self._reception = None
