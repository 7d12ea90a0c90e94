"""What planning costs a policy step, and what seeding it with advice gains at equal compute.

Run from the project's root::

    python benchmarks/bench_planner.py
    python benchmarks/bench_planner.py --checkpoint outputs/my_run/checkpoints
    python benchmarks/bench_planner.py --rounds 0 --checkpoint outputs/my_run --episodes 100

A policy step of the default agent with the planner, over one with gate and mixer alone, in turns.
With ``--checkpoint`` the planner starts from replayed states of that run which have advice: the
table is the mean imagined return of its sequences after each number of refits, and the share of
states whose best first action is the answer's, for each seed, with as many sequences in each
iteration. With ``--episodes`` that agent plays so many held-out episodes too: by its policy, by the
mixture with its cached answers, at a temperature of 1 and at the run's, and with the planner's
advice in their place, started from each seed, always with as many sequences.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace

import torch

from bench_overhead import VARIANTS, build, compare
from lore_torchrl import keys
from lore_torchrl.configs import DreamerConfig, EvaluationConfig, PlannerConfig
from lore_torchrl.dreamer.acting import adapter_of
from lore_torchrl.dreamer.checkpoint import find_checkpoint, load_config
from lore_torchrl.dreamer.evaluation import evaluate
from lore_torchrl.dreamer.run import build_run
from lore_torchrl.envs.batch import close_env
from lore_torchrl.inspection.episodes import restore
from lore_torchrl.modules import LatentPlanner

SEEDS = ("uniform", "policy", "advice")


def time_steps(methods: list[str], envs: int, rounds: int, calls: int, device: torch.device):
    """Time policy steps; the ratio is to the same policy without a planner."""
    plain = VARIANTS["mixing"]
    variants = {m: replace(plain, planner=PlannerConfig(enabled=True, method=m)) for m in methods}
    functions = {}
    for name, lore in {"off": plain, **variants}.items():
        _, functions[name], _ = build(lore, device, envs, DreamerConfig())
    sync = device.type == "cuda"
    return compare(functions, rounds=rounds, calls=calls, sync=sync, baseline="off")


def compare_seeds(checkpoint: str, rows: int, refits: int, settings: PlannerConfig):
    """Plan from advised states of a run's replay; return score and agreement by seed."""
    path = find_checkpoint(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        config = replace(load_config(path), resume=str(path), output_dir=folder, record=None)
        config.logger.backends = []
        run = build_run(config)
        try:
            shape = config.dreamer.batch_size, config.dreamer.seq_len + 1
            batches = [run.replay_hook.replay.sample().reshape(shape) for _ in range(20)]
            agent, kind = run.agent, run.learner.loss.actor_loss.mixer.policy
        finally:
            run.close()
    # A record starts in the state that has seen the observation before it, and its advice.
    sample = torch.cat(batches)
    starts = sample[:, 1:].select("state", "belief")
    starts.update(sample[:, :-1]["next"].select(*keys.ADVICE_KEYS))
    advised = starts[(starts[keys.MASK] & ~sample["is_init"][:, 1:]).squeeze(-1)][:rows]
    answer = advised[keys.PRIOR_LOGITS].argmax(-1)
    results = {}
    for seed in SEEDS:
        torch.manual_seed(0)
        planner = LatentPlanner(
            agent.world,
            agent.actor,
            kind,
            **{**vars(settings), "seed": seed, "iterations": refits + 1},
        )
        plan = planner.plan(advised)
        best = planner.kind.as_advice(plan.policy).argmax(-1)
        results[seed] = {
            "scores": [plan.seed_score.mean().item()],
            "agrees": (best == answer).float().mean().item(),
        }
        for done in range(1, refits + 1):
            torch.manual_seed(0)
            planner.config.iterations = done + 1
            results[seed]["scores"].append(planner.plan(advised).score.mean().item())
    return len(advised), results


def play_held_out(checkpoint: str, episodes: int, choices: dict[str, PlannerConfig | None]):
    """Play the same held-out episodes by the policy, and by its mixture under each choice."""
    path = find_checkpoint(checkpoint)
    config = replace(load_config(path), record=None)
    # Nothing is asked, and a store that the run had is left alone.
    config.lore.calls.mode, config.lore.calls.store = "blocking", None
    adapter = adapter_of(config.env)
    agent, acting = restore(config, adapter, path)
    lore = acting.lore
    try:

        def play(actor: str) -> dict[str, float]:
            config.evaluation = EvaluationConfig(episodes=episodes, actor=actor)
            start = time.perf_counter()
            found = evaluate(config, adapter, agent, lore, programs=acting.programs)
            return {**found, "seconds": time.perf_counter() - start}

        found = {"policy": play("policy")}
        # A plan is not divided by the advisor's temperature: both ways to follow the answers.
        aligner, lore.actor.mixer.temperature = lore.actor.mixer.temperature, None
        found["answers, T = 1"] = play("mixture")
        lore.actor.mixer.temperature = aligner
        for name, settings in choices.items():
            lore.actor.planner = None
            if settings is not None:
                kind = lore.actor.mixer.policy
                lore.actor.planner = LatentPlanner(agent.world, agent.actor, kind, **vars(settings))
            found[name] = play("mixture")
        return found
    finally:
        lore.close()
        close_env(acting.env)


def main() -> None:
    """Measure, print the tables and, with ``--json``, one line for machines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--envs", type=int, default=4, help="rows of a policy step")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="policy steps of each in a round")
    parser.add_argument("--methods", nargs="*", default=["cem", "mppi"])
    parser.add_argument("--checkpoint", help="run whose world model is planned in")
    parser.add_argument("--rows", type=int, default=128, help="states that are planned from")
    parser.add_argument("--episodes", type=int, default=0, help="held-out episodes to play")
    parser.add_argument("--refits", type=int, default=3)
    parser.add_argument("--samples", type=int, default=PlannerConfig().samples)
    parser.add_argument("--temperature", type=float, default=PlannerConfig().temperature)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)
    device = torch.device(args.device)
    results = {}
    if args.rounds:
        results["step"] = time_steps(args.methods, args.envs, args.rounds, args.steps, device)
        for name, r in results["step"].items():
            interval = f"{r['ratio_low']:.1f}-{r['ratio_high']:.1f}"
            print(f"{name:8s} {r['median']:8.2f} ms   ratio {r['ratio']:6.1f}  {interval}")
    if args.checkpoint:
        for method in args.methods:
            shared = {"samples": args.samples, "temperature": args.temperature}
            settings = PlannerConfig(method=method, **shared)
            rows, seeds = compare_seeds(args.checkpoint, args.rows, args.refits, settings)
            results[method] = seeds
            print(
                f"{method}: mean imagined return from {rows} advised states after 0, 1, ... refits"
            )
            for seed, found in seeds.items():
                scores = "  ".join(f"{score:.3f}" for score in found["scores"])
                print(f"  {seed:8s} {scores}   first action is the answer's: {found['agrees']:.2f}")
        if args.episodes:
            choices = {"answers": None}
            for method in args.methods:
                shared = {"samples": args.samples, "temperature": args.temperature}
                for seed in SEEDS:
                    settings = PlannerConfig(method=method, seed=seed, **shared)
                    choices[f"{method} from {seed}"] = settings
            results["played"] = play_held_out(args.checkpoint, args.episodes, choices)
            for name, r in results["played"].items():
                outcome = f"success {r['success']:.2f}  return {r['return']:.2f}"
                print(f"{name:20s} {outcome}  {r['length']:.0f} steps  {r['seconds']:.0f} s")
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
