"""How the tests of the call policy let steps pass: three rows, and a call budget."""

from __future__ import annotations

from lore_torchrl.service import CallBudget, CallPolicy, StepSignals

ROWS = 3


def make_policy(total: int = 100, **config) -> CallPolicy:
    """Build a policy of its own budget."""
    return CallPolicy(CallBudget(total), **config)


def step(
    policy: CallPolicy, *, scores=(1.0,) * ROWS, candidates=range(ROWS), served=(), **seen
) -> list[int]:
    """Let one vector step pass as the service does it: choose, then spend."""
    signals = StepSignals(list(scores), **({"rewards": [0.0] * len(scores)} | seen))
    chosen = policy.choose(list(candidates), signals, served=served)
    policy.budget.spend(len(chosen))
    return chosen
