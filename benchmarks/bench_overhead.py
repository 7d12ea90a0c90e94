"""What LoRe costs: learner update and policy step, LoRe over stock, in one process.

Run from the project's root, on an otherwise idle machine::

    python benchmarks/bench_overhead.py --compile
    python benchmarks/bench_overhead.py --variants default everything

Stock and every variant take turns, call by call, in random order, so that all see the same
machine. Each ratio is the median over rounds of (the variant's median / stock's median
within the round), with a 95% bootstrap interval over rounds. Half of the rows carry advice.
A variant that is named for one part has gate, mixer and actor loss, and that part; ``everything``
has all of these parts but the channels: ``action mask``, ``value gate``, and ``features``, which is
stock DreamerV3 with features. What costs a few scalars is off: hysteresis, warm-up and dropout of
the gate, and a schedule of the constraint. The bandit's own update, once a collector batch, is in
neither.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.envs.utils import ExplorationType, set_exploration_type

from lore_torchrl import keys
from lore_torchrl.configs import (
    BanditConfig,
    DreamerConfig,
    FeaturesConfig,
    GateConfig,
    LoReConfig,
    LossConfig,
    MixerConfig,
    PriorNetConfig,
    TemperatureConfig,
)
from lore_torchrl.dreamer.agent import build_agent
from lore_torchrl.dreamer.learner import build_learner
from lore_torchrl.lore import LoRe
from ratios import paired_ratios

OBSERVATION_DIM, NUM_ACTIONS = 1033, 7


def _with(**parts: object) -> LoReConfig:
    """Gate, mixer and actor loss, and the parts given."""
    return LoReConfig(**{"bandit": BanditConfig(enabled=False), **parts})


IMAGINATION = {"beta_imagine_max": 0.25}
PAPER = {"prior_weight": 1.0, "multiplier_lr": 1e-3}
TERMS = {"bonus_weight": 0.1, **PAPER}
PRIOR_NET = PriorNetConfig(enabled=True)
ALIGNED = TemperatureConfig(rate=0.01)
ALL_GATE = GateConfig(disagreement_weight=0.3, value_weight=0.3, value_source="ensemble")
MOST = {"gate": ALL_GATE, "temperature": ALIGNED, "prior_net": PRIOR_NET}
VARIANTS = {
    "mixing": _with(),
    "prior_net": _with(prior_net=PRIOR_NET),
    "bandit": _with(bandit=BanditConfig()),
    "disagreement": _with(gate=GateConfig(disagreement_weight=0.3)),
    "value_variance": _with(gate=GateConfig(value_weight=0.3)),
    "value_ensemble": _with(gate=GateConfig(value_weight=0.3, value_source="ensemble")),
    "imitation of the batch": _with(imitation_ratio=0),
    "imitation ratio 8": _with(imitation_ratio=8),
    "paper": _with(loss=LossConfig(imitation_weight=0.0, **PAPER)),
    "distillation": _with(loss=LossConfig(multiplier_init=0.3, multiplier_max=0.3, delta=0.0)),
    "bonus": _with(loss=LossConfig(bonus_weight=TERMS["bonus_weight"])),
    "temperature": _with(temperature=ALIGNED),
    "imagination": _with(prior_net=PRIOR_NET, loss=LossConfig(**IMAGINATION)),
    "action mask": _with(mixer=MixerConfig(action_mask=True)),
    "value gate": _with(mixer=MixerConfig(value_temperature=0.1)),
    "features": LoReConfig(enabled=False, features=FeaturesConfig(enabled=True)),
    "default": LoReConfig(),
    "all but imagination": LoReConfig(**MOST, loss=LossConfig(**TERMS)),
    "everything": LoReConfig(**MOST, loss=LossConfig(**TERMS, **IMAGINATION)),
}
# Upper bounds on the ratio to stock.
TARGETS = {
    "learner update": {"features": 1.05, "default": 1.03, "everything": 1.15},
    "policy step": {"mixing": 1.10, "default": 1.25},
    "policy step, compiled": {"mixing": 1.10},
}


def _advice(shape: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    best = torch.randint(NUM_ACTIONS, shape, device=device)
    return {
        "llm_prior_logits": 3.0 * torch.nn.functional.one_hot(best, NUM_ACTIONS).float(),
        "llm_confidence": torch.ones(*shape, 1, device=device),
        "llm_mask": torch.rand(*shape, 1, device=device) < 0.5,
        keys.ACTION_MASK: torch.rand(*shape, NUM_ACTIONS, device=device) < 0.5,
        keys.FEATURES: torch.randn(*shape, FeaturesConfig().columns, device=device),
        keys.FEATURES_MASK: torch.ones(*shape, 1, dtype=torch.bool, device=device),
    }


def _sample(config: DreamerConfig, device: torch.device) -> TensorDict:
    shape = (config.batch_size, config.seq_len)
    state = config.num_categoricals * config.num_classes
    action = torch.randint(NUM_ACTIONS, shape, device=device)
    return TensorDict(
        {
            "action": torch.nn.functional.one_hot(action, NUM_ACTIONS),
            "is_init": torch.rand(*shape, 1, device=device) < 0.05,
            "state": torch.zeros(*shape, state, device=device),
            "belief": torch.zeros(*shape, config.belief_dim, device=device),
            "next": {
                "observation": (torch.rand(*shape, OBSERVATION_DIM, device=device) < 0.05).float(),
                "reward": (torch.rand(*shape, 1, device=device) < 0.05).float(),
                "done": torch.rand(*shape, 1, device=device) < 0.05,
                "terminated": torch.rand(*shape, 1, device=device) < 0.05,
                keys.RETURN: torch.rand(*shape, 1, device=device),
                **_advice(shape, device),
            },
        },
        shape,
        device=device,
    )


def _imitated(config: DreamerConfig, steps: int, device: torch.device) -> TensorDict:
    """Steps to imitate, ``steps`` for each record of the batch."""
    names = ("state", "belief", "action")
    parts = [_sample(config, device).select(*names) for _ in range(steps)]
    stored = torch.stack(parts, 2)
    for name in ("state", "belief"):
        stored.set(name, torch.randn_like(stored.get(name)))
    weight = torch.rand(*stored.batch_size, 1, device=device)
    stored.set(keys.IMITATION_LIMIT, torch.full_like(weight, 0.5))
    return stored.set(keys.IMITATION_WEIGHT, weight)


def _observation(config: DreamerConfig, rows: int, device: torch.device) -> TensorDict:
    state = config.num_categoricals * config.num_classes
    return TensorDict(
        {
            "observation": (torch.rand(rows, OBSERVATION_DIM, device=device) < 0.05).float(),
            "is_init": torch.zeros(rows, 1, dtype=torch.bool, device=device),
            "state": torch.zeros(rows, state, device=device),
            "belief": torch.zeros(rows, config.belief_dim, device=device),
            "previous_action": torch.zeros(rows, NUM_ACTIONS, device=device),
            **_advice((rows,), device),
        },
        [rows],
        device=device,
    )


def compare(
    functions: dict[str, Callable[[], None]],
    *,
    rounds: int,
    calls: int,
    sync: bool,
    baseline: str = "stock",
) -> dict[str, dict[str, float]]:
    """Time all in turns; return the median in ms and the ratio to a baseline, with interval."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions) * calls
    for round_index in range(rounds + 1):
        random.shuffle(order)
        spent: dict[str, list[float]] = {name: [] for name in functions}
        for name in order:
            start = time.perf_counter()
            functions[name]()
            if sync:
                torch.cuda.synchronize()
            spent[name].append(time.perf_counter() - start)
        if round_index:  # the first round warms up
            for name, values in spent.items():
                times[name].append(1000 * statistics.median(values))
    return paired_ratios(times, baseline)


class Operations(TorchDispatchMode):
    """Counts the tensor operations of a ``with`` block."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count one and run it."""
        self.number += 1
        return function(*args, **(kwargs or {}))


class Nobody:
    """Advisor without an answer: the advice is drawn, and nobody is asked."""

    async def advise(self, requests):
        """Answer nothing."""
        return [None] * len(requests)


def build(lore: LoReConfig | None, device: torch.device, envs: int, dreamer: DreamerConfig):
    """Build an agent; return its update, its policy step and its acting mixture."""
    agent = build_agent(
        dreamer,
        observation_dim=OBSERVATION_DIM,
        num_actions=NUM_ACTIONS,
        features_dim=lore.features.columns if lore and lore.features.enabled else None,
        device=device,
    )
    around = None
    observation = _observation(dreamer, envs, device)
    if lore is not None and lore.enabled:
        around = LoRe(
            lore,
            actor=agent.actor,
            value=agent.value,
            advisor=Nobody(),
            describer=SimpleNamespace(actions=[str(i) for i in range(NUM_ACTIONS)]),
            latent_sizes=(agent.state_dim, agent.belief_dim),
            world=agent.world,
        )
        if around.bandit is not None:
            observation.set(keys.COEFFICIENT, torch.zeros(envs, 1, device=device))
            observation.set("step_count", torch.ones(envs, 1, dtype=torch.long, device=device))
    learner = build_learner(dreamer, agent, lore=around, device=device)
    sample = _sample(dreamer, device)
    if around is not None and lore.imitation_ratio:
        sample.set(keys.IMITATION, _imitated(dreamer, lore.imitation_ratio, device))
    if any(learner.stepper.resolve(device)):
        learner.stepper.warmup(sample.clone())
    policy = agent.policy(*([] if around is None else around.policy_modules()))

    def act() -> None:
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            policy(observation.copy())

    actor = None if around is None else around.actor
    return lambda: learner.stepper.step(None, sample.clone()), act, actor


def main() -> None:
    """Measure, print a table and, with ``--json``, one line for machines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--envs", type=int, default=4, help="rows of a policy step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--updates", type=int, default=6, help="updates of each in a round")
    parser.add_argument("--steps", type=int, default=100, help="policy steps of each in a round")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument(
        "--compile", action="store_true", help="also with LoReActor.compile_decision()"
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="on CUDA, neither compile nor capture the update (by default it is both)",
    )
    parser.add_argument("--operations", action="store_true", help="count those of an update alone")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)
    device = torch.device(args.device)
    sync = device.type == "cuda"
    captured = False if args.eager else None
    dreamer = DreamerConfig(compile_train_step=captured, cudagraph=captured)
    configs = {"stock": None} | {name: VARIANTS[name] for name in args.variants}
    built = {name: build(lore, device, args.envs, dreamer) for name, lore in configs.items()}
    updates = {name: update for name, (update, _, _) in built.items()}
    steps = {name: act for name, (_, act, _) in built.items()}
    if args.operations:
        for name, update in updates.items():
            update()
            with Operations() as counted:
                update()
            print(f"{name:24s}{counted.number:10,d} tensor operations an update")
        return
    results = {
        "learner update": compare(updates, rounds=args.rounds, calls=args.updates, sync=sync),
        "policy step": compare(steps, rounds=args.rounds, calls=args.steps, sync=sync),
    }
    if args.compile:
        for _, _, actor in built.values():
            if actor is not None:
                actor.compile_decision()
        results["policy step, compiled"] = compare(
            steps, rounds=args.rounds, calls=args.steps, sync=sync
        )
    for what, table in results.items():
        print(f"{what:24s}{'ms':>10s}{'ratio':>8s}{'95% interval':>18s}  target")
        for name, r in table.items():
            target = TARGETS[what].get(name)
            verdict = ""
            if target is not None:
                verdict = f"<= {target:.2f} {'met' if r['ratio'] <= target else 'missed'}"
            print(
                f"  {name:22s}{r['median']:10.3f}{r['ratio']:8.3f}"
                f"{r['ratio_low']:10.3f}-{r['ratio_high']:.3f}  {verdict}"
            )
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
