"""The service: asks the adviser within budget and deadline, and never stops the run."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor
from lore_torchrl.service.budget import CallBudget
from lore_torchrl.service.cache import AdviceCache
from lore_torchrl.service.policy import CallPolicy

# What an adviser gets beyond its deadline to react to its cancellation.
_GRACE_S = 0.5


class AdviceService:
    """Owns cache, budget and call policy, and asks the adviser; a failure costs no run.

    An answer that is late, malformed or an exception is counted in :attr:`errors`,
    logged once for each kind, and comes back as ``None``. The adviser runs in an event
    loop of its own in a daemon thread, so that the service works where a loop is
    already running (Jupyter). The thread starts at the first question.

    Args:
        advisor: Whom to ask.
        budget: Ledger of calls; spent before each call, so that a crash cannot buy twice.
        policy: When to ask, over the same ``budget``. Default: ``CallPolicy(budget)``.
        cache: Where answers are kept. Default: ``AdviceCache()``.
        timeout_s: Deadline of a whole batch in seconds. Default: ``30.0``.

    Raises:
        TypeError: If ``advisor`` has no ``advise``.
        ValueError: If ``policy`` holds another budget, or ``timeout_s`` is not a
            positive finite number.

    Examples:
        >>> class Right:
        ...     async def advise(self, requests):
        ...         return [Advice(logits=(0.0, 3.0)) for _ in requests]
        >>> request = AdviceRequest("a wall ahead", ("forward", "right"), "wall")
        >>> with AdviceService(Right(), budget=CallBudget(10)) as service:
        ...     service.ask([request])[0].logits
        (0.0, 3.0)
        >>> service.lookup("wall").logits
        (0.0, 3.0)
        >>> service.budget.remaining
        9
    """

    def __init__(
        self,
        advisor: Advisor,
        *,
        budget: CallBudget,
        policy: CallPolicy | None = None,
        cache: AdviceCache | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if not callable(getattr(advisor, "advise", None)):
            raise TypeError(
                f"AdviceService needs an advisor with an async `advise`, got {advisor!r}."
            )
        if policy is None:
            policy = CallPolicy(budget)
        if policy.budget is not budget:
            raise ValueError(
                f"The policy counts on {policy.budget!r}, the service would spend from "
                f"{budget!r}. Give both the same CallBudget object."
            )
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s must be a positive number of seconds, got {timeout_s}.")
        self.advisor = advisor
        self.budget = budget
        self.policy = policy
        self.cache = AdviceCache() if cache is None else cache
        self.timeout_s = timeout_s
        self.errors: Counter[str] = Counter()
        self._calls = 0
        self._answered = 0
        self._failed = 0
        self._logged: set[str] = set()
        self._worker: _LoopThread | None = None

    def __enter__(self) -> AdviceService:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_worker": None}

    def lookup(self, key: str) -> Advice | None:
        """Return the cached advice for ``key`` or ``None``, and count the hit or miss."""
        return self.cache.get(key)

    def ask(self, requests: Sequence[AdviceRequest]) -> list[Advice | None]:
        """Ask the adviser and wait for its answers.

        Requests with the same key are asked once; one whose answer is cached is not
        asked at all. Requests beyond the budget are not asked either.

        Args:
            requests: The questions, of one batch and under one deadline.

        Returns:
            One answer for each request, ``None`` where there is none.
        """
        known: dict[str, Advice] = {}
        pending: dict[str, AdviceRequest] = {}
        for request in requests:
            cached = self.cache.peek(request.cache_key)
            if cached is not None:
                known[request.cache_key] = cached
            else:
                pending.setdefault(request.cache_key, request)
        batch = list(pending.values())[: self.budget.remaining]
        if len(batch) < len(pending):
            self._record("budget", f"{len(pending) - len(batch)} questions beyond the budget")
        if batch:
            self.budget.spend(len(batch))
            self._calls += len(batch)
            answers = self._ask_advisor(batch)
            for request, advice in zip(batch, answers, strict=True):
                if advice is not None:
                    self.cache.put(request.cache_key, advice)
                    known[request.cache_key] = advice
            answered = sum(advice is not None for advice in answers)
            self._answered += answered
            self._failed += len(batch) - answered
        return [known.get(request.cache_key) for request in requests]

    def _ask_advisor(self, batch: list[AdviceRequest]) -> list[Advice | None]:
        try:
            answers = self._run(self._bounded(batch))
        except TimeoutError:
            self._record("timeout", f"no answer within {self.timeout_s:g} s")
            return [None] * len(batch)
        except Exception as error:
            self._record(type(error).__name__, str(error))
            return [None] * len(batch)
        if not isinstance(answers, (list, tuple)) or len(answers) != len(batch):
            found = len(answers) if isinstance(answers, (list, tuple)) else type(answers).__name__
            self._record("wrong_answer_count", f"{found} for {len(batch)} questions")
            return [None] * len(batch)
        return [
            self._checked(request, answer) for request, answer in zip(batch, answers, strict=True)
        ]

    def _checked(self, request: AdviceRequest, answer: Any) -> Advice | None:
        if answer is None:
            self._record("unanswered", f"no answer to {request.cache_key!r}")
        elif not isinstance(answer, Advice):
            self._record("wrong_type", f"{type(answer).__name__} where Advice was expected")
        elif len(answer.logits) != len(request.actions):
            self._record(
                "wrong_logit_count",
                f"{len(answer.logits)} logits for {len(request.actions)} actions",
            )
        else:
            return answer
        return None

    def _record(self, kind: str, message: str) -> None:
        self.errors[kind] += 1
        if kind not in self._logged:
            self._logged.add(kind)
            torchrl_logger.warning(
                f"LoRe goes on without some advice ({kind}): {message}. "
                "Further failures of this kind are counted, not logged."
            )

    async def _bounded(self, batch: list[AdviceRequest]) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self.advisor.advise(batch)
        except (KeyboardInterrupt, SystemExit) as error:
            # Raised inside a task they would end the loop without waking the caller.
            return _Exit(error)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._worker is None or not self._worker.usable:
            self._worker = _LoopThread()
            weakref.finalize(self, self._worker.stop)
        future = self._worker.submit(coroutine)
        try:
            result = future.result(self.timeout_s + _GRACE_S)
        except TimeoutError:
            if not future.done():
                # The adviser blocks its loop: leave both behind and begin anew next time.
                future.cancel()
                self._worker.stop(wait=False)
                self._worker = None
            raise
        except KeyboardInterrupt:
            future.cancel()
            raise
        if isinstance(result, _Exit):
            raise result.error
        return result

    def stats(self) -> dict[str, float]:
        """Return the counters of the run so far, all as ``float``.

        ``calls`` were made by this service, of which ``answered`` and ``failed`` came
        out usable or not. ``hit_rate`` is the share of look-ups that found advice, 0
        before the first. ``cooldown_left`` counts environment steps.
        """
        lookups = self.cache.hits + self.cache.misses
        return {
            "calls": float(self._calls),
            "answered": float(self._answered),
            "failed": float(self._failed),
            "cache_hits": float(self.cache.hits),
            "cache_misses": float(self.cache.misses),
            "hit_rate": self.cache.hits / lookups if lookups else 0.0,
            "budget_left": float(self.budget.remaining),
            "cooldown_left": float(self.policy.cooldown.left),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all progress, the adviser's own included, as JSON-able types."""
        state: dict[str, Any] = {
            "budget": self.budget.state_dict(),
            "policy": self.policy.state_dict(),
            "cache": self.cache.state_dict(),
            "errors": dict(self.errors),
            "calls": self._calls,
            "answered": self._answered,
            "failed": self._failed,
        }
        if hasattr(self.advisor, "state_dict"):
            state["advisor"] = self.advisor.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all progress.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self.budget.load_state_dict(state["budget"])
        self.policy.load_state_dict(state["policy"])
        self.cache.load_state_dict(state["cache"])
        self.errors = Counter(state["errors"])
        self._calls = int(state["calls"])
        self._answered = int(state["answered"])
        self._failed = int(state["failed"])
        if "advisor" in state and hasattr(self.advisor, "load_state_dict"):
            self.advisor.load_state_dict(state["advisor"])

    def close(self) -> None:
        """Stop the thread. A later question starts a new one."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _Exit:
    """Carries an exit request from the loop's thread to the caller's."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _LoopThread:
    """One event loop in one daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._serve, args=(self._loop,), name="lore-advice", daemon=True
        )
        self._thread.start()

    @property
    def usable(self) -> bool:
        # Threads do not survive a fork; the child's copy of this object has none.
        return self._pid == os.getpid() and self._thread.is_alive()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self, *, wait: bool = True) -> None:
        if not self.usable or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if wait and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
