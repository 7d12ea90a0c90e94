"""The service: asks the advisor within budget and deadline, and never stops the run."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor
from lore_torchrl.advisors.errors import (
    AdviceError,
    FatalAdviceError,
    Sending,
    StoppedError,
    Usage,
    error_of_kind,
)
from lore_torchrl.advisors.recorded import RecordingAdvisor
from lore_torchrl.advisors.redaction import shown
from lore_torchrl.configs.lore import CallsConfig
from lore_torchrl.service.budget import CallBudget
from lore_torchrl.service.cache import AdviceCache
from lore_torchrl.service.event_loop import EventLoopThread
from lore_torchrl.service.outcomes import CallCounters, Outcome, Ticket, TicketTable, judge
from lore_torchrl.service.policy import CallPolicy
from lore_torchrl.service.store import StoreError, patience
from lore_torchrl.service.triggers import StepSignals

# Seconds that a step waits for other processes that write to the store, before it pays and
# while it keeps a batch's answers.
_PAY_WAIT_S = {"blocking": 0.2, "async": 0.02}
_KEEP_WAIT_S = 0.2
# Seconds that an advisor gets beyond its deadline to react to its cancellation, and to close
# its connections; and that all answers in flight get together after `stop_asking`.
_GRACE_S, _CLOSE_S, _LAST_S = 0.5, 1.0, 1.0


class Query(NamedTuple):
    """The situation of one row, by its exact ``key``, and how to ask about it.

    ``request`` returns the question, with ``key`` as its ``cache_key``, and is called only if
    the advisor is asked. Answers of the same ``abstract_state`` serve too. ``no_op`` is the
    advised action that was just taken, without changing the situation or gaining reward; its
    advice no longer serves here. ``planned`` is what the plan of an earlier answer says of the
    situation: it is kept like an answer where there is none.
    """

    key: str
    request: Callable[[], AdviceRequest]
    row: int = 0
    abstract_state: str | None = None
    no_op: int | None = None
    planned: Advice | None = None


class Reply(NamedTuple):
    """What a row gets.

    ``advice_id`` is the number of the question that its answer comes, or will come, from; 0
    for none, and for ``advice`` from the cache. A ``fallback`` is another answer that serves
    until that of the question comes.
    """

    advice_id: int = 0
    advice: Advice | None = None
    fallback: bool = False


class AdviceService:
    """Owns cache, budget and call policy, and asks the advisor; a failure never stops the run.

    An answer that is late, malformed or an exception is counted in :attr:`errors` by its
    kind, logged once per kind, and comes back as ``None``; only a
    :class:`~lore_torchrl.advisors.errors.FatalAdviceError` reaches the caller. The advisor
    runs in an event loop in a daemon thread, which starts with the first question; its
    ``aclose``, if it has one, is called there at the end.

    ``mode="blocking"`` waits for each answer: deterministic if the advisor is.
    ``mode="async"`` never waits: a question gets a number, the step goes on, the answer
    enters the cache when it comes, and :meth:`answers` returns it by its number. What is in
    flight when the service is closed, killed, or restored from a checkpoint is lost and
    counted.

    If the advisor has a ``cache_prefix`` (its model and prompt), it goes before every key. A
    blocking service whose budget has a ``store`` can be pickled: the copy spends from the same
    ledger and counts its own calls.

    Args:
        advisor: Whom to ask.
        budget: Ledger of calls; spent before each call, so that a crash cannot buy twice.
        policy: When to ask, over the same ``budget``. Default: ``CallPolicy(budget)``.
        cache: Where answers are kept. Default: ``AdviceCache()``.
        timeout_s: Deadline of a whole batch in seconds. Default: ``30.0``.
        mode: ``"blocking"`` or ``"async"``. Default: ``"blocking"``.
        max_in_flight: Most questions in flight in async mode, at least 1. Default: ``16``.

    Raises:
        TypeError: If ``advisor`` has no ``advise``; if the service is pickled in async mode
            or without a store.
        ValueError: If ``policy`` holds another budget, ``mode`` is unknown, or ``timeout_s`` or
            ``max_in_flight`` is out of its range.
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
        if isinstance(advisor, type) or not callable(getattr(advisor, "advise", None)):
            raise TypeError(f"AdviceService needs an advisor with `advise`, got {advisor!r}.")
        policy = CallPolicy(budget) if policy is None else policy
        if policy.budget is not budget:
            raise ValueError("Give the policy and the service the same CallBudget object.")
        CallsConfig(timeout_s=timeout_s, mode=mode, max_in_flight=max_in_flight)
        self.advisor = advisor
        self.budget = budget
        self.policy = policy
        self.cache = AdviceCache() if cache is None else cache
        self.timeout_s = timeout_s
        self.mode = mode
        self.max_in_flight = max_in_flight
        self.counters = CallCounters()
        #: Whether progress was restored, by :meth:`load_state_dict`.
        self.restored = False
        self._tickets = TicketTable()
        self._last_id = 0
        # Guards counters and tickets, where the caller's thread and the loop's meet. It is
        # never held over I/O, so that no step waits for the loop's thread.
        self._lock = threading.RLock()
        self._finished = threading.Condition(self._lock)
        self._worker: EventLoopThread | None = None
        self._fatal: BaseException | None = None
        self._waited_for: Future | None = None
        self._end: float | None = None  # clock at which a stopped service waits no longer

    def __enter__(self) -> AdviceService:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mode == "async":
            raise TypeError(
                "The late answers of an AdviceService in async mode would not reach the replay "
                "rows of another process. Use mode='blocking' to pickle it."
            )
        names = ("budget", "policy", "cache", "timeout_s", "max_in_flight")
        settings = {name: getattr(self, name) for name in names}
        return partial(AdviceService, self.advisor, **settings), ()

    @property
    def errors(self) -> Counter[str]:
        """Failures so far, by kind."""
        return self.counters.errors

    @property
    def exhausted(self) -> bool:
        """Whether no more answers can come: the budget is spent, and no call is in flight."""
        with self._lock:
            if len(self._tickets):
                return False
        return self.budget.remaining == 0

    # ---- one vector step ----

    def step(self, queries: Sequence[Query], signals: StepSignals | None) -> list[Reply]:
        """Look up the rows' situations, and ask about those that the call policy chooses.

        Rows in the same situation share a question. With ``signals`` of ``None`` it looks up
        only: no cost and no counter moves.

        Raises:
            FatalAdviceError: If the advisor says that no run should go on.
        """
        armed = signals is not None
        if armed:
            self._check()
        self.cache.advance(signals.steps if armed else 0)
        with self._lock:
            in_flight = self._tickets.states()
        replies: list[Reply] = []
        candidates: dict[int, int] = {}  # from a row to its query
        served: list[int] = []
        with patience(_PAY_WAIT_S[self.mode]):  # of all rows together
            for place, query in enumerate(queries):
                keys = self._keys(query)
                if armed and query.no_op is not None:
                    self.cache.filter_no_op(keys[0], query.no_op)
                reply = self._find(query.key, keys, count=armed)
                if armed and query.planned is not None and not reply.advice_id:
                    reply = self._keep_planned(query.planned, keys, reply)
                replies.append(reply)
                known = reply.advice is not None
                waits = bool(reply.advice_id) or keys[1] in in_flight
                if not waits and self.cache.wants(*keys, known=known):
                    candidates[query.row] = place
                elif known or reply.advice_id:
                    served.append(query.row)
        if not armed:
            return replies
        for query in queries:
            signals.situations[query.row] = query.key
        rows = list(candidates) if self._may_ask else []
        # Of the rows in one abstract state, which share its answers, the first asks.
        asking: dict[tuple[str | None, ...], Query] = {}
        for row in self.policy.choose(rows, signals, served=served):
            query = queries[candidates[row]]
            state = query.abstract_state
            asking.setdefault((query.key,) if state is None else (None, state), query)
        bought = self._buy(list(asking.values())) if asking else {}
        for place in candidates.values():
            reply, known = bought.get(queries[place].key), replies[place].advice
            if reply is None:
                continue
            if reply.advice is None and known is not None:
                reply = Reply(reply.advice_id, known, fallback=bool(reply.advice_id))
            replies[place] = reply
        return replies

    def ask(self, requests: Sequence[AdviceRequest]) -> list[Reply]:
        """Ask about each situation that is neither cached nor in flight, whatever the policy.

        The requests are one batch under one deadline. Those with the same key are asked once,
        those beyond the budget are not. A reply has the answer in blocking mode, in async mode
        the number of the question. Raises a :class:`FatalAdviceError` as :meth:`step` does.
        """
        queries = [Query(request.cache_key, lambda r=request: r) for request in requests]
        known = {q.key: self._find(q.key, self._keys(q), count=False) for q in queries}
        known |= self._buy([query for query in queries if known[query.key] == Reply()])
        return [known[query.key] for query in queries]

    def lookup(self, key: str) -> Advice | None:
        """Return the cached advice for exactly this situation, without counting."""
        keys = self._keys(Query(key, AdviceRequest))
        return self._find(key, keys, count=False).advice

    def _find(self, key: str, keys: tuple[str, str | None], *, count: bool) -> Reply:
        """Look up a situation, by its key and by those that the cache has it under."""
        look = self.cache.get if count else self.cache.peek
        # In this order: an answer that lands in between is in the cache by then.
        with self._lock:
            advice_id = self._tickets.number(key)
        advice = None
        with self._storing():
            advice = look(*keys)
        return Reply(advice_id, advice, fallback=bool(advice_id) and advice is not None)

    def _keep_planned(self, step: Advice, keys: tuple[str, str | None], reply: Reply) -> Reply:
        """Put a plan's step into the cache, unless the situation has an answer of its own."""
        key, state = keys
        if self.cache.is_no_op(key, step) or self.cache.has_own(key, state):
            return reply
        saved = reply.advice is None and self.cache.wants(key, state)
        with self._storing():
            self.cache.put(key, step, abstract_state=state)
        with self._lock:
            self.counters.plan_steps += 1
            self.counters.plan_saved += saved
        return Reply(advice=step)

    def _keys(self, query: Query) -> tuple[str, str | None]:
        """Return the keys of a situation and its abstract state in the cache."""
        prefix = getattr(self.advisor, "cache_prefix", "")
        prefix = "" if prefix == self.cache.prefix else prefix
        state = query.abstract_state
        return prefix + query.key, None if state is None else prefix + state

    @property
    def _free_places(self) -> int:
        return max(0, self.max_in_flight - len(self._tickets))

    @property
    def _may_ask(self) -> bool:
        """Whether a step may ask: not beyond ``max_in_flight``, nor a server fallen silent."""
        with self._lock:
            oldest = self._tickets.oldest_s
            silent = oldest > 0.0 and oldest > 2.0 * self.counters.latency(0.95)
            return not silent and self._end is None and self._free_places > 0

    # ---- paying and asking ----

    def _buy(self, queries: Sequence[Query]) -> dict[str, Reply]:
        """Pay for a question about each situation and ask it; return the replies by key."""
        self._check()
        unique: dict[str, Query] = {}
        for query in queries:
            unique.setdefault(query.key, query)
        questions = []
        for query in unique.values():
            try:
                questions.append((query, query.request()))
            except AdviceError as error:
                self.count_error(error)
                self.policy.observe_result(ok=False, lasting=None)
        places = self._free_places if self.mode == "async" else len(questions)
        if beyond := max(0, len(questions) - places):
            self._record("in_flight", f"max_in_flight={self.max_in_flight} is reached", beyond)
        tickets = self._pay(questions[:places])
        if tickets:
            self._ask(tickets)
        replies = dict.fromkeys(unique, Reply())
        with self._lock:
            for ticket in tickets:
                lost = ticket.done and ticket.answer is None
                if self.mode == "async" and ticket.answer is not None:
                    self.counters.late -= 1  # it came within the step after all
                    self.counters.in_time += 1
                advice_id = 0 if lost and self.mode == "blocking" else ticket.advice_id
                replies[ticket.request.cache_key] = Reply(advice_id, ticket.answer)
        return replies

    def _pay(self, questions: Sequence[tuple[Query, AdviceRequest]]) -> list[Ticket]:
        """Spend a call for each question, as far as the budget goes."""
        try:
            with patience(_PAY_WAIT_S[self.mode]):
                paid = self.budget.spend_up_to(len(questions)) if questions else 0
        except StoreError as error:
            # What cannot be entered into the ledger is not asked.
            self._record(error.kind, str(error), len(questions))
            self.policy.observe_result(ok=False, lasting=None)
            return []
        if beyond := len(questions) - paid:
            self._record("budget", f"{beyond} questions beyond the budget", beyond)
        with self._lock:
            self.counters.calls += paid
            tickets = [
                Ticket(self._last_id + number, request, *self._keys(query))
                for number, (query, request) in enumerate(questions[:paid], 1)
            ]
            self._last_id += paid
            self._tickets.add(tickets)
        return tickets

    def _ask(self, tickets: Sequence[Ticket]) -> None:
        """Ask a batch of questions, and in blocking mode wait for their answers."""
        if self.mode == "async":
            self._loop().submit(self._serve(tickets))
            return
        future = self._waited_for = self._loop().submit(self._attempt(tickets))
        if self._end is not None:
            future.cancel()
        result: Any = StoppedError("The run is being stopped.")
        try:
            result = future.result(self.timeout_s + _GRACE_S)
        except CancelledError:
            pass
        except TimeoutError as error:
            # The advisor blocks its loop: abandon both and start new ones next time.
            result = error
            self._abandon_loop()
        except BaseException as error:
            self._fatal = error  # raised in this thread, such as by the handler of a signal
        future.cancel()
        self._settle(tickets, result)
        self._check()

    async def _attempt(self, tickets: Sequence[Ticket]) -> Any:
        """Return the advisor's answers, or what it raised."""
        try:
            async with asyncio.timeout(self.timeout_s):
                answers = self.advisor.advise([ticket.request for ticket in tickets])
                if not inspect.isawaitable(answers):
                    return FatalAdviceError(
                        f"{type(self.advisor).__name__}.advise() returned "
                        f"{type(answers).__name__} instead of something to await: define it with "
                        "`async def`."
                    )
                return await answers
        except BaseException as error:
            # An exit raised inside a task would end the loop without waking the caller.
            return error

    async def _serve(self, tickets: Sequence[Ticket]) -> None:
        """Ask a batch that nobody waits for."""
        self._settle(tickets, await self._attempt(tickets))

    def _settle(self, tickets: Sequence[Ticket], result: Any) -> None:
        """Keep and count what came of a batch; :meth:`_check` raises what is fatal."""
        if tickets[0].done and isinstance(result, asyncio.CancelledError):
            return
        try:
            outcome = self._keep(tickets, result)
        except BaseException as error:
            # In async mode nobody awaits this: the run's own thread raises it at its next call.
            outcome = Outcome([None] * len(tickets), fatal=error)
        with self._lock:
            if tickets[0].done:
                # Given up, and counted as lost; the cache has the answer all the same.
                self.counters.refund(outcome.refunded)
                return
            self._fatal = self._fatal or outcome.fatal
            late = self.mode == "async"
            self.counters.add(outcome, latency_s=tickets[0].age_s, late=late)
            for ticket, found in zip(tickets, outcome.results, strict=True):
                self._tickets.finish(ticket, found if isinstance(found, Advice) else None)
            self._finished.notify_all()

    @patience(_KEEP_WAIT_S)
    def _keep(self, tickets: Sequence[Ticket], result: Any) -> Outcome:
        """Put usable answers into the cache, their cost into the ledger."""
        requests = [ticket.request for ticket in tickets]
        try:
            outcome = judge(requests, result)
        except Exception as error:  # of a class of the advisor's, such as in its __str__
            kind = type(error).__name__
            outcome = judge(requests, error_of_kind(kind, "the answer cannot be read"))
        # First the answers: a kill in between forgets some tokens rather than paid advice.
        for ticket, result in zip(tickets, outcome.results, strict=True):
            if isinstance(result, Advice):
                with self._storing():
                    self.cache.put(ticket.cache_key, result, abstract_state=ticket.abstract_state)
                self._tell_policy(None)
            elif result is not None:
                if result.final:
                    self.cache.close(ticket.cache_key)
                refunded = 0
                # A call that no server saw is given back.
                if result.sending is not Sending.DONE:
                    with self._storing():
                        refunded = self.budget.refund(sent=result.sending is Sending.TRIED)
                outcome.refunded += refunded
                self._tell_policy(result, free=bool(refunded))
        if outcome.usage != Usage():
            with self._storing():
                self.budget.settle(outcome.usage)
            with self._lock:
                self.counters.usage += outcome.usage
        return outcome

    def _tell_policy(self, failure: AdviceError | None, *, free: bool = False) -> None:
        """Tell the policy how a call ended, and the log when an outage begins or ends."""
        outage = self.policy.outage
        was_out, steps = outage.out, outage.steps
        lasting = None if failure is None else failure.lasting
        self.policy.observe_result(ok=failure is None, lasting=lasting, free=free)
        if outage.out and not was_out:
            torchrl_logger.warning(
                f"Advice stops ({failure.kind}): {shown(str(failure), 500).rstrip('.')}. The "
                "run goes on without it. The advisor is tried again with one call after "
                f"{outage.left} environment steps, then at growing intervals."
            )
        elif was_out and not outage.out:
            torchrl_logger.warning(
                f"Advice is back after {steps} environment steps: the advisor answers again."
            )
        if outage.out and failure is not None:
            # One line tells of an outage, whatever its calls failed of.
            with self._lock:
                self.counters.logged.add(failure.kind)

    def count_error(self, error: AdviceError) -> None:
        """Count a question that could not be put, and warn of the first one of its kind."""
        self._record(error.kind, str(error), 1)

    def _record(self, kind: str, message: str, count: int) -> None:
        with self._lock:
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

    # ---- what came of the questions ----

    def question(self, advice_id: int) -> AdviceRequest | None:
        """Return a question in flight, or one of the last 1,024, by its number."""
        with self._lock:
            ticket = self._tickets[advice_id]
            return None if ticket is None else ticket.request

    def answers(self, advice_ids: Iterable[int]) -> dict[int, Advice | None]:
        """Return the answers to questions that are no longer in flight, by their numbers.

        The answer is ``None`` for a question that was lost, or answered more than 1,024
        questions ago. Raises a :class:`FatalAdviceError` as :meth:`step` does.
        """
        self._check()
        with self._lock:
            tickets = {advice_id: self._tickets[advice_id] for advice_id in advice_ids}
            done = {n: ticket for n, ticket in tickets.items() if ticket is None or ticket.done}
            return {n: None if ticket is None else ticket.answer for n, ticket in done.items()}

    def _check(self) -> None:
        """Abandon a loop that its advisor blocks, and raise what an async question raised."""
        with self._lock:
            if self._tickets.oldest_s > self.timeout_s + _GRACE_S:
                blocked = TimeoutError("the advisor blocks its event loop")
                self._settle(self._tickets.in_flight(), blocked)
                self._abandon_loop()
            error, self._fatal = self._fatal, None
        if error is not None:
            raise error

    def drain(self, timeout_s: float) -> int:
        """Wait at most so long for the questions in flight; return how many still are."""
        deadline = time.monotonic() + timeout_s
        if self._end is not None:
            deadline = min(deadline, self._end)
        with self._lock:
            while len(self._tickets) and (left := deadline - time.monotonic()) > 0:
                self._finished.wait(left)
            return len(self._tickets)

    # ---- the advisor's thread ----

    def stop_asking(self) -> None:
        """Ask nothing more, and give up what a step waits for; safe within a signal handler.

        From then on :meth:`drain` waits a second in all.
        """
        self._end = time.monotonic() + _LAST_S
        if self._waited_for is not None:
            self._waited_for.cancel()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Close advisor, thread and store, within ``drain_s`` and about two seconds.

        What is in flight after ``drain_s`` is lost. A later question starts them again.
        """
        self.drain(drain_s)
        with self._lock:
            self.counters.lost += len(self._tickets.give_up())
            worker, self._worker = self._worker, None
        if worker is not None:
            self._stop(worker)
        if self.cache.store is not None:
            self.cache.store.close()

    def _stop(self, worker: EventLoopThread) -> None:
        aclose = getattr(self.advisor, "aclose", None)
        if aclose is not None and worker.usable:
            try:
                # In the loop that its connections belong to.
                worker.submit(aclose()).result(_CLOSE_S)
            except Exception as error:
                torchrl_logger.warning(
                    f"The advisor did not close within {_CLOSE_S:g} s or failed to "
                    f"({type(error).__name__}); its connections end with the process."
                )
        worker.stop()

    def _loop(self) -> EventLoopThread:
        if self._worker is None or not self._worker.usable:
            self._worker = EventLoopThread()
            weakref.finalize(self, self._worker.stop)
        return self._worker

    def _abandon_loop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop(wait=False)

    # ---- progress ----

    def stats(self) -> dict[str, float]:
        """Return the counters of the run so far, all as ``float``.

        ``calls`` were made by this service: ``in_time`` for the step that asked, ``late``
        (both together ``answered``), ``lost`` (``failed``, or given up at a close or resume)
        or ``in_flight``. ``refunded`` ones reached no server and are no calls.
        """
        with self._lock:
            counters, in_flight = self.counters.stats(), len(self._tickets)
        cache = self.cache
        found = cache.hits + cache.shared_hits
        return {
            **counters,
            "in_flight": float(in_flight),
            "cache_hits": float(cache.hits),
            "cache_misses": float(cache.misses),
            "cache_shared_hits": float(cache.shared_hits),
            "noops_filtered": float(cache.noops_filtered),
            "hit_rate": found / max(1, found + cache.misses),
            **self.policy.stats(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all progress, the advisor's own included, as JSON-able types."""
        with self._lock:
            state: dict[str, Any] = {
                "counters": self.counters.state_dict(),
                "in_flight": len(self._tickets),
                "last_id": self._last_id,
            }
        # After the counters: an answer that lands in between is counted as lost, and kept.
        state |= {"budget": self.budget.state_dict(), "policy": self.policy.state_dict()}
        with self._storing():
            self.cache.pull()
        state["cache"] = self.cache.state_dict()
        if hasattr(self.advisor, "state_dict"):
            state |= {"advisor": self.advisor.state_dict(), "advisor_kind": self._advisor_kind()}
        return state

    def _advisor_kind(self) -> str:
        return f"{_kind(self.advisor)} {getattr(self.advisor, 'cache_prefix', '')}".strip()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all progress.

        What was in flight then is lost: paid for, never answered. What a killed process has paid
        for since is in a durable ledger alone. An advisor of another kind or ``cache_prefix`` than
        the saved one starts fresh, with a warning.
        """
        self.restored = True
        self.budget.load_state_dict(state["budget"])
        self.policy.load_state_dict(state["policy"])
        self.cache.load_state_dict(state["cache"])
        with self._lock:
            self._tickets.give_up()
            self._tickets = TicketTable()
            self.counters.load_state_dict(state["counters"])
            self.counters.lost += state["in_flight"]
            self._last_id = state["last_id"]
        if "advisor" not in state or not hasattr(self.advisor, "load_state_dict"):
            return
        found, saved = self._advisor_kind(), state["advisor_kind"]
        if found == saved:
            self.advisor.load_state_dict(state["advisor"])
        else:
            torchrl_logger.warning(f"The advisor was {saved} and is {found}: it starts fresh.")


def _kind(advisor: Any) -> str:
    """Name the classes of an advisor and of those that it wraps; a recorder is none of them."""
    if isinstance(advisor, RecordingAdvisor):
        return _kind(advisor.advisor)
    parts = getattr(advisor, "__dict__", {})
    inner = [parts[name] for name in ("advisor", "before", "after") if name in parts]
    return "/".join((type(advisor).__name__, *map(_kind, inner)))
