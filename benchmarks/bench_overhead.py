"""What LoRe costs: learner update and policy step, LoRe over stock, in one process.

Run from the project's root, on an otherwise idle machine::

    python benchmarks/bench_overhead.py --compile

Stock and LoRe take turns, call by call, in random order, so that both see the same
machine. Each ratio is the median over rounds of (LoRe's median / stock's median within
the round), with a 95% bootstrap interval over rounds. Half of the rows carry advice.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from lore_torchrl.configs import DreamerConfig, LoReConfig
from lore_torchrl.dreamer.agent import build_agent
from lore_torchrl.dreamer.learner import build_learner, build_lore_actor

TARGETS = {"learner_update": 1.05, "policy_step": 1.10, "policy_compiled": 1.10}
OBSERVATION_DIM, NUM_ACTIONS = 1033, 7


def _advice(shape: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    best = torch.randint(NUM_ACTIONS, shape, device=device)
    return {
        "llm_prior_logits": 3.0 * torch.nn.functional.one_hot(best, NUM_ACTIONS).float(),
        "llm_confidence": torch.ones(*shape, 1, device=device),
        "llm_mask": torch.rand(*shape, 1, device=device) < 0.5,
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
                **_advice(shape, device),
            },
        },
        shape,
        device=device,
    )


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
    stock: Callable[[], None], lore: Callable[[], None], *, rounds: int, calls: int, sync: bool
) -> dict[str, float]:
    """Time both in turns and return medians in ms, their ratio and its interval."""
    ratios, medians = [], {"stock": [], "lore": []}
    order = ["stock", "lore"] * calls
    functions = {"stock": stock, "lore": lore}
    for round_index in range(rounds + 1):
        random.shuffle(order)
        times = {"stock": [], "lore": []}
        for name in order:
            start = time.perf_counter()
            functions[name]()
            if sync:
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
        if round_index:  # the first round warms up
            middle = {name: statistics.median(values) for name, values in times.items()}
            ratios.append(middle["lore"] / middle["stock"])
            for name, value in middle.items():
                medians[name].append(1000 * value)
    generator = np.random.default_rng(0)
    draws = generator.choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return {
        "stock_ms": statistics.median(medians["stock"]),
        "lore_ms": statistics.median(medians["lore"]),
        "ratio": statistics.median(ratios),
        "ratio_low": float(low),
        "ratio_high": float(high),
    }


def main() -> None:
    """Measure, print a table and, with ``--json``, one line for machines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--envs", type=int, default=4, help="rows of a policy step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--updates", type=int, default=6, help="updates of each in a round")
    parser.add_argument("--steps", type=int, default=100, help="policy steps of each in a round")
    parser.add_argument(
        "--compile", action="store_true", help="also with LoReActor.compile_decision()"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)
    device = torch.device(args.device)
    dreamer, lore = DreamerConfig(), LoReConfig()

    def build(with_lore: bool):
        agent = build_agent(
            dreamer, observation_dim=OBSERVATION_DIM, num_actions=NUM_ACTIONS, device=device
        )
        actor = build_lore_actor(lore, agent, device=device) if with_lore else None
        learner = build_learner(
            dreamer, agent, lore=lore if with_lore else None, lore_actor=actor, device=device
        )
        sample = _sample(dreamer, device)
        if any(learner.stepper.resolve(device)):
            learner.stepper.warmup(sample.clone())
        policy = agent.policy(actor)
        observation = _observation(dreamer, args.envs, device)

        def act() -> None:
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                policy(observation.copy())

        return lambda: learner.stepper.step(None, sample.clone()), act, actor

    stock_update, stock_act, _ = build(False)
    lore_update, lore_act, lore_actor = build(True)
    sync = device.type == "cuda"
    results = {
        "learner_update": compare(
            stock_update, lore_update, rounds=args.rounds, calls=args.updates, sync=sync
        ),
        "policy_step": compare(
            stock_act, lore_act, rounds=args.rounds, calls=args.steps, sync=sync
        ),
    }
    if args.compile:
        lore_actor.compile_decision()
        results["policy_compiled"] = compare(
            stock_act, lore_act, rounds=args.rounds, calls=args.steps, sync=sync
        )
    print(f"{'':16s}{'stock ms':>10s}{'LoRe ms':>10s}{'ratio':>8s}{'95% interval':>18s}  target")
    for name, r in results.items():
        verdict = "met" if r["ratio"] <= TARGETS[name] else "missed"
        print(
            f"{name:16s}{r['stock_ms']:10.3f}{r['lore_ms']:10.3f}{r['ratio']:8.3f}"
            f"{r['ratio_low']:10.3f}-{r['ratio_high']:.3f}  <= {TARGETS[name]:.2f} {verdict}"
        )
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
