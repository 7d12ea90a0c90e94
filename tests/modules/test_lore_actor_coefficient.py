"""What scales and completes the advice that LoReActor mixes in."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import DreamerV3DiscreteActor

from lore_torchrl import keys
from lore_torchrl.dreamer.metrics import policy_metrics
from lore_torchrl.modules import (
    LatentDisagreement,
    LogitMixer,
    LoReActor,
    PriorNet,
    UncertaintyGate,
)

ACTIONS, N = 4, 6


def lore(gate=None, **kwargs) -> LoReActor:
    torch.manual_seed(0)
    actor = DreamerV3DiscreteActor(6, ACTIONS, depth=1, num_cells=8)
    gate = UncertaintyGate(**{"value_weight": 0.0, "tau": 0.0, **(gate or {})})
    return LoReActor(actor, gate, LogitMixer(max_kl=float("inf")), **kwargs)


def net(threshold=0.5) -> PriorNet:
    torch.manual_seed(1)
    built = PriorNet(6, ACTIONS, num_cells=8, threshold=threshold)
    with torch.no_grad():
        built.network.model[-1].weight.normal_(std=3.0)
    return built


def advised(mask=True) -> TensorDict:
    torch.manual_seed(2)
    return TensorDict(
        {
            "state": torch.randn(N, 4),
            "belief": torch.randn(N, 2),
            keys.PRIOR_LOGITS: 3 * torch.randn(N, ACTIONS),
            keys.CONFIDENCE: torch.full((N, 1), 0.95),
            keys.MASK: torch.full((N, 1), mask),
        },
        [N],
    )


def act(actor: LoReActor, td: TensorDict) -> TensorDict:
    torch.manual_seed(3)
    with set_exploration_type(ExplorationType.RANDOM):
        return actor(td.clone())


def mixed(td, beta, logits, confidence):
    centred = logits - logits.mean(-1, keepdim=True)
    return torch.log_softmax(td["logits"] + beta * confidence * centred, -1)


def test_the_coefficient_scales_the_weight_and_not_lore_beta():
    td = advised()
    td[keys.COEFFICIENT] = torch.tensor([0.0, 0.25, 0.5, 1.0, 0.0, 1.0]).unsqueeze(-1)
    out, whole = act(lore(), td), act(lore(), advised())
    assert torch.equal(out[keys.BETA], whole[keys.BETA])
    expected = mixed(out, out[keys.BETA] * td[keys.COEFFICIENT], td[keys.PRIOR_LOGITS], 0.95)
    torch.testing.assert_close(out[keys.MIX_LOGITS], expected)
    assert (out[keys.KL][td[keys.COEFFICIENT] == 0] == 0).all()


def test_a_single_weight_shows_no_spread():
    out = act(lore(), advised())
    found = policy_metrics(out)
    assert found["lore/beta_std"] == out[keys.BETA].std().item()
    single = policy_metrics(out[:1])
    assert found.keys() - single.keys() == {"lore/beta_std"}
    assert all(value == value for value in single.values())


def test_a_segment_without_advice_is_the_actors_own():
    td = advised()
    td[keys.COEFFICIENT] = torch.zeros(N, 1)
    found, stock = act(lore(prior_net=net(threshold=0.0)), td), act(lore().actor, td)
    assert torch.equal(found["action"], stock["action"])
    assert torch.equal(found["action_log_prob"], stock["action_log_prob"])
    # Answers also serve later segments: calls go on, and who advises is told.
    sure = found[keys.PRIOR_NET_CONFIDENCE]
    torch.testing.assert_close(found[keys.ACQUISITION], found[keys.BETA] * (1 - sure))
    assert (found[keys.BETA] > 0).all() and (found[keys.ORIGIN] == keys.ORIGIN_ADVISOR).all()


def test_prior_net_is_the_fallback_where_nobody_advised():
    prior_net, td = net(), advised(mask=False)
    td[keys.MASK][0] = True
    logits, sure = prior_net.advise(td["state"], td["belief"])
    prior_net.threshold = sure[1:].median().item()
    out = act(lore(prior_net=prior_net), td)
    origin = out[keys.ORIGIN].flatten()
    fallback = (sure >= prior_net.threshold).flatten() & ~td[keys.MASK].flatten()
    assert fallback.any() and not fallback[1:].all()
    assert origin[0] == keys.ORIGIN_ADVISOR
    assert torch.equal(origin == keys.ORIGIN_PRIOR_NET, fallback)
    assert torch.equal(origin == keys.ORIGIN_NONE, ~fallback & ~td[keys.MASK].flatten())
    expected = mixed(out, out[keys.BETA], logits, sure)
    torch.testing.assert_close(out[keys.MIX_LOGITS][fallback], expected[fallback])
    assert (out[keys.KL].flatten()[origin == keys.ORIGIN_NONE] == 0).all()
    torch.testing.assert_close(out[keys.ACQUISITION], out[keys.BETA] * (1 - sure))
    assert torch.equal(out[keys.PRIOR_NET_LOGITS], logits)


def test_a_broken_network_does_not_stop_the_calls():
    prior_net = net()
    with torch.no_grad():
        prior_net.network.model[-1].bias[-1] = float("nan")
    out = act(lore(prior_net=prior_net), advised(mask=False))
    assert out[keys.PRIOR_NET_CONFIDENCE].isnan().all() and (out[keys.BETA] > 0).all()
    assert torch.equal(out[keys.ACQUISITION], out[keys.BETA])
    assert (out[keys.ORIGIN] == keys.ORIGIN_NONE).all() and (out[keys.KL] == 0).all()


def test_a_network_of_another_number_of_actions_is_refused():
    with pytest.raises(ValueError, match=r"PriorNet's \(6, 5\).*num_actions=4"):
        act(lore(prior_net=PriorNet(6, 5)), advised())


def test_what_the_advisor_wrote_is_not_touched():
    """Replay keeps the advisor's own answers: PriorNet must not be trained on itself."""
    td = advised(mask=False)
    out = act(lore(prior_net=net(threshold=0.0)), td)
    assert (out[keys.ORIGIN] == keys.ORIGIN_PRIOR_NET).all()
    for key in keys.ADVICE_KEYS:
        assert torch.equal(out[key], td[key])


def test_disagreement_reaches_the_gate():
    ensemble = LatentDisagreement(4, 2, ACTIONS, num_members=3, hidden_dim=8)
    weights = {"entropy_weight": 0.0, "disagreement_weight": 1.0}
    actor = lore(weights, disagreement=ensemble)
    out = act(actor, advised())
    found = ensemble.expected(out["state"], out["belief"], out["logits"])
    expected = (found / found.max()).clamp(max=1.0)
    torch.testing.assert_close(out[keys.UNCERTAINTY], expected)


def test_an_ensemble_without_weight_is_not_kept():
    ensemble = LatentDisagreement(4, 2, ACTIONS, num_members=3, hidden_dim=8)
    assert lore(disagreement=ensemble).disagreement is None


@pytest.mark.parametrize("extra", ["coefficient", "prior_net", "both"])
def test_the_decision_compiles_without_a_graph_break(extra):
    td = advised(mask=extra == "coefficient")
    if extra != "prior_net":
        td[keys.COEFFICIENT] = torch.arange(N).reshape(N, 1) % 2.0
    actor = lore(prior_net=None if extra == "coefficient" else net())
    plain = act(actor, td)
    actor.compile_decision(backend="eager", fullgraph=True)
    compiled = act(actor, td)
    torch.testing.assert_close(compiled[keys.MIX_LOGITS], plain[keys.MIX_LOGITS])
