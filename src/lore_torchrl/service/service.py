"""The service: asks the advisor within budget and deadline, and never stops the run."""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor
from lore_torchrl.advisors.errors import Sending, Usage
from lore_torchrl.advisors.redaction import shown
from lore_torchrl.service.advisor_state import restore_advisor, save_advisor
from lore_torchrl.service.answers import Failure, Verdict, judge
from lore_torchrl.service.budget import CallBudget
from lore_torchrl.service.cache import AdviceCache
from lore_torchrl.service.counters import CallCounters
from lore_torchrl.service.desk import AdviceDesk
from lore_torchrl.service.flight import Call, Flight, Near, Reply
from lore_torchrl.service.policy import CallPolicy
from lore_torchrl.service.store import StoreError, patience

# A situation without neighbours.
_NOWHERE = Near()
_MAX_QUESTIONS = 256
# What a step waits for other processes that write into the store, in seconds, and what
# keeping a batch's answers waits.
_PAY_WAIT_S = {"blocking": 0.2, "async": 0.02}
_KEEP_WAIT_S = 0.2


class AdviceService:
    """Owns cache, budget and call policy, and asks the advisor; a failure costs no run.

    An answer that is late beyond its deadline, malformed or an exception is counted in
    :attr:`errors` by its kind, logged once for each kind, and comes back as ``None``; only a
    :class:`~lore_torchrl.advisors.errors.FatalAdviceError` reaches the caller. The advisor
    runs in an event loop of its own in a daemon thread, from the first question on; its
    ``aclose``, if it has one, ends it there.

    ``mode="blocking"`` waits for each answer: deterministic if the advisor is.
    ``mode="async"`` waits for none. A question gets an id and the step goes on; the answer
    enters the cache when it comes, and :meth:`take_late` hands it out with its id. A
    situation whose question is in flight is not asked about twice. What is in flight when
    the service is closed, saved and restored, or killed is lost: counted, never refunded.

    If the advisor has a ``cache_prefix`` (its model and prompt), it goes before every key.

    Args:
        advisor: Whom to ask.
        budget: Ledger of calls; spent before each call, so that a crash cannot buy twice.
        policy: When to ask, over the same ``budget``. Default: ``CallPolicy(budget)``.
        cache: Where answers are kept. Default: ``AdviceCache()``.
        timeout_s: Deadline of a whole batch in seconds. Default: ``30.0``.
        mode: ``"blocking"`` or ``"async"``. Default: ``"blocking"``.
        max_in_flight: Most questions in flight in async mode, at least 1; one beyond it is
            not asked. Default: ``16``.

    Raises:
        TypeError: If ``advisor`` has no ``advise``.
        ValueError: If ``policy`` holds another budget, ``timeout_s`` is not a positive
            finite number, ``mode`` is unknown or ``max_in_flight`` is below 1.

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
        >>> with AdviceService(Right(), budget=CallBudget(10), mode="async") as service:
        ...     ids, left = service.submit([request]), service.drain(5.0)
        ...     service.take_late()
        [(1, Advice(logits=(0.0, 3.0), confidence=1.0))]
    """

    def __init__(
        self,
        advisor: Advisor,
        *,
        budget: CallBudget,
        policy: CallPolicy | None = None,
        cache: AdviceCache | None = None,
        timeout_s: float = 30.0,
        mode: Literal["blocking", "async"] = "blocking",
        max_in_flight: int = 16,
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
        if mode not in ("blocking", "async"):
            raise ValueError(f"mode must be 'blocking' or 'async', got {mode!r}.")
        if max_in_flight < 1:
            raise ValueError(
                f"max_in_flight must be at least 1, got {max_in_flight}. To make no calls, use "
                "CallBudget(0)."
            )
        self.advisor = advisor
        self.budget = budget
        self.policy = policy
        self.cache = AdviceCache() if cache is None else cache
        self.timeout_s = timeout_s
        self.mode = mode
        self.max_in_flight = max_in_flight
        self.counters = CallCounters()
        self._last_id = 0
        self._questions: OrderedDict[int, AdviceRequest] = OrderedDict()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._desk = AdviceDesk(
            self.advisor, counters=self.counters, keep=self._keep, timeout_s=self.timeout_s
        )

    def __enter__(self) -> AdviceService:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # What is in flight stays the original's: two of them cannot receive one answer.
        with self._desk.lock:
            state = {**self.__dict__, "counters": copy.deepcopy(self.counters)}
        del state["_desk"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_anew()

    @property
    def errors(self) -> Counter[str]:
        """Failures so far, by kind."""
        return self.counters.errors

    @property
    def room(self) -> int:
        """Questions that a step may ask now.

        As many as ``max_in_flight`` leaves; none while the oldest in flight waits for more than
        twice the 95th percentile of the latencies, since a server that has fallen silent would
        be sent all of them. So the first answer is waited for before a second question.
        """
        with self._desk.lock:
            flight = self._desk.flight
            late = len(flight) and flight.oldest_s > 2.0 * self.counters.latency(0.95)
        return 0 if late or self._desk.stopped else self._free_places

    @property
    def _free_places(self) -> int:
        return max(0, self.max_in_flight - len(self._desk.flight))

    # ---- what is known ----

    def question(self, advice_id: int) -> AdviceRequest | None:
        """Return one of the last 256 questions by its number, without its picture."""
        with self._desk.lock:
            return self._questions.get(advice_id)

    def lookup(self, key: str) -> Advice | None:
        """Return the cached advice for ``key`` or ``None``, and count the hit or miss."""
        return self.find(key).advice

    def find(self, key: str, near: Near = _NOWHERE, *, count: bool = True) -> Reply:
        """Return cached advice, and the question in flight: its id, negative beside advice.

        Args:
            key: Key of the situation.
            near: By what a neighbour's advice may serve. Default: nothing.

        Keyword Args:
            count: Whether this counts as a hit or miss of the cache. Default: ``True``.
        """
        look = self.cache.get if count else self.cache.peek
        # In this order: an answer that lands in between is in the cache by then.
        advice_id = self._desk.flight.advice_id(key)
        advice = None
        with self._storing():
            advice = look(self._prefixed(key), self._prefixed(near.coarse), near.latent)
        return Reply(advice_id if advice is None else -advice_id, advice)

    def wants(self, key: str, near: Near, *, known: bool) -> bool:
        """Return whether a question about a situation is worth its price.

        See :meth:`AdviceCache.wants`: not where ``known``, unless its class has too few
        answers for how often it is visited. Nor while one about it is in flight.
        """
        if self._desk.flight.advice_id(key):
            return False
        return self.cache.wants(self._prefixed(key), self._prefixed(near.coarse), known=known)

    def refute(self, key: str, action: int) -> None:
        """Take note that ``action`` left a situation as it was: see :class:`AdviceCache`."""
        self.cache.refute(self._prefixed(key), action)

    def _peek(self, key: str) -> Advice | None:
        with self._storing():
            return self.cache.peek(self._prefixed(key))

    def _prefixed(self, key: str | None) -> str | None:
        prefix = getattr(self.advisor, "cache_prefix", "")
        if key is None or not prefix or prefix == self.cache.prefix:
            return key
        return f"{prefix}{key}"

    # ---- asking ----

    def consult(self, requests: Sequence[AdviceRequest], near: Sequence[Near] = ()) -> list[Reply]:
        """Ask in this service's mode.

        Args:
            requests: The questions, of one batch and under one deadline.
            near: For each request, by what its neighbours may find the answer. Default:
                nothing.

        Returns:
            One reply for each request: with its answer in blocking mode; in async mode with
            the id of the answer to come, and the answer if it has come already.

        Raises:
            FatalAdviceError: If the advisor says that no run should go on.
        """
        if self.mode == "blocking":
            return self._ask(requests, near)
        replies = []
        for request, advice_id in zip(requests, self.submit(requests, near), strict=True):
            advice = self._peek(request.cache_key)
            with self._desk.lock:
                landed = advice is not None and self._desk.flight.claim(advice_id)
                if landed:
                    self.counters.made_it()
            if advice_id and not landed:
                advice = None  # an earlier answer, to a situation that is asked about again
            replies.append(Reply(advice_id, advice))
        return replies

    def ask(self, requests: Sequence[AdviceRequest]) -> list[Advice | None]:
        """Ask the advisor and wait for its answers, whatever the mode.

        Requests with the same key are asked once; one whose answer is cached is not
        asked at all. Requests beyond the budget are not asked either.

        Args:
            requests: The questions, of one batch and under one deadline.

        Returns:
            One answer for each request, ``None`` where there is none.

        Raises:
            FatalAdviceError: If the advisor says that no run should go on.
        """
        return [reply.advice for reply in self._ask(requests)]

    def _ask(self, requests: Sequence[AdviceRequest], near: Sequence[Near] = ()) -> list[Reply]:
        known, questions = self._sort(requests, near)
        calls = self._pay(questions)
        if calls:
            for call, advice in zip(calls, self._desk.wait_for(calls), strict=True):
                known[call.request.cache_key] = Reply(call.advice_id if advice else 0, advice)
        return [known[request.cache_key] for request in requests]

    def submit(self, requests: Sequence[AdviceRequest], near: Sequence[Near] = ()) -> list[int]:
        """Ask without waiting for the answers; what it waits for is the ledger's commit.

        Args:
            requests: The questions, of one batch and under one deadline.
            near: As in :meth:`consult`.

        Returns:
            For each request the id of its question, or 0 where none is in flight: its
            answer is cached, the budget is used up or ``max_in_flight`` reached.

        Raises:
            FatalAdviceError: If the advisor has said that no run should go on.
            RuntimeError: In blocking mode.
        """
        if self.mode != "async":
            raise RuntimeError(
                "submit() needs AdviceService(mode='async'); a blocking service has ask()."
            )
        self._desk.check()
        waiting = self._desk.flight.advice_id
        ids = {request.cache_key: waiting(request.cache_key) for request in requests}
        known, questions = self._sort(requests, near)
        questions = [question for question in questions if not ids[question[0].cache_key]]
        room = self._free_places
        if beyond := max(0, len(questions) - room):
            self._record("in_flight", f"max_in_flight={self.max_in_flight} is reached", beyond)
        calls = self._pay(questions[:room])
        if calls:
            ids |= {call.request.cache_key: call.advice_id for call in calls}
            self._desk.start(calls)
        for key in known.keys() - {call.request.cache_key for call in calls}:
            ids[key] = 0 if known[key].advice else ids[key]
        return [ids[request.cache_key] for request in requests]

    def _sort(
        self, requests: Sequence[AdviceRequest], near: Sequence[Near]
    ) -> tuple[dict[str, Reply], list[tuple[AdviceRequest, Near]]]:
        """Return what the cache knows, and one question about each other situation."""
        known: dict[str, Reply] = {}
        unknown: dict[str, tuple[AdviceRequest, Near]] = {}
        near = near or [_NOWHERE] * len(requests)
        for request, place in zip(requests, near, strict=True):
            key = request.cache_key
            known[key] = Reply(0, self._peek(key))
            if known[key].advice is None or self.wants(key, place, known=True):
                unknown.setdefault(key, (request, place))
        return known, list(unknown.values())

    def _pay(self, questions: Sequence[tuple[AdviceRequest, Near]]) -> list[Call]:
        """Spend a call for each question, as far as the budget goes."""
        try:
            with patience(_PAY_WAIT_S[self.mode]):
                paid = self.budget.spend_up_to(len(questions)) if questions else 0
        except StoreError as error:
            # What cannot be entered into the ledger is not asked.
            self._record(error.kind, str(error), len(questions))
            self.policy.withdraw_call()
            return []
        if beyond := len(questions) - paid:
            self._record("budget", f"{beyond} questions beyond the budget", beyond)
        calls = []
        with self._desk.lock:
            self.counters.calls += paid
            for request, near in questions[:paid]:
                self._last_id += 1
                near = near._replace(coarse=self._prefixed(near.coarse))
                key = self._prefixed(request.cache_key)
                calls.append(Call(self._last_id, request, key, near))
                # A picture may be large, and who looks here reads the text.
                self._questions[self._last_id] = (
                    request if request.image is None else replace(request, image=None)
                )
                if len(self._questions) > _MAX_QUESTIONS:
                    self._questions.popitem(last=False)
        return calls

    def _record(self, kind: str, message: str, count: int) -> None:
        with self._desk.lock:
            self.counters.record(kind, message, count)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Count a disk that fails, and damaged rows; memory has what was to be stored."""
        try:
            with patience(_KEEP_WAIT_S):
                yield
        except StoreError as error:
            self._record(error.kind, str(error), 1)
        for line in self.cache.take_unreadable():
            self._record("store_row", line, 1)

    @patience(_KEEP_WAIT_S)
    def _keep(self, calls: Sequence[Call], outcome: Any) -> Verdict:
        """Put what is usable into the cache, and what it cost into the ledger."""
        verdict = judge([call.request for call in calls], outcome)
        failures = iter(verdict.failures)
        # First the answers: a kill in between forgets some tokens rather than paid advice.
        for call, advice in zip(calls, verdict.advices, strict=True):
            if advice is not None:
                with self._storing():
                    self.cache.put(call.cache_key, advice, **call.near._asdict())
                self._watch(None, free=False)
            elif (failure := next(failures, None)) is not None:
                refunded = self._refund(failure)
                verdict.refunded += refunded
                self._watch(failure, free=bool(refunded))
        if verdict.usage != Usage():
            with self._storing():
                self.budget.settle(verdict.usage)
            with self._desk.lock:
                self.counters.usage += verdict.usage
        return verdict

    def _refund(self, failure: Failure) -> int:
        """Give the call back if no server saw it; return the calls given back."""
        if failure.sending is Sending.DONE:
            return 0
        with self._storing():
            return self.budget.refund(sent=failure.sending is Sending.TRIED)
        return 0

    def _watch(self, failure: Failure | None, *, free: bool) -> None:
        """Tell the policy how a call ended, and the log when an outage begins or ends."""
        if failure is not None and failure.lasting is None:
            self.policy.withdraw_call()
            if self.policy.outage.out:
                with self._desk.lock:
                    self.counters.logged.add(failure.kind)
            return
        outage = self.policy.outage
        was_out, steps = outage.out, outage.steps
        self.policy.observe_result(
            ok=failure is None, lasting=failure is not None and failure.lasting, free=free
        )
        if outage.out and not was_out:
            torchrl_logger.warning(
                f"Advice stops ({failure.kind}): {shown(failure.message, 500).rstrip('.')}. The "
                "run goes on without it. The advisor is tried again with one call after "
                f"{outage.left} environment steps, then at growing intervals."
            )
        elif was_out and not outage.out:
            torchrl_logger.warning(
                f"Advice is back after {steps} environment steps: the advisor answers again."
            )
        if outage.out and failure is not None:
            # One line tells of an outage, whatever its calls failed of.
            with self._desk.lock:
                self.counters.logged.add(failure.kind)

    def take_late(self) -> list[tuple[int, Advice | None]]:
        """Return the answers that came since the last time, each with its question's id.

        ``None`` stands for a question that was lost. All usable ones are cached already.

        Raises:
            FatalAdviceError: If the advisor has said that no run should go on.
        """
        self._desk.check()
        with self._desk.lock:
            return self._desk.flight.take()

    def drain(self, timeout_s: float) -> int:
        """Wait for the questions in flight.

        Args:
            timeout_s: Seconds to wait at most.

        Returns:
            How many are still in flight.
        """
        return self._desk.drain(timeout_s)

    def stop_asking(self) -> None:
        """Ask nothing more, and give up what a step waits for; safe within a signal handler.

        From then on :meth:`drain` waits a second in all.
        """
        self._desk.stop_waiting()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Close advisor and thread, within ``drain_s`` and about two seconds.

        A later question starts them anew.

        Keyword Args:
            drain_s: Seconds to wait for what is in flight; the rest is lost. Default: ``0.0``.
        """
        self._desk.close(drain_s=drain_s)

    # ---- progress ----

    def stats(self) -> dict[str, float]:
        """Return the counters of the run so far, all as ``float``.

        ``calls`` were made by this service: ``in_time`` for the step that asked, ``late``
        (both together ``answered``), ``lost`` (``failed``, or given up at a close or
        resume) or ``in_flight``. ``refunded`` ones reached no server and are no calls.
        ``hit_rate`` is the share of look-ups that found advice, 0
        before the first. The rest is the policy's own.
        """
        with self._desk.lock:
            counters, in_flight = self.counters.stats(), len(self._desk.flight)
        found = self.cache.hits + self.cache.near_hits
        lookups = found + self.cache.misses
        return {
            **counters,
            "in_flight": float(in_flight),
            "cache_hits": float(self.cache.hits),
            "cache_misses": float(self.cache.misses),
            "cache_near_hits": float(self.cache.near_hits),
            "refuted": float(self.cache.refuted),
            "hit_rate": found / lookups if lookups else 0.0,
            **{name: n for name, n in self.policy.stats().items() if name != "calls"},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all progress, the advisor's own included, as JSON-able types."""
        with self._desk.lock:
            state: dict[str, Any] = {
                "counters": self.counters.state_dict(),
                "in_flight": len(self._desk.flight),
                "last_id": self._last_id,
            }
        # After the counters: an answer that lands in between is counted as lost, and kept.
        state |= {"budget": self.budget.state_dict(), "policy": self.policy.state_dict()}
        with self._storing():
            self.cache.pull()
        state["cache"] = self.cache.state_dict()
        return state | save_advisor(self.advisor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all progress.

        What was in flight then is lost: paid for, never answered. So is what a durable ledger
        has of this run from after the checkpoint.

        Args:
            state: What :meth:`state_dict` returned.
        """
        self.budget.load_state_dict(state["budget"])
        self.policy.load_state_dict(state["policy"])
        self.cache.load_state_dict(state["cache"])
        with self._desk.lock:
            self._desk.flight = Flight()
            self.counters.load_state_dict(state["counters"])
            # Made after the checkpoint, by a process that was killed.
            since = max(0, self.budget.own_calls - self.counters.calls)
            self.counters.calls += since
            self.counters.dropped(int(state["in_flight"]) + since)
            self._last_id = int(state["last_id"])
        restore_advisor(self.advisor, state)
