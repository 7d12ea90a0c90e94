"""Planning in the latent space: sequences of actions, scored in imagination."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor
from torchrl.objectives.value.functional import td_lambda_return_estimate

from lore_torchrl import keys
from lore_torchrl.configs.lore import PlannerConfig
from lore_torchrl.modules.advice import AdviceBatch, read_advice
from lore_torchrl.modules.world import WorldModel
from lore_torchrl.policies import CategoricalPolicy, PolicyKind

# Weight of the distribution before in a refitted one.
_MOMENTUM = 0.2
# Of the seed: probability of a step without preference, and of one that follows sure advice.
_UNIFORM, _FOLLOWED = 0.1, 0.8
# As advice all actions are alike that are less than exp(-5) as likely as the best: the range of the
# logits decides how much of the KL bound is left for each difference.
_LEAST_LOGIT = -5.0


class Plan(NamedTuple):
    """What :meth:`LatentPlanner.plan` returns.

    The first step's distribution, ``[*B, A]``, which is a policy of the planner's kind, and the
    mean score of the first and of the last iteration's sequences, each ``[*B, 1]``.
    """

    policy: Any
    seed_score: Tensor
    score: Tensor


class LatentPlanner(TensorDictModuleBase):
    r"""Advise on the next action by the sequences that score best in imagination.

    For each row, :math:`N` sequences of :math:`H` actions are drawn from a distribution
    :math:`q` that is independent over steps, categorical or Gaussian as the policy is, and rolled
    out from the posterior with the agent's dynamics. The score of a sequence is the lambda return
    of the first step, as in DreamerV3's actor loss,

    .. math::
        G_t = r_{t+1} + \gamma\, c_{t+1} \bigl((1 - \lambda) V_{t+1} + \lambda G_{t+1}\bigr),
        \qquad G_H = V_H

    with the continuation :math:`c` and the critic :math:`V` of what follows. Then :math:`q` becomes
    :math:`\mu\, q + (1 - \mu)\, \hat q` with :math:`\mu = 0.2`, where :math:`\hat q` is the
    likeliest distribution of the sequences under the weights

    .. math::
        w_i \propto \exp(G^i / T) \quad \text{(MPPI)}, \qquad
        w_i = \tfrac1k\, [i \in \text{best } k] \quad \text{(CEM)}

    and all is repeated. Where all sequences score alike MPPI leaves :math:`q` as it was, but for
    chance; CEM does not. With ``seed="policy"`` the first :math:`q` is the policy along one
    imagined rollout of itself, mixed with a tenth of uniform. ``"advice"`` leans its first step on
    the entries of advice, by 0.8 times their confidence, and ``"plan"`` leans those steps by 0.8
    that ``llm_plan`` names an action for. ``"uniform"`` is uniform over the named actions.

    What it writes is used by :class:`~lore_torchrl.modules.LoReActor` as advice: behind the gate
    and within the KL bound. Random numbers are drawn from torch's global generator, always as many.
    It has no parameters of its own and gives none a gradient.

    CEM: https://doi.org/10.1023/A:1010091220143, with learned dynamics:
    https://arxiv.org/abs/1805.12114; MPPI: https://arxiv.org/abs/1509.01149. TorchRL's
    :class:`~torchrl.modules.CEMPlanner` and :class:`~torchrl.modules.MPPIPlanner` start from a
    standard normal, and know no discrete actions.

    Args:
        world: World model and critic of the agent; their networks are shared.
        actor: Stock actor over ``state`` and ``belief``.
        policy: Kind of the actor's policy. Default: ``None``, a ``CategoricalPolicy()``.

    Keyword Args:
        **settings: As of :class:`~lore_torchrl.configs.PlannerConfig`, which documents defaults
            and limits.

    Raises:
        TypeError: If ``actor`` is not a stock one.
        ValueError: If it is of another kind, or a setting is out of range.

    Examples:
        >>> from lore_torchrl.configs import DreamerConfig
        >>> from lore_torchrl.dreamer.agent import build_agent
        >>> agent = build_agent(DreamerConfig(), observation_dim=5, num_actions=3)
        >>> planner = LatentPlanner(agent.world, agent.actor, horizon=2, samples=16)
        >>> td = TensorDict(state=torch.zeros(2, 64), belief=torch.zeros(2, 128), batch_size=[2])
        >>> planner(td)["planner_logits"].shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        world: WorldModel,
        actor: ProbabilisticTensorDictSequential,
        policy: PolicyKind | None = None,
        **settings: Any,
    ):
        super().__init__()
        self.config = PlannerConfig(**settings)
        self.kind = CategoricalPolicy() if policy is None else policy
        self.kind.check(actor)
        self.world, self.actor = world, actor
        # The actor without its head; slicing it at every step would cost a module each.
        self.__dict__["_backbone"] = tuple(actor.module)[:-1]
        self.in_keys = ["state", "belief"]
        self.out_keys = [keys.PLANNER_LOGITS, keys.PLANNER_SEED_SCORE, keys.PLANNER_SCORE]

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the plan's first step as advice, ``[*B, K]``, and both scores."""
        plan = self.plan(tensordict)
        logits = self.kind.as_advice(plan.policy)
        logits = (logits - logits.amax(-1, keepdim=True)).clamp_min(_LEAST_LOGIT)
        for key, entry in zip(self.out_keys, (logits, *plan[1:]), strict=True):
            tensordict.set(key, entry)
        return tensordict

    @torch.no_grad()
    def plan(self, tensordict: TensorDictBase) -> Plan:
        """Return the first step's distribution, and the scores of sequences.

        Args:
            tensordict: ``state`` and ``belief`` ``[*B, ·]`` and, if the seed wants them and they
                are there, the entries of advice and ``llm_plan`` ``[*B, L]``, of any length.
        """
        c, kind, batch = self.config, self.kind, tensordict.batch_size
        names = (*self.in_keys, *keys.ADVICE_KEYS, keys.PLAN)
        rows = tensordict.select(*names, strict=False).reshape(-1)
        state, belief = (rows.get(key) for key in self.in_keys)
        sequence, scores = self._seed(rows), []
        for _ in range(c.iterations):
            actions = kind.sample(sequence, c.samples)
            score = self.score(state, belief, actions)
            weight = self._weight(score).unsqueeze(-1)
            sequence = kind.blend(sequence, kind.fit(actions, weight), _MOMENTUM)
            scores.append(score)
        first = (entry[..., 0, :].reshape(*batch, -1) for entry in kind.entries(sequence))
        means = (score.mean(0).reshape(*batch, 1) for score in (scores[0], scores[-1]))
        return Plan(kind.read(*first), *means)

    @torch.no_grad()
    def score(self, state: Tensor, belief: Tensor, actions: Tensor) -> Tensor:
        """Return the lambda return of sequences ``[*N, *B, H, A]`` from ``[*B, ·]``.

        Returns:
            :math:`G_0`, ``[*N, *B, 1]``, each of one imagined rollout.
        """
        shape = actions.shape[:-2]
        actions = actions.reshape(-1, *actions.shape[-2:])
        latent = {"state": state, "belief": belief}
        latent = {k: v.expand(*shape, -1).reshape(len(actions), -1) for k, v in latent.items()}
        step, steps = TensorDict(latent, [len(actions)]), []
        for action in actions.unbind(-2):
            step = self._step(step, action)
            steps.append(step)
        # Only what the heads read, so that a step's other entries are not stacked.
        rolled = TensorDict(
            {k: torch.stack([s.get(k) for s in steps], -2) for k in (*self.in_keys, "reward")},
            actions.shape[:-1],
        )
        reward = rolled.get("reward")
        value = self.world.value(rolled).get("state_value")
        discount = self.world.continuation(rolled).get("continuation")
        never = torch.zeros_like(reward, dtype=torch.bool)
        returns = td_lambda_return_estimate(discount, self.config.lmbda, value, reward, never)
        return returns[..., 0, :].reshape(*shape, 1)

    @torch.no_grad()
    def usable(self, planned: tuple[Tensor, Tensor]) -> AdviceBatch:
        """Return written logits and score as advice; a score that is no number is none."""
        logits, score = planned
        return AdviceBatch.clean(logits, torch.ones_like(score), score.isfinite())

    def _step(self, latent: TensorDictBase, action: Tensor) -> TensorDictBase:
        """Return the state that follows an action, with its reward."""
        return self.world.dynamics(latent.select(*self.in_keys).set("action", action))

    def _weight(self, score: Tensor) -> Tensor:
        """Return how much each sequence counts, ``[N, B, 1]``, summing to one over the first."""
        if self.config.method == "mppi":
            return torch.softmax(score / self.config.temperature, 0)
        best = score.topk(self.config.elites, dim=0).indices
        return torch.zeros_like(score).scatter_(0, best, 1.0 / self.config.elites)

    def _policy(self, latent: TensorDictBase) -> Any:
        """Return the actor's policy."""
        latent = latent.copy()
        for module in self._backbone:
            module(latent)
        policy = self.kind.read(*(latent.get(key) for key in self.actor[-1].in_keys))
        return self.kind.precise(policy)

    def _seed(self, rows: TensorDictBase) -> Any:
        """Return the distribution of the first sequences, ``[B, H, ·]``."""
        kind, latent, steps = self.kind, rows.select(*self.in_keys), []
        policy = self._policy(latent)
        even = kind.as_policy(self._named(rows, kind.num_actions(policy)), policy)
        for time in range(self.config.horizon):
            if self.config.seed == "uniform":
                steps.append(even)
                continue
            if time:
                latent = self._step(latent, kind.sample(steps[-1], 1)[0])
                policy = self._policy(latent)
            policy = kind.blend(even, policy, _UNIFORM)
            steps.append(self._leaned(policy, rows, time))
        entries = zip(*(kind.entries(step) for step in steps), strict=True)
        return kind.read(*(torch.stack(entry, -2) for entry in entries))

    def _leaned(self, policy: Any, rows: TensorDictBase, time: int) -> Any:
        """Return the policy of a step, leaned on what the advisor says of it."""
        logits = followed = None
        plan = rows.get(keys.PLAN, None)
        if self.config.seed == "plan" and plan is not None and time < plan.shape[-1]:
            named = plan[:, time : time + 1]
            # Far above the others, which keep no probability.
            logits = self._named(rows, self.kind.num_actions(policy))
            logits = logits.scatter(-1, named.clamp_min(0), 100.0)
            followed = (named >= 0).to(logits.dtype)
        elif (
            self.config.seed == "advice" and time == 0 and (advice := read_advice(rows)) is not None
        ):
            logits, followed, *_ = AdviceBatch.clean(*advice)
        if logits is None:
            return policy
        advised = self.kind.as_policy(logits, policy)
        return self.kind.blend(advised, policy, _FOLLOWED * followed)

    def _named(self, rows: TensorDictBase, number: int) -> Tensor:
        """Return logits without preference over the named actions, ``[B, K]``."""
        return rows.get("state").new_zeros(len(rows), number, dtype=torch.float32)
