"""Where questions are put to the advisor: in a thread of its own, waited for or not."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.base import Advice, Advisor
from lore_torchrl.advisors.errors import FatalAdviceError, StoppedError
from lore_torchrl.service.answers import Verdict
from lore_torchrl.service.counters import CallCounters
from lore_torchrl.service.flight import Call, Flight
from lore_torchrl.service.loop import LoopThread

# What an advisor gets beyond its deadline to react to its cancellation.
_GRACE_S = 0.5
# What it gets to close its connections.
_CLOSE_S = 1.0
# What answers in flight get, all in all, once no more is asked.
_LAST_S = 1.0


class AdviceDesk:
    """Puts paid questions to an advisor, and counts what becomes of them.

    ``lock`` guards counters and flight, where the caller's thread and the loop's meet. It
    is never held over I/O, so that no step waits for the loop's thread.

    Args:
        advisor: Whom to ask.
        counters: Where outcomes are counted.
        keep: Called with the questions and their outcome (answers or exception), in either
            thread; stores what is usable and returns the verdict.
        timeout_s: Deadline of a batch in seconds.
    """

    def __init__(
        self,
        advisor: Advisor,
        *,
        counters: CallCounters,
        keep: Callable[[Sequence[Call], Any], Verdict],
        timeout_s: float,
    ) -> None:
        self.advisor = advisor
        self.counters = counters
        self.timeout_s = timeout_s
        self.flight = Flight()
        self.lock = threading.RLock()
        self._keep = keep
        self._landed = threading.Condition(self.lock)
        self._worker: LoopThread | None = None
        self._fatal: BaseException | None = None
        self._waited_for: Future | None = None
        self._end: float | None = None

    # ---- asking ----

    def wait_for(self, calls: Sequence[Call]) -> list[Advice | None]:
        """Ask and wait for the answers of one batch.

        Args:
            calls: The questions.

        Raises:
            FatalAdviceError: If the advisor says that no run should go on.
        """
        try:
            outcome = self._run(calls)
            verdict = self._keep(calls, outcome)
        except BaseException:
            self.counters.dropped(len(calls))
            raise
        with self.lock:
            self.counters.judged(verdict, latency_s=calls[0].age_s, late=False)
        if verdict.fatal is not None:
            raise verdict.fatal
        return verdict.advices

    def start(self, calls: Sequence[Call]) -> None:
        """Ask without waiting.

        Args:
            calls: The questions of one batch.
        """
        with self.lock:
            self.flight.start(calls)
            self._loop().submit(self._serve(calls))

    def _loop(self) -> LoopThread:
        if self._worker is None or not self._worker.usable:
            self._worker = LoopThread()
            weakref.finalize(self, self._worker.stop)
        return self._worker

    def _run(self, calls: Sequence[Call]) -> Any:
        future = self._waited_for = self._loop().submit(self._attempt(calls))
        if self.stopped:
            future.cancel()
        try:
            return future.result(self.timeout_s + _GRACE_S)
        except CancelledError:
            return StoppedError("The run is being stopped.")
        except TimeoutError as error:
            # The advisor blocks its loop: leave both behind and begin anew next time.
            future.cancel()
            self._abandon()
            return error
        except BaseException:
            future.cancel()
            raise

    async def _attempt(self, calls: Sequence[Call]) -> Any:
        """Return the advisor's answers, or what it raised."""
        try:
            async with asyncio.timeout(self.timeout_s):
                answers = self.advisor.advise([call.request for call in calls])
                if not inspect.isawaitable(answers):
                    return FatalAdviceError(
                        f"{type(self.advisor).__name__}.advise() returned "
                        f"{type(answers).__name__} instead of something to await: define it with "
                        "`async def`."
                    )
                return await answers
        except (Exception, asyncio.CancelledError, KeyboardInterrupt, SystemExit) as error:
            # An exit raised inside a task would end the loop without waking the caller.
            return error

    async def _serve(self, calls: Sequence[Call]) -> None:
        outcome = await self._attempt(calls)
        with self.lock:
            given_up = calls[0] not in self.flight
        if given_up and isinstance(outcome, asyncio.CancelledError):
            return
        try:
            verdict = self._keep(calls, outcome)
        except Exception as error:
            # Nobody awaits this task: the run's own thread raises it at its next call.
            verdict = Verdict([None] * len(calls), fatal=error)
        with self.lock:
            if calls[0] not in self.flight:
                # Given up, and counted as lost; the answer is kept all the same.
                self.counters.gave_back(verdict.refunded)
                return
            self.counters.judged(verdict, latency_s=calls[0].age_s, late=True)
            self._fatal = self._fatal or verdict.fatal
            for call, advice in zip(calls, verdict.advices, strict=True):
                self.flight.land(call, advice)
            self._landed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop_waiting` was called."""
        return self._end is not None

    def stop_waiting(self) -> None:
        """Give up the batch that is waited for; safe within a signal handler."""
        self._end = time.monotonic() + _LAST_S
        if self._waited_for is not None:
            self._waited_for.cancel()

    # ---- what came of it ----

    def check(self) -> None:
        """Give up a loop that its advisor blocks, with all that it was asked.

        Raises:
            FatalAdviceError: If the advisor has said that no run should go on.
        """
        with self.lock:
            if self.flight.oldest_s > self.timeout_s + _GRACE_S:
                given_up = self.flight.give_up()
                verdict = self._keep(given_up, TimeoutError("the advisor blocks its event loop"))
                self.counters.judged(verdict, latency_s=0.0, late=True)
                self._abandon()
            error, self._fatal = self._fatal, None
        if error is not None:
            raise error

    def drain(self, timeout_s: float) -> int:
        """Wait for the questions in flight.

        Args:
            timeout_s: Seconds to wait at most.

        Returns:
            How many are still in flight.
        """
        deadline = time.monotonic() + timeout_s
        if self._end is not None:
            deadline = min(deadline, self._end)
        with self.lock:
            while len(self.flight) and (left := deadline - time.monotonic()) > 0:
                self._landed.wait(left)
            return len(self.flight)

    def close(self, *, drain_s: float = 0.0) -> None:
        """Give up what is in flight, let the advisor close, and stop the thread.

        It takes ``drain_s`` and about two seconds at most.

        Keyword Args:
            drain_s: Seconds to wait for answers first. Default: ``0.0``.
        """
        self.drain(drain_s)
        with self.lock:
            self.counters.dropped(len(self.flight.give_up()))
            worker, self._worker = self._worker, None
        if worker is not None:
            self._close_advisor(worker)
            worker.stop()

    def _close_advisor(self, worker: LoopThread) -> None:
        # In the loop that its connections belong to.
        aclose = getattr(self.advisor, "aclose", None)
        if not callable(aclose) or not worker.usable:
            return
        try:
            worker.submit(aclose()).result(_CLOSE_S)
        except Exception as error:
            torchrl_logger.warning(
                f"The advisor did not close within {_CLOSE_S:g} s or failed to "
                f"({type(error).__name__}); its connections end with the process."
            )

    def _abandon(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop(wait=False)
