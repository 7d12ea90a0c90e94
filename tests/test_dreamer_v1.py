"""examples/dreamer_v1.py learns, with LoRe and without, and what LoRe adds is there."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lore_torchrl import keys
from lore_torchrl.envs.pendulum import Pendulum

STOCK = {"loss_model_kl", "loss_model_reco", "loss_model_reward", "loss_actor", "loss_value"}
LORE = {"loss_lore_prior", "loss_lore_constraint"}
BOTH = pytest.mark.parametrize("lore", [False, True], ids=["stock", "lore"])


@cache
def run(lore: bool) -> SimpleNamespace:
    """Run one episode of the script, smaller than it is, and keep the parts that it made."""
    seen = SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
        import dreamer_v1 as script

        def keep(name: str, field: str) -> None:
            make = getattr(script, name)

            def made(*args, **kwargs):
                setattr(seen, field, make(*args, **kwargs))
                return getattr(seen, field)

            patch.setattr(script, name, made)

        keep("TensorDictReplayBuffer", "replay")
        keep("stock_losses", "losses")
        keep("LoReActorLoss", "lore_loss")
        make_dreamer = script.Dreamer

        def made_dreamer(env):
            seen.dreamer = make_dreamer(env)
            seen.untrained = copy.deepcopy(seen.dreamer.world_model.state_dict())
            return seen.dreamer

        patch.setattr(script, "Dreamer", made_dreamer)
        for name, value in {"TIME": 8, "BATCH": 8, "HORIZON": 4}.items():
            patch.setattr(script, name, value)
        seen.results = script.main(lore, 200, updates=3)
    return seen


def dream(seen: SimpleNamespace):
    """Return the world model's losses and posteriors over the episode."""
    torch.manual_seed(0)
    with torch.no_grad():
        return seen.losses[0](seen.replay[:].unsqueeze(0))


def touched(module: torch.nn.Module) -> bool:
    return any(p.grad is not None and p.grad.any() for p in module.parameters())


@BOTH
def test_every_loss_is_finite_and_every_network_learns(lore):
    results, dreamer = run(lore).results, run(lore).dreamer
    losses = {name for name in results if name.startswith("loss_")}
    assert losses == (STOCK | LORE if lore else STOCK)
    assert all(abs(value) < float("inf") for value in results.values())
    assert -2000 < results["mean_return"] < 0
    assert all(touched(part) for part in (dreamer.world_model, dreamer.actor, dreamer.value))


@BOTH
def test_the_world_model_comes_to_know_what_it_saw(lore):
    # Not along the run: as the rod gains speed, what there is to know becomes harder.
    seen = run(lore)
    trained = copy.deepcopy(seen.dreamer.world_model.state_dict())
    after = dream(seen)[0]
    seen.dreamer.world_model.load_state_dict(seen.untrained)
    before = dream(seen)[0]
    seen.dreamer.world_model.load_state_dict(trained)
    parts = ("loss_model_reco", "loss_model_reward")
    assert sum(after[part] for part in parts) < 0.7 * sum(before[part] for part in parts)


@BOTH
def test_advice_is_bought_and_kept_only_with_lore(lore):
    seen = run(lore)
    advice = {key for key in seen.replay[:].keys(True) if "llm" in str(key) or "lore" in str(key)}
    assert advice == (set(keys.ADVICE_KEYS) if lore else set())
    assert 0 < seen.results["calls"] <= 98 if lore else seen.results["calls"] == 0


def test_advice_stands_beside_the_posterior_of_its_observation():
    replay, adapter = run(True).replay[:], Pendulum()
    describer, planner = adapter.make_describer(), adapter.make_planner()
    observed, advised = replay["next", "observation"][:-1], replay[1:]
    rows = advised["llm_mask"].squeeze(-1).nonzero().flatten().tolist()
    assert len(rows) > 50
    for row in rows:
        values = planner(describer.request(0, {"observation": observed[row].numpy()}))
        assert values[advised["llm_prior_logits"][row].argmax()] == max(values)
    _, posterior = dream(run(True))
    for key in ("state", "belief"):
        assert torch.equal(posterior[key][:, 1:], posterior["next", key][:, :-1])


def test_what_is_learned_from_advice_reaches_the_actor_alone():
    seen = run(True)
    _, posterior = dream(seen)
    networks = (seen.dreamer.actor, seen.dreamer.value, seen.dreamer.world_model)
    for network in networks:
        network.zero_grad()
    seen.lore_loss.advice_terms(posterior.reshape(-1))["loss_lore_prior"].backward()
    assert [touched(network) for network in networks] == [True, False, False]
