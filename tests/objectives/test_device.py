"""LoRe neither leaves its device nor waits for it: checked without a GPU, on the meta device.

Tensors there have shapes and no values. What reads a value back, makes a shape depend on values
or mixes devices waits or fails on CUDA, and raises there.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from dreamer_sample import (
    ACTIONS,
    latents,
    lore_around,
    lore_config,
    tiny_agent,
    tiny_config,
    tiny_sample,
)
from gaussian_sample import ANCHORS, continuous_agent
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torchrl.data import OneHot
from torchrl.modules.distributions import continuous
from torchrl.objectives.value import functional

from lore_torchrl.configs import BanditConfig, LoReConfig, PriorNetConfig
from lore_torchrl.control import AdviceBandit
from lore_torchrl.dreamer import learner as learner_module
from lore_torchrl.dreamer.learner import build_learner
from lore_torchrl.lore import build_bandit
from lore_torchrl.modules import ValidEGreedyModule
from lore_torchrl.policies import GaussianPolicy

META = torch.device("meta")
FITTED = {
    "prior_net": PriorNetConfig(enabled=True, num_cells=8, threshold=0.3),
    "bandit": BanditConfig(segment_steps=5),
}
LOSSES = {
    "imitation_weight": 3.0,
    "bonus_weight": 0.1,
    "multiplier_init": 0.5,
    "beta_imagine_max": 0.5,
    "gated": True,
}
GATE = {"disagreement_weight": 0.3, "value_weight": 0.3, "value_source": "ensemble"}
DISCRETE = replace(lore_config(gate=GATE, temperature={"rate": 0.1}, **LOSSES), **FITTED)
CONTINUOUS = replace(lore_config(gate=GATE, **LOSSES), **FITTED)


def _slowly(gamma, lmbda, next_state_value, reward, done, terminated, **_):
    return functional.td_lambda_return_estimate(
        gamma, lmbda, next_state_value, reward, done, terminated
    )


@pytest.fixture
def _stock_on_meta(monkeypatch):
    """Leave out what keeps a learner from the meta device: TorchRL's, but for the last."""
    # TorchRL's fast lambda returns read the ends of episodes back.
    monkeypatch.setattr(functional, "_fast_td_lambda_return_estimate", _slowly)
    # Its target updater compares addresses.
    monkeypatch.setattr(learner_module, "SoftUpdate", lambda *_, **__: None)
    # Its distributions of bounded actions ask for the bounds' values unless compiled.
    monkeypatch.setattr(continuous, "is_compiling", lambda: True)
    # PyTorch has no autocast there.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    # When a loss is made, and only then, it compares the bounds of its parts.
    monkeypatch.setattr(GaussianPolicy, "check", lambda *_: None)


def _parts(lore: LoReConfig | None, continuous: bool):
    """Build an agent and what advises it; bounds are checked by value, so move them then."""
    agent = continuous_agent() if continuous else tiny_agent()
    around = None
    if lore is not None:
        around = lore_around(lore, agent, **({"anchors": ANCHORS} if continuous else {}))
        around.actor.to(META)
    for name in ("world_model", "imagination", "continuation", "actor", "value", "filter"):
        getattr(agent, name).to(META)
    return agent, around


def _advised(sample: TensorDict, continuous: bool) -> TensorDict:
    """Turn advice and actions of a sample into those of the agent, and add its returns."""
    sample["next", "lore_return"] = torch.zeros_like(sample["next", "reward"])
    if continuous:
        shape = sample.shape
        sample["action"] = torch.rand(*shape, 2) - 0.5
        sample["next", "llm_prior_logits"] = torch.randn(*shape, len(ANCHORS))
    return sample.to(META)


def _observed(num_choices: int = ACTIONS) -> TensorDict:
    observed = latents()
    observed["llm_prior_logits"] = torch.randn(len(observed), num_choices)
    observed["action_mask"] = torch.ones(len(observed), ACTIONS, dtype=torch.bool)
    return observed.to(META)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x + torch.ones(3),
        lambda x: x[torch.tensor(0, device=META)] if x[0] > 0 else x,
    ],
)
def test_what_waits_or_mixes_devices_raises_there(wait):
    with pytest.raises((RuntimeError, NotImplementedError)):
        wait(torch.zeros(3, device=META))


@pytest.mark.usefixtures("_stock_on_meta")
@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("which", ["stock", "default", "everything"])
def test_a_whole_update_stays_there(which, continuous):
    full = CONTINUOUS if continuous else DISCRETE
    default = lore_config(imitation_weight=1.0)
    lore = {"stock": None, "default": default, "everything": full}[which]
    agent, around = _parts(lore, continuous)
    learner = build_learner(tiny_config(), agent, lore=around, device=META)
    sample = _advised(tiny_sample(), continuous)
    metrics = learner.stepper.step(None, sample)
    assert all(value.device == META for value in metrics.values())
    assert ("loss_lore_imitation" in metrics) == (which != "stock")
    assert ("loss_prior_net" in metrics) == (which == "everything")
    held = [*learner.loss.buffers(), *learner.loss.parameters()]
    assert held and all(value.device == META for value in held)


@pytest.mark.usefixtures("_stock_on_meta")
def test_advice_on_another_device_is_noticed():
    lore = lore_config()
    agent, around = _parts(lore, False)
    learner = build_learner(tiny_config(), agent, lore=around, device=META)
    here = latents()
    there = here.to(META)
    learner.loss.actor_loss.advice_terms(there)
    there.clear_device_().set("llm_prior_logits", here["llm_prior_logits"])
    with pytest.raises(RuntimeError, match="device"):
        learner.loss.actor_loss.advice_terms(there)


@pytest.mark.usefixtures("_stock_on_meta")
class TestActing:
    @pytest.mark.parametrize("mode", ["logit", "probability"])
    @pytest.mark.parametrize("training", [False, True])
    def test_discrete(self, mode, training):
        lore = replace(DISCRETE, mixer=replace(DISCRETE.mixer, mode=mode))
        actor = _parts(lore, False)[1].actor.train(training)
        with torch.no_grad():
            out = actor(_observed())
        assert out["action"].shape == (10, ACTIONS) and out["action"].device == META

    @pytest.mark.parametrize("training", [False, True])
    def test_continuous(self, training):
        actor = _parts(CONTINUOUS, True)[1].actor.train(training)
        with torch.no_grad():
            out = actor(_observed(len(ANCHORS)))
        assert out["action"].shape == (10, 2) and out["action"].device == META

    def test_bandit_and_random_steps_beside_it(self, monkeypatch):
        # There are no random streams there; of continuous actions, TorchRL's spec reads back
        # what it has drawn.
        monkeypatch.setattr(AdviceBandit, "_generator_on", lambda *_: None)
        bandit = build_bandit(DISCRETE, device=META)
        epsilon = ValidEGreedyModule(OneHot(ACTIONS).to(META)).to(META)
        policy = TensorDictSequential(bandit, _parts(DISCRETE, False)[1].actor, epsilon)
        observed = _observed()
        zero = torch.zeros(10, 1, dtype=torch.long)
        carried = {"is_init": zero.bool(), "step_count": zero, "lore_coefficient": zero.float()}
        observed.update(carried)
        with torch.no_grad():
            out = policy(observed)
        assert out["action"].shape == (10, ACTIONS)
        assert all(value.device == META for value in out.values(True, True))


def test_bandit_learns_from_segments():
    bandit = build_bandit(DISCRETE, device=META)
    number, flag = torch.ones(8, 1, device=META), torch.ones(8, 1, device=META).bool()
    bandit.observe(flag, number, flag)
    bandit.renew()
    assert bandit.probability().device == bandit.baseline().device == META
    assert bandit.ends(flag, flag.long()).device == META
