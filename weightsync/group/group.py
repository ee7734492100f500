"""`WorkerGroup`: workers that act with the model, started, fed with weights, restarted and ended by the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from torch import nn

from weightsync.clock import Deadline, Timeout, seconds
from weightsync.engine.driver import Shield
from weightsync.engine.sender import WeightSender
from weightsync.errors import ConfigurationError, ResultTimeoutError, StateError, SyncError, WorkerFailedError
from weightsync.group.advice import ADVICE, NO_COPY, refusal, reword_report, senders_refusal, too_late
from weightsync.group.calls import Calls, ClosedMeanwhile, in_one_thread
from weightsync.group.channel import WorkerResult
from weightsync.group.launcher import AtExit, GroupArguments, Launched, names_of, rules_of, staleness_of
from weightsync.group.launchers import launcher_for
from weightsync.group.members import Member, Members, MemberState, Running
from weightsync.group.sending import Sending, failed_for_running_workers
from weightsync.group.worker import MakeModel, Worker
from weightsync.options import OnFailure, OnPending, OnStale, switch
from weightsync.protocol._tables import State
from weightsync.protocol.report import OutcomeKind, SyncReport
from weightsync.schemes.base import WeightSyncScheme
from weightsync.transports.process import forget_after_fork

#: Seconds that a process whose link is lost has to die before it is killed.
_LOST_SECONDS: Final = 5.0


class WorkerGroup:
    """Workers that act with copies of a model while the trainer trains it: processes, Ray actors, or other ranks.

    In rank 0 of a running `torch.distributed` world, with ``scheme="distributed"``, the other ranks are workers. Each
    calls `run_worker`. The group does not start, restart or kill them: ``run`` is None, and ``make_model``,
    ``max_restarts``, ``ctx`` and ``actor_options`` are left out.

    A worker receives weights in the background, so that `send()` cannot deadlock with a full result channel. Use the
    group in a ``with`` block, and in one thread; `close` may be called in any.

    Args:
        run: ``run(worker)`` is called in each worker, with a `Worker`. The function and what it refers to must be
            picklable (for Ray by cloudpickle), unless ``ctx`` forks. When it returns, the worker is finished.
        model: the trainer's model, whose weights `send` sends unless it is given others.
        num_workers: how many workers, at least 1; omit it for ranks.
        make_model: makes a worker's model, in the worker. Default: a copy of ``model``, on the CPU.
        names: names of the weights that are sent, or patterns (``"*.lora_?.*"``). All others stay in the workers as
            they were when the group was made, or as ``make_model`` or the rank has made them. None: all are sent.
        check_finite: refuse weights with NaN or infinite values: `start` and `send` raise `NonFiniteError`.
        scheme: a new `SharedMemWeightSyncScheme` (default), `MultiProcessWeightSyncScheme`, `RayWeightSyncScheme` or
            `DistributedWeightSyncScheme`, or its backend's name: "shared", "process", "ray", "distributed". The group
            closes it. Ray must run in this process.
        model_id: the name of the model.
        capacity: how many results of a worker may be in flight. Beyond that `Worker.put` waits.
        max_restarts: how often each worker is restarted after it raised or died. It serves the newest version before
            ``run`` is called again.
        restart_delay: seconds before a worker's first restart; doubled each time, up to 60.
        deadline: seconds within which a worker must put its next result. A worker that takes longer is killed, and
            counts as failed (a rank is given up). Its waits for the trainer and its start do not count. None: no limit.
        max_staleness: how many versions a worker may be behind the newest one dispatched when it begins a step. None:
            no limit. 0: each step begins with the newest.
        on_stale: "block" (default): the worker waits for a newer version; "raise": it gets a `StaleWeightsError`.
        ctx: a multiprocessing context, for processes; default: that of "spawn".
        actor_options: options of the actors, for Ray: ``num_cpus`` (default 0), ``num_gpus``, ``resources``,
            ``scheduling_strategy``, ``runtime_env`` and the others, except those for restarts, concurrency and names.

    Raises:
        ConfigurationError: an argument is out of range or not supported by this scheme, or the model cannot be copied.
            Nothing was started.
    """

    def __init__(
        self,
        run: Callable[[Worker], object] | None,
        model: nn.Module,
        num_workers: int | None = None,
        *,
        make_model: MakeModel | None = None,
        scheme: WeightSyncScheme | str | None = None,
        model_id: str = "policy",
        capacity: int = 2,
        max_restarts: int = 0,
        restart_delay: float = 1.0,
        deadline: float | None = None,
        max_staleness: int | None = None,
        on_stale: OnStale | str = OnStale.BLOCK,
        ctx: BaseContext | None = None,
        actor_options: Mapping[str, Any] | None = None,
        names: str | Iterable[str] | None = None,
        check_finite: bool = False,
    ) -> None:
        self._model, self._model_id = model, model_id
        rules = rules_of(capacity, max_restarts, restart_delay, deadline)
        staleness = staleness_of(max_staleness, on_stale)
        chosen = names_of(names)
        self._options: dict[str, Any] = {"check_finite": switch(check_finite, "check_finite")}
        self._options |= {} if chosen is None else {"names": chosen}
        arguments = GroupArguments(
            run, model, num_workers, make_model, model_id, capacity, max_restarts, staleness, ctx, actor_options, chosen
        )
        self._launcher = launcher_for(scheme, arguments)
        self._scheme = self._launcher.scheme
        rules = replace(rules, remedy=self._launcher.remedy)
        members = {index: Member(index, rules, self._begin_life) for index in range(self._launcher.size)}
        self._members = Members(members, lambda: self.sender if self._scheme.initialized_on_sender else None)
        self._sending = Sending(self._scheme, self._members.announce)
        self._state = State.UNINITIALIZED
        self._calls = Calls()
        self._at_exit = AtExit(self.close)
        #: The lives that the update in transit was sent to.
        self._sent_to: dict[int, Running | None] = {}
        #: The first lives, until the sender knows how to reach them.
        self._first: dict[int, Launched] = {}

    # ------------------------------------------------------------------------------------- starting and ending

    @in_one_thread("start")
    def start(self) -> None:
        """Start the workers, and send them the model's weights. Never waits; a ``with`` block begins with this.

        A worker whose model does not fit the trainer's counts as failed, like one that raises: `results` or a send
        raises `WorkerFailedError`.

        Raises:
            StateError: it was started already, or is closed. After any other error the group is closed.
            ConfigurationError: ``run`` or ``make_model`` cannot be pickled.
            LayoutError, NonFiniteError: the model's weights cannot be sent (``check_finite``), or none match ``names``.
            TransportError: a worker could not be started, for instance because too few file descriptors are left.
            Exception: the model's own code raised.
        """
        self._require(State.UNINITIALIZED, "start")
        self._state = State.READY
        self._at_exit.register()
        forget_after_fork(self)
        try:
            self._launcher.open()
            for member in self._members.by_index.values():
                self._require(State.READY, "start")  # a signal handler, or another thread, may have closed it
                member.start()
            given = self._launcher.init_arguments([launched for _, launched in sorted(self._first.items())])
            self._scheme.init_on_sender(self._model_id, model=self._model, **self._options, **given)
            self.sender.expect_goodbyes()  # `results` says how each worker ended
            self._first.clear()
            self._dispatch("start", None, OnPending.RAISE, Timeout.DEFAULT)
        except BaseException:
            self.close(timeout=0)
            raise

    def _begin_life(self, index: int, restarts: int) -> Running:
        launched = self._launcher.launch(index, restarts)
        if not self._scheme.initialized_on_sender:
            self._first[index] = launched
            return launched.running
        try:
            self._scheme.emit(self._members.restarted(index, self._model_id, self.sender.incarnation))
            self.sender.add_worker(index, launched.endpoint, process=launched.watched)
            self._sending.resume()
        except BaseException:
            launched.running.channel.close()
            launched.running.process.close()
            raise
        launched.running.announce(self.version)
        return launched.running

    @in_one_thread("stop")
    def stop(self) -> None:
        """Ask all workers to return: `Worker.stopped` is True from now on. Never waits; no worker is restarted now.

        `results` still yields the results that they put, and ends when all have returned.

        Raises:
            StateError: the group is not started, or closed, or another thread uses it.
        """
        self._require(State.READY, "stop")
        for member in self._members.by_index.values():
            member.stop()

    def close(self, timeout: float | Timeout | None = 10.0) -> None:
        """End all workers, and release everything. Closing twice is allowed, and any thread may do it.

        A call that another thread is in raises `StateError`. Results that were not taken are dropped. A worker that
        waits in `put`, or at a step, wakes at once. One whose function has not begun is killed at once.

        Args:
            timeout: seconds within which the workers must return. Others are killed, with whatever they started.
        """
        deadline = Deadline(timeout)
        with self._calls.closing:
            self._state = State.CLOSED
            self._calls.end_others()
            self._end_workers(timeout, deadline)

    def _end_workers(self, timeout: float | Timeout | None, deadline: Deadline) -> None:
        lives = [member.running for member in self._members.by_index.values() if member.running is not None]
        try:
            with Shield(lambda: None):  # what a handler raises waits: an interrupt leaves nothing behind
                starting = self._members.starting()
                for life in lives:
                    life.channel.close()
                self._scheme.close()
                for life in starting:
                    life.process.kill()  # it may import for seconds before it learns that the group is closed
            for life in lives:
                life.process.join(deadline)
            self._members.log_hung(timeout)
            for life in lives:
                life.process.kill()  # all of them, before any is waited for
        finally:
            with Shield(lambda: None):
                for member in self._members.by_index.values():
                    member.release()
                self._launcher.close(list(self._first.values()))
                for mapping in (self._first, self._sent_to, self._members.results):
                    mapping.clear()
                self._at_exit.cancel()

    def forget(self) -> None:
        """In a forked child: the workers are the parent's."""
        self._at_exit.cancel()
        self._state, self._calls = State.CLOSED, Calls()
        for member in self._members.by_index.values():
            member.running = None

    def __reduce__(self) -> NoReturn:
        """Raises ConfigurationError: a copy would have this group's workers, and close their descriptors."""
        raise ConfigurationError(NO_COPY)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException:  # such as KeyboardInterrupt, before the cleanup had begun
            self.close(timeout=0)
            raise

    # ------------------------------------------------------------------------------------------------- weights

    @in_one_thread("send")
    def send(
        self,
        weights: Any = None,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Send weights as the next version, and wait until every worker has answered or is lost.

        An update that is still outstanding is superseded. A worker that died and will be restarted is LOST in the
        report, but this raises nothing: it gets the newest version when it starts. If this is so for all workers, no
        version is used yet (`SyncReport.version` is None): the weights are read and sent when the first one is
        restarted.

        Args:
            weights: None: the model's; otherwise as for `WeightSender.send`.
            timeout: seconds until the wait ends; None: forever; default: `WEIGHTSYNC_TIMEOUT` or 60.
            on_failure: "raise", or "report": return the report even if workers failed.

        Returns:
            The outcome of each worker that has not finished.

        Raises:
            WorkerFailedError: a worker has failed and is not restarted. Raised once; the others keep running. If none
                is left, each call raises the last failure.
            AckTimeoutError: some workers had not answered by the deadline; `wait_async` waits for them again.
            RefusedError: workers refused the update, and keep serving their previous version.
            SyncError: there were failures of several kinds.
            StateError, ConfigurationError, LayoutError, NonFiniteError, TransportError: no version was sent.
        """
        deadline, failing = Deadline(timeout), OnFailure(on_failure)
        self._dispatch("send", weights, OnPending.SUPERSEDE, timeout)
        return self._check_report(self._wait_for_answers(deadline), failing)

    @in_one_thread("send_async")
    def send_async(
        self,
        weights: Any = None,
        *,
        on_pending: OnPending | str = OnPending.SUPERSEDE,
        timeout: float | Timeout | None = Timeout.DEFAULT,
    ) -> SyncReport:
        """Send weights as the next version and return at once; `wait_async` returns the outcomes.

        The latest wins: a worker that is slow to take an update is given the newest one next.

        Args:
            weights: as for `send`.
            on_pending: what to do if an update is outstanding; default: supersede it.
            timeout: seconds that ``on_pending="wait"`` may wait; otherwise unused.

        Raises:
            StateError, ConfigurationError, LayoutError, NonFiniteError, TransportError: no version was sent.
            SyncError: the update that ``on_pending="wait"`` waited for did not reach every worker. This one was sent
                anyway, unless the deadline had passed (`AckTimeoutError`).
        """
        return self._dispatch("send_async", weights, OnPending(on_pending), timeout)

    @in_one_thread("wait_async")
    def wait_async(
        self,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Wait until every worker has answered the outstanding update, or is lost.

        Args:
            timeout: as for `send`.
            on_failure: as for `send`.

        Raises:
            StateError: nothing is outstanding, or another thread uses the group.
            WorkerFailedError, AckTimeoutError, RefusedError, SyncError: as `send`.
        """
        failing = OnFailure(on_failure)
        self._require(State.READY, "wait_async")
        return self._check_report(self._wait_for_answers(Deadline(timeout)), failing)

    def _dispatch(self, method: str, weights: Any, pending: OnPending, timeout: float | Timeout | None) -> SyncReport:
        self._require(State.READY, method)
        self._members.pump()
        self._forget_gone()
        self._sent_to = {index: member.running for index, member in self._members.by_index.items()}
        try:
            return self._sending.dispatch(weights, pending, timeout)
        except StateError as error:
            raise senders_refusal(error, self.sender, method) from None
        except SyncError as error:
            raise reword_report(error.report, self._members, self.sender).error(ADVICE) from None

    def _wait_for_answers(self, deadline: Deadline) -> SyncReport:
        """Wait for the answers to the last send. Meanwhile workers that hang are killed, and dead ones restarted."""
        while self.sender.owing and not deadline.passed:
            self._handle_worker_events(deadline)
            self.sender.progress()
            self._give_up_failed()
        try:
            report = self._sending.wait(deadline.remaining)
        except StateError as error:
            raise senders_refusal(error, self.sender, "wait_async") from None
        return reword_report(report, self._members, self.sender)

    def _handle_worker_events(self, deadline: Deadline) -> None:
        """Wait until something has happened to a worker, and see to it."""
        self._members.wait(deadline)
        if self._state is State.CLOSED:
            raise ClosedMeanwhile
        self._members.pump()

    def _give_up_failed(self) -> None:
        """Remove workers that have failed for good and owe an answer: a rank's link may be open, or not exist."""
        for index in self.sender.owing:
            if self._members.by_index[index].state is MemberState.FAILED:
                self.sender.remove_worker(index)

    def _check_report(self, report: SyncReport, on_failure: OnFailure) -> SyncReport:
        refused = report.of(OutcomeKind.REFUSED)
        self._await_deaths([*report.of(OutcomeKind.LOST), *refused])
        self._await_first_steps(refused)
        if on_failure is OnFailure.REPORT:
            return report
        self._raise_failed()
        self._members.require_one()
        if failed_for_running_workers(report, [worker for worker in refused if self._is_over(worker)]):
            raise report.error(ADVICE)
        return report

    def _is_over(self, index: int) -> bool:
        """Whether the life that the update in transit was sent to is over."""
        return self._members.by_index[index].running is not self._sent_to.get(index)

    def _await_first_steps(self, refused: Iterable[int]) -> None:
        """Wait until workers that refused a version, and may still be starting, have started or ended.

        A worker that refuses its first version ends: it counts as failed, and no longer as one that refuses.
        """
        deadline, members = Deadline(_LOST_SECONDS), [self._members.by_index[index] for index in refused]
        while not deadline.passed and any(
            member.state is MemberState.STARTING and not self._is_over(member.index) for member in members
        ):
            self._handle_worker_events(deadline)

    def _await_deaths(self, ended: list[int]) -> None:
        """Wait for workers whose link has ended: each dies soon, or is given up, unless it was restarted since."""
        deadline = Deadline(_LOST_SECONDS)
        members = [self._members.by_index[index] for index in ended if self._is_unlinked(index)]
        lives = [(member, member.running) for member in members if member.running is not None]
        while still_running := [member for member, life in lives if member.running is life]:
            if deadline.passed:
                for member in still_running:
                    member.give_up("its link is lost")
            self._handle_worker_events(deadline)
        self._members.pump()

    # ------------------------------------------------------------------------------------------------- results

    def results(self, timeout: float | Timeout | None = Timeout.START) -> Iterator[WorkerResult]:
        """Take the workers' results in order of arrival. Ends when all workers are finished.

        Args:
            timeout: seconds to wait for each result; None: forever; default: five times `WEIGHTSYNC_TIMEOUT` or 60.

        Raises:
            ConfigurationError: ``timeout`` is no number of seconds. Raised at once, all others by the iterator.
            ResultTimeoutError: no result arrived in time. The workers keep running, and the iterator can go on.
            WorkerFailedError: a worker has failed, and is not restarted. Raised once, after the results that had
                arrived by then. The other workers keep running, and the iterator can go on.
            Exception: a result cannot be unpickled here. It is dropped, and the iterator can go on.
            StateError: the group is not started, or closed, or another thread uses it.
        """
        allowed = seconds(timeout)
        return iter(lambda: self._next(Deadline(allowed)), None)

    @in_one_thread("results")
    def _next(self, deadline: Deadline) -> WorkerResult | None:
        """The next result; None: all workers are finished."""
        while True:
            self._require(State.READY, "results")
            self._members.pump()
            if taken := self._members.take_first():
                waiting, value = taken
                return WorkerResult(waiting.member.index, waiting.put.versions, value)
            self._raise_failed()
            if self._members.over:
                return None
            if deadline.passed:
                raise ResultTimeoutError(too_late(self._members.by_index))
            self._give_up_unlinked()
            self._members.wait(deadline)

    def _give_up_unlinked(self) -> None:
        """Give up workers whose link is lost: no weights reach them any more."""
        for index in self.sender.worker_ids:
            if self._is_unlinked(index):
                self._members.by_index[index].lost_link(_LOST_SECONDS)

    def _is_unlinked(self, index: int) -> bool:
        entry = self.sender.workers.get(index)
        return entry is not None and not entry.open

    def _raise_failed(self) -> None:
        """Raise for a worker that failed and is not restarted. Once reported, it is no longer among the workers."""
        if self._members.unreported:
            self._forget_gone(self._members.unreported[0])
            raise self._members.unreported.popleft()  # last: an interrupt meanwhile loses no failure

    def _forget_gone(self, reported: WorkerFailedError | None = None) -> None:
        """Take those that are finished, or have failed and were reported, from the sender's workers."""
        self.sender.progress()  # reads their goodbyes
        unreported = {error.worker for error in self._members.unreported if error is not reported}
        for index, member in self._members.by_index.items():
            if member.over and index not in unreported and index in self.sender.worker_ids:
                self.sender.remove_worker(index)

    # ------------------------------------------------------------------------------------------------- reading

    @property
    def scheme(self) -> WeightSyncScheme:
        """The trainer's scheme, which the group closes: for `on_event`, spans and metrics, also before the start."""
        return self._scheme

    @property
    def sender(self) -> WeightSender:
        """The sender of the weights.

        Raises:
            StateError: the group is not started.
        """
        if not self._scheme.initialized_on_sender:
            raise refusal(self._state, "group.sender")
        return self._scheme.get_sender()

    @property
    def version(self) -> int:
        """The newest version sent."""
        return self._sending.version

    @property
    def failures(self) -> tuple[WorkerFailedError, ...]:
        """All failures of workers so far, oldest first, including those of workers that were restarted."""
        return tuple(self._members.failures)

    @property
    def processes(self) -> dict[int, Any]:
        """The workers that run: index to `multiprocessing` process, for Ray to actor handle, for ranks to rank."""
        lives = {index: member.running for index, member in self._members.by_index.items()}
        return {index: life.process.handle for index, life in lives.items() if life is not None}

    def _require(self, state: State, method: str) -> None:
        if self._state is not state:
            raise refusal(self._state, method)
