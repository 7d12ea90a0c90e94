"""Ask an advisor once and tell everything about it, as text for a person."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor
from lore_torchrl.advisors.errors import AdviceError, safe_kind
from lore_torchrl.advisors.redaction import redact, remember, secrets_of, visible

_BAR = 40
_RAW = 4000
_ATTRIBUTES = {"mode": "chosen_mode", "requests": "requests_sent", "prompt hash": "prompt_hash"}


async def ask_once(advisor: Advisor, request: AdviceRequest) -> tuple[str, bool]:
    """Ask, and return the report and whether there was advice."""
    remember(*secrets_of(advisor))
    lines = ["Observation", "-----------", request.description, ""]
    started = time.perf_counter()
    try:
        answer = (await advisor.advise([request]))[0]
    except AdviceError as error:
        answer = error
    latency = time.perf_counter() - started
    if callable(getattr(advisor, "prompt", None)):
        # Of the mode that the server honored, which is known now.
        lines += ["Prompt", "------", str(advisor.prompt(request)), ""]
    if hasattr(advisor, "aclose"):
        await advisor.aclose()
    if answer is None:
        lines += ["The advisor has nothing to say here."]
    elif isinstance(answer, AdviceError):
        lines += ["Error", "-----", f"{safe_kind(answer.kind)}: {answer}"]
    else:
        if answer.raw:
            raw = redact(answer.raw, limit=_RAW)
            lines += ["Answer", "------", *map(visible, raw.splitlines()), ""]
        lines += ["Prior", "-----", *bars(request.actions, answer)]
    lines += ["", *_facts(request.actions, advisor, answer, latency)]
    return redact("\n".join(lines)), isinstance(answer, Advice)


def bars(actions: Sequence[str], advice: Advice) -> list[str]:
    r"""Return a line for each action: name, bar, probability and logit."""
    top = max(advice.logits)
    weights = [math.exp(value - top) for value in advice.logits]
    width = max(map(len, actions))
    lines = []
    for action, weight, logit in zip(actions, weights, advice.logits, strict=True):
        share = weight / sum(weights)
        bar = "#" * round(share * _BAR)
        lines.append(f"{action:{width}s}  {bar:{_BAR}s} {share:6.1%}  logit {logit:6.2f}")
    return lines


def _facts(
    actions: Sequence[str], advisor: Advisor, answer: Advice | AdviceError | None, latency: float
) -> list[str]:
    facts = {"latency": f"{latency:.3f} s"}
    if isinstance(answer, Advice):
        facts["confidence"] = f"{answer.confidence:.2f}"
        if answer.plan:
            facts["plan"] = ", ".join(actions[step] for step in answer.plan)
        if answer.subgoal:
            facts["subgoal"] = visible(answer.subgoal)
        if answer.valid:
            named = zip(actions, answer.valid, strict=True)
            facts["valid"] = ", ".join(name for name, valid in named if valid)
    if answer is not None:
        usage = answer.usage
        facts["tokens"] = f"{usage.prompt_tokens} read, {usage.completion_tokens} written"
        facts["cost"] = f"{usage.cost:.6f}"
    for name, attribute in _ATTRIBUTES.items():
        if hasattr(advisor, attribute):
            facts[name] = str(getattr(advisor, attribute) or "none found")[:16]
    return [f"{name:12s} {value}" for name, value in facts.items()]
