"""What an advisor is asked, and what it answers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from lore_torchrl.advisors.errors import AdviceError, MalformedError, NotFiniteError, Usage

_LARGEST_LOGIT = 1e30
LONGEST_PLAN = 64


@dataclass(frozen=True, slots=True)
class AdviceRequest:
    """One question to an advisor.

    Args:
        description: What the agent sees, as text. Two situations that deserve the
            same advice have the same text.
        actions: Names of the actions, in the order of the logits asked for.
        cache_key: Canonical, short form of the situation. Equal keys share advice.
        facts: Structured form of the same information, for advisors that compute
            rather than read (planners). Holds nothing that ``description`` hides.
        image: The observation as a PNG, for models that see. Default: ``None``.
        action_meanings: What each action does, in their order; empty where the names
            say enough. Default: empty.
        mission: The task in words. Default: empty.
        abstract_state: Key of the abstract state that the situation belongs to; situations
            with equal ones may share advice. Default: ``None``, not known.
        subgoals: Names that an answer's ``subgoal`` may have. Default: empty.
    """

    description: str
    actions: tuple[str, ...]
    cache_key: str
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    image: bytes | None = None
    action_meanings: tuple[str, ...] = ()
    mission: str = ""
    abstract_state: str | None = field(default=None, compare=False)
    subgoals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """One answer: a preference over the actions and how sure the advisor is.

    Args:
        logits: One finite number for each action, unnormalized, in the request's order; at
            most 1e30 in size. A list, an array or a tensor will do.
        confidence: The advisor's own confidence, from 0 to 1. Default: ``1.0``.
        usage: What the answer cost. Default: nothing.
        raw: The answer as it came, for recordings and for people. Default: empty.
        plan: Indices of the actions to take from here on, the first one for this situation; at
            most 64. Default: empty, no plan.
        subgoal: Name of what to reach next. Default: empty, none.
        valid: Whether each action is of any use here. Default: empty, nothing is said.

    Raises:
        AdviceError: If a logit is not such a number, there are none, the confidence lies outside
            0 to 1, the plan names no action of these, ``valid`` is not about these actions, or
            something is of another type.
    """

    logits: tuple[float, ...]
    confidence: float = 1.0
    usage: Usage = field(default_factory=Usage, compare=False, repr=False)
    raw: str = field(default="", compare=False, repr=False)
    plan: tuple[int, ...] = ()
    subgoal: str = ""
    valid: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        self._convert("logits", float)
        self._convert("plan", operator.index)
        self._convert("valid", _flag)
        try:
            object.__setattr__(self, "confidence", float(self.confidence))
        except Exception as error:
            raise MalformedError(f"Advice with confidence={self.confidence!r}: {error}.") from error
        if not self.logits:
            raise MalformedError("Advice needs at least one logit.")
        if not all(abs(value) <= _LARGEST_LOGIT for value in self.logits):
            raise NotFiniteError(
                f"Advice logits must be finite, {_LARGEST_LOGIT:g} at most, got {self.logits}."
            )
        if not 0.0 <= self.confidence <= 1.0:
            raise MalformedError(f"Advice confidence must lie in [0, 1], got {self.confidence}.")
        count = len(self.logits)
        if len(self.plan) > LONGEST_PLAN or not all(0 <= step < count for step in self.plan):
            raise MalformedError(
                f"An advice's plan must be at most {LONGEST_PLAN} indices below {count}, got "
                f"{self.plan[: LONGEST_PLAN + 1]}."
            )
        if len(self.valid) not in (0, count):
            raise MalformedError(f"Advice is valid for {len(self.valid)} actions of {count}.")
        for name, kind in (("subgoal", str), ("raw", str), ("usage", Usage)):
            if not isinstance(value := getattr(self, name), kind):
                raise MalformedError(
                    f"An advice's {name} must be a {kind.__name__}, got {value!r}."
                )

    def _convert(self, name: str, kind: Callable[[Any], Any]) -> None:
        """Make a tuple of plain Python values of a list, an array or a tensor."""
        values = getattr(self, name)
        try:
            if isinstance(values, str | bytes | Mapping | Set):
                raise TypeError("not a list, an array or a tensor")
            object.__setattr__(self, name, tuple(map(kind, values)))
        except Exception as error:
            raise MalformedError(f"Advice with {name}={values!r}: {error}.") from error

    def extras(self) -> dict[str, Any]:
        """Return plan, subgoal and valid actions, as far as there are any, as JSON holds them."""
        found = {"plan": list(self.plan), "subgoal": self.subgoal, "valid": list(self.valid)}
        return {name: value for name, value in found.items() if value}

    def slim(self) -> Advice:
        """Return the same without the raw text, which may be megabytes, and the cost."""
        return replace(self, raw="", usage=Usage())


def _flag(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{value!r} is neither true nor false")
    return bool(value)


def read_extras(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an :class:`Advice`'s keywords from what :meth:`Advice.extras` gave; others are left.

    Raises:
        MalformedError: If one is of another type.
    """
    kinds = {"plan": int, "valid": bool}
    found: dict[str, Any] = {}
    for name, kind in kinds.items():
        listed = values.get(name) or ()
        if not isinstance(listed, list | tuple) or not all(type(one) is kind for one in listed):
            raise MalformedError(f"{name} must be a list of {kind.__name__}.")
        found[name] = tuple(listed)
    found["subgoal"] = values.get("subgoal") or ""
    if not isinstance(found["subgoal"], str):
        raise MalformedError("subgoal must be text.")
    return {name: value for name, value in found.items() if value}


def check(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise a ``ValueError`` that names a setting, its value and what it must be."""
    if not condition:
        raise ValueError(f"{name}={value!r} is impossible: {rule}.")


@runtime_checkable
class Advisor(Protocol):
    """Anything that answers a batch of requests.

    The answers come in the order of the requests: ``None`` where the advisor has nothing to
    say, so that the same is not asked again, an :class:`AdviceError` for a request which failed
    on its own. An advisor may also raise, which fails the whole batch.
    """

    async def advise(self, requests: Sequence[AdviceRequest]) -> list[Advice | AdviceError | None]:
        """Answer each request, or say why not."""
        ...


class Wrapper:
    """Passes what it does not have on to the wrapped advisor."""

    advisor: Advisor

    def __getattr__(self, name: str) -> Any:
        # Before __init__ has set it (copy, pickle) there is nothing to look through.
        if name == "advisor" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.advisor, name)


@runtime_checkable
class Describer(Protocol):
    """Turns one row of an environment's output into questions for an advisor.

    ``observation`` maps each of :attr:`in_keys` to that row's value: a numpy array
    for tensors, a ``str`` for text. ``row`` names the environment within the batch;
    :meth:`observe` is called once for each new observation of it, before :meth:`cache_key`
    and :meth:`request`.

    For subgoals a describer also has ``subgoals``, their names, and ``reached(row, observation)``,
    the set of those that are true of this observation, by what the agent sees in it alone.
    For programs (:mod:`lore_torchrl.sandbox`) a describer also has ``program_view(row,
    observation)``, what it tells as plain Python data, and ``program_fields``, the meaning of
    each name in it.

    For continuous actions, a describer also has ``anchors``: the action ``[A]`` that each of
    its names means. :meth:`observe` then gets the index of the nearest one.
    """

    in_keys: Sequence[str]
    actions: tuple[str, ...]

    def observe(
        self, row: int, observation: Mapping[str, Any], action: int | None, *, reset: bool
    ) -> None:
        """Take note of a new observation, reached by ``action`` (``None`` after a reset)."""
        ...

    def cache_key(self, row: int, observation: Mapping[str, Any]) -> str:
        """Return the key of the situation; called every step, so it must be cheap."""
        ...

    def request(self, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
        """Return the full question; called only when the advisor will be asked."""
        ...


def question_of(describer: Describer, row: int, observation: Mapping[str, Any]) -> AdviceRequest:
    """Return a describer's question, with the abstract state of the situation where it has one.

    Raises:
        TypeError: If its ``request()`` returns something else.
        ValueError: If the question has another key than its ``cache_key()``, or other actions.
    """
    request, name = describer.request(row, observation), type(describer).__name__
    if not isinstance(request, AdviceRequest):
        raise TypeError(f"{name}.request() must return an AdviceRequest, got {request!r}.")
    key = describer.cache_key(row, observation)
    if request.cache_key != key:
        raise ValueError(
            f"{name}: the request's cache_key {request.cache_key!r} is not what cache_key() "
            f"gives, {key!r}: the answer would never be found again."
        )
    if tuple(request.actions) != tuple(describer.actions):
        raise ValueError(
            f"{name}: the request's actions {request.actions} are not its own, "
            f"{describer.actions}: an answer would be read as about other actions."
        )
    if not hasattr(describer, "abstract_state"):
        return request
    return replace(request, abstract_state=describer.abstract_state(row, observation))
