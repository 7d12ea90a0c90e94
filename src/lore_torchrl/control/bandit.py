"""Choosing how much advice to allow in an episode, by what episodes returned."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from lore_torchrl.control.evidence import barren_credit, forgetting, uplift_evidence
from lore_torchrl.control.regret import exp3_regret_bound
from lore_torchrl.control.stream import SeededModule

# Unadvised episodes are remembered as the last seven or so: the agent changes.
_BASELINE_DECAY = 0.85
# A trial is half advised, so that what is compared is known of both; and however long advice
# has not paid, so much is left of its probation: it may have become better.
_TRIAL_MASS, _LEAST_CREDIT = 0.5, 0.1
# Where teaching has ended, so much of the advised steps is left: the agent may forget.
_LEAST_SHARE = 0.1
# Decayed number of an arm's stretches below which their mean length is not known any more; and
# the largest return, of which sums, spans and quotients stay finite.
_LEAST_COUNT, _LARGEST_RETURN = 1e-30, 1e30


class ShareBandit(SeededModule):
    r"""Draw, for each episode, the share of the advice's weight that is allowed.

    Arm :math:`k` of :math:`K` allows the share ``arms[k]``; arm 0 allows none. The learner
    is EXP3 with implicit exploration (`EXP3-IX <https://arxiv.org/abs/1506.03271>`_) and,
    for tracking a change, the shared weights of EXP3.S (Auer et al. 2002,
    https://doi.org/10.1137/S0097539701398375). With :math:`r \in [0, 1]` the normalised
    return of an episode whose arm was drawn with probability :math:`p_k`,

    .. math::
        \hat\ell_k &= \frac{r_0 - r}{p_k + \eta / 2}, \qquad
        w_k \leftarrow (1 - \alpha)\, w_k e^{-\eta \hat\ell_k} + \frac{\alpha}{K}
            \sum_i w_i e^{-\eta \hat\ell_i} \\
        x_k &= \frac{\gamma}{K} \min\Bigl(1, \frac{\bar L}{L_k}\Bigr), \qquad
        q_k = \Bigl(1 - \sum_i x_i\Bigr) \frac{w_k}{\sum_i w_i} + x_k

    With ``gated=False`` :math:`r_0` is 1 once anything was returned, and 0 before: no loss is
    negative, and :meth:`regret_bound` holds. With ``gated=True`` it is the mean of recent
    returns, and no bound is claimed: implicit exploration hides most of a rare arm's losses, so
    that while the gate holds the weights drift towards the advised arms, and it is :math:`m`
    alone that holds those back. Either keeps the weights while nothing is returned.
    Exploration is counted in steps: an arm whose episodes are longer (:math:`L_k`) than
    the mean episode (:math:`\bar L`) is explored less often, and takes about
    :math:`\gamma / K` of the steps.

    **The gate.** Being wrong about advice is not symmetric: an agent that has learnt to
    lean on bad advice must unlearn it. With ``gated=True`` advised arms therefore get only
    the mass :math:`m` that evidence warrants, and all shares are shares of steps:

    .. math::
        p_k &\propto \bigl(m q_k + (1 - m)\, [k = 0]\bigr)\, \bar L / L_k \\
        m &= \max(0.1, s) \max\Bigl(c\, m_{\min},\;
            \min\bigl(\tfrac12, \frac{\text{granted} - \text{advised}}{\text{trial}}\bigr),\;
            \min\bigl(1, \frac{e - e_{low}}{e_{high} - e_{low}}\bigr)\Bigr)

    The evidence :math:`e` is :func:`~lore_torchrl.control.evidence.uplift_evidence`. Each
    advised episode is compared with what unadvised ones returned *then*: :math:`d = r - b`,
    with :math:`b` the mean of the last few unadvised returns, at first shrunk towards a return
    of 0, but a tenth at least: where reward is sparse an episode brings nothing until shown
    otherwise. Else an agent that gets better would turn late advised episodes into evidence
    against early unadvised ones.

    Where hardly anything is rewarded, :math:`e` stays near one half whatever the advice. The
    credit :math:`c`, at least 0.1 (:func:`~lore_torchrl.control.evidence.barren_credit`),
    therefore shrinks probation and all trials but the first with :math:`u`,
    the number of advised episodes since one last returned more than :math:`b`, each of them
    counted by its share and its length over ``whole_length``, at most 1.

    :math:`s` is what :meth:`anneal` was told last, 1 before: where advice that is no longer
    taught acted in nearly every step, replay would hardly show what the policy does alone.

    Returns are normalised by the smallest and largest so far, 0 included. A row whose
    return is not finite, or above 1e30 in size, only counts in ``ignored``.

    Keyword Args:
        arms: Shares of beta, rising from 0. Default: ``(0.0, 0.25, 0.5, 1.0)``.
        initial: First weights :math:`w`, positive, one an arm; ``None`` for equal ones.
            Default: ``None``.
        learning_rate: :math:`\eta > 0` for each episode. Default: ``0.2``.
        exploration: :math:`\gamma`, share of steps spent evenly, in ``[0, 1)``.
            Default: ``0.05``.
        sharing: :math:`\alpha` in ``[0, 1)``; positive if the best arm changes. Default: ``0.0``.
        decay: Forgetting of the sums at each episode, in ``(0, 1]``. Default: ``0.97``.
        trial_episodes: Advised episodes of the first trial; see :meth:`grant`. Default: ``8``.
        last_trial_episodes: Those of the last one, also without a first. Default: ``8``.
        probation: :math:`m_{\min}`, in ``[0, 1]``. Default: ``0.05``.
        hit_rate: :math:`h`, in ``[0, 1)``; 0 for a credit of 1 for ever. Default: ``0.0``.
        whole_length: Steps from which on an episode counts whole in :math:`u`; ``None`` counts
            all so, however short and cheap. Default: ``None``.
        evidence_low: :math:`e_{low}`. Default: ``0.6``.
        evidence_high: :math:`e_{high}`. Default: ``0.8``.
        trust_low: Evidence at which trust starts. Default: ``0.8``.
        trust_high: Evidence at which it is whole. Default: ``0.99``.
        gated: ``False`` is plain EXP3-IX, with its bound. Default: ``True``.
        seed: Seed of a random stream of the bandit's own. Default: ``0``.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> bandit = ShareBandit(arms=(0.0, 1.0))
        >>> column = torch.ones(20, 1)
        >>> arm = torch.arange(20).remainder(2).unsqueeze(-1)
        >>> bandit.observe(arm, column / 2, 1.0 * arm, 100 * column, column.bool())
        >>> bandit.evidence() > 0.99, bandit.probs()[1] > 0.9
        (tensor(True), tensor(True))
    """

    def __init__(
        self,
        *,
        arms: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0),
        initial: tuple[float, ...] | None = None,
        learning_rate: float = 0.2,
        exploration: float = 0.05,
        sharing: float = 0.0,
        decay: float = 0.97,
        trial_episodes: int = 8,
        last_trial_episodes: int = 8,
        probation: float = 0.05,
        hit_rate: float = 0.0,
        whole_length: int | None = None,
        evidence_low: float = 0.6,
        evidence_high: float = 0.8,
        trust_low: float = 0.8,
        trust_high: float = 0.99,
        gated: bool = True,
        seed: int = 0,
    ):
        super().__init__(seed)
        arms = tuple(float(arm) for arm in arms)
        rising = all(one < other for one, other in pairwise(arms))
        if len(arms) < 2 or arms[0] != 0 or not rising or not arms[-1] <= 1:
            raise ValueError(f"arms must start at 0 (no advice) and rise to at most 1, got {arms}.")
        initial = (1.0,) * len(arms) if initial is None else tuple(map(float, initial))
        if len(initial) != len(arms) or not all(0 < weight < math.inf for weight in initial):
            raise ValueError(
                f"initial must hold a positive weight for each of {len(arms)} arms, got {initial}."
            )
        mass, trust = (evidence_low, evidence_high), (trust_low, trust_high)
        ordered = all(0 <= low < high <= 1 for low, high in (mass, trust))
        for name, value, fine, rule in (
            ("learning_rate", learning_rate, 0 < learning_rate < math.inf, "be positive"),
            ("exploration", exploration, 0 <= exploration < 1, "lie in [0, 1)"),
            ("sharing", sharing, 0 <= sharing < 1, "lie in [0, 1)"),
            ("decay", decay, 0 < decay <= 1, "lie in (0, 1]"),
            ("trial_episodes", trial_episodes, trial_episodes >= 0, "not be negative"),
            ("last_trial_episodes", last_trial_episodes, last_trial_episodes >= 0, "be 0 or more"),
            ("probation", probation, 0 <= probation <= 1, "lie in [0, 1]"),
            ("hit_rate", hit_rate, 0 <= hit_rate < 1, "lie in [0, 1)"),
            ("whole_length", whole_length, whole_length is None or whole_length > 0, "be positive"),
            ("evidence and trust (low, high)", (mass, trust), ordered, "rise within [0, 1]"),
        ):
            if not fine:
                raise ValueError(f"{name} must {rule}, got {value}.")
        self.num_arms, self.gated = len(arms), gated
        self.learning_rate, self.exploration_ix = learning_rate, learning_rate / 2
        self.exploration, self.sharing, self.decay = exploration, sharing, decay
        self.trial_episodes, self.last_trial_episodes = trial_episodes, last_trial_episodes
        self.probation = probation
        self.hit_rate, self.whole_length = hit_rate, whole_length
        self.evidence_low, self.evidence_high = mass
        self.trust_low, self.trust_high = trust
        self.register_buffer("arms", torch.tensor(arms), persistent=False)
        self.register_buffer("_one", torch.ones(()), persistent=False)
        # What the learner knows; decayed sums; what regret is estimated from.
        sums = "counts return_sums length_counts length_sums inverse_probs weighted_returns"
        for name in sums.split():
            self.register_buffer(name, torch.zeros(len(arms)))
        self._least_weight = min(initial) / sum(initial)
        first = torch.tensor(initial).log()
        self.register_buffer("log_weights", first - first.amax())
        compared = "baseline_sum baseline_count uplift_sum uplift_count"
        for name in ("episodes", "obtained", "low", "high", "barren", *compared.split()):
            self.register_buffer(name, torch.zeros(()))
        for name in ("advised_episodes", "ignored"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))
        self.register_buffer("granted", torch.tensor(trial_episodes))
        self.register_buffer("annealed", torch.ones(()))
        # What arms are drawn from, and the trust: they change with an episode, and are read at
        # every step and update.
        self.register_buffer("drawn_from", torch.zeros(len(arms)))
        self.register_buffer("_trust", torch.zeros(()), persistent=False)
        self.refresh()

    def _normalised(self, total: Tensor, count: Tensor) -> Tensor:
        """Return a sum of ``count`` returns on the scale from 0 to ``count``."""
        span = self.high - self.low
        scaled = (total - count * self.low) / torch.where(span > 0, span, 1.0)
        return torch.where(span > 0, torch.minimum(scaled.clamp_min(0.0), count), 0.0)

    def _shortness(self) -> Tensor:
        r"""Return :math:`\bar L / L_k` of each arm, 1 where its length is not known."""
        mean = self.length_sums.sum() / self.length_counts.sum()
        shortness = mean * self.length_counts / self.length_sums
        # Below, decay has worn both down to numbers that float32 rounds apart.
        return torch.where(self.length_counts > _LEAST_COUNT, shortness, 1.0)

    def exp3_probs(self) -> Tensor:
        """Return the learner's own distribution, ungated, shape ``[K]``."""
        explored = self.exploration / self.num_arms * self._shortness().clamp_max(1.0)
        return (1.0 - explored.sum()) * torch.softmax(self.log_weights, -1) + explored

    def evidence(self) -> Tensor:
        """Return the probability that advised episodes return more, a scalar."""
        uplift = self.uplift_sum, self.uplift_count
        baseline = self._baseline(), self.baseline_count
        return uplift_evidence(*uplift, self._advised_mean(), *baseline)

    def _advised_mean(self) -> Tensor:
        """Return the mean of recent returns of advised arms, acted or not, shrunk to a half."""
        returns = self._normalised(self.return_sums, self.counts)
        return (1.0 + returns[1:].sum()) / (2.0 + self.counts[1:].sum())

    def _usual(self) -> Tensor:
        """Return what losses are measured from, normalised; 0 before the first return."""
        if not self.gated:
            return (self.high > self.low).to(self.high.dtype)
        count = self.counts.sum()
        return self._normalised(self.return_sums.sum() / count.clamp_min(1e-9), self._one)

    def _baseline(self) -> Tensor:
        """Return what an unadvised episode returns now, normalised, shrunk towards nothing."""
        count = self.baseline_count
        mean = self._normalised(self.baseline_sum / count.clamp_min(1e-9), self._one)
        nothing = self._normalised(torch.zeros_like(count), self._one).clamp_min(0.1)
        # Of all so far, not the last few: the shrinking must end.
        seen = self.episodes - self.advised_episodes
        return (2.0 * nothing + seen * torch.where(count > 0, mean, 0.0)) / (2.0 + seen)

    def credit(self) -> Tensor:
        """Return :math:`c`, what is left of probation and of a trial, a scalar."""
        return barren_credit(self.barren, self.hit_rate, _LEAST_CREDIT)

    def advised_mass(self) -> Tensor:
        """Return :math:`m`, the share of steps that the learner may decide."""
        mass = (self.evidence() - self.evidence_low) / (self.evidence_high - self.evidence_low)
        mass = mass.clamp_max(1.0).maximum(self.probation * self.credit())
        left = (self.granted - self.advised_episodes) / max(1, self.trial_episodes)
        mass = mass.maximum(left.clamp_max(_TRIAL_MASS))
        return mass * self.annealed.clamp_min(_LEAST_SHARE)

    def anneal(self, share: Tensor | float) -> None:
        """Let advice act less, from the next call of :meth:`observe` on; a gated bandit alone.

        Args:
            share: :math:`s`, what is left of teaching, scalar in ``[0, 1]``.
        """
        self.annealed.fill_(share)

    @torch.no_grad()
    def grant(self, *, last: bool = False) -> None:
        """Grant a trial of floor(c trial) episodes, none at the least c: the advice has changed.

        Older returns count half. The ``last`` trial, of ``last_trial_episodes``, is whole.
        """
        self.uplift_sum.mul_(0.5)
        self.uplift_count.mul_(0.5)
        self.barren.mul_(float(not last))
        episodes = self.last_trial_episodes if last else self.trial_episodes
        trial = episodes * self.credit() * (self.credit() > _LEAST_CREDIT)
        self.granted.clamp_(min=self.advised_episodes + trial.floor().long())
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring what is derived up to date, after a buffer was changed from outside."""
        self.drawn_from.copy_(self.probs())
        span = self.trust_high - self.trust_low
        self._trust.copy_(((self.evidence() - self.trust_low) / span).clamp(0.0, 1.0))

    def trust(self) -> Tensor:
        r"""Return the share taught, :math:`(e - t_{low}) / (t_{high} - t_{low})` cut to [0, 1]."""
        return self._trust.clone()

    def probs(self) -> Tensor:
        """Compute the distribution that arms are drawn from, shape ``[K]``."""
        if not self.gated:
            return self.exp3_probs()
        mass = self.advised_mass()
        share = mass * self.exp3_probs()
        share = torch.cat((share[:1] + (1.0 - mass), share[1:]))
        probs = share * self._shortness()
        return probs / probs.sum()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args, **kwargs) -> None:
        for name in ("drawn_from", "barren", "annealed"):  # older checkpoints lack them
            state_dict.setdefault(prefix + name, getattr(self, name).clone())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.refresh()

    @torch.no_grad()
    def draw(self, num: int) -> tuple[Tensor, Tensor]:
        """Draw arms for episodes that begin now.

        Args:
            num: Number of episodes :math:`N`.

        Returns:
            Arms, int64 ``[N, 1]``, and their probabilities, ``[N, 1]``.
        """
        probs = self.drawn_from
        generator = self._generator_on(probs.device)
        arm = torch.multinomial(probs, num, replacement=True, generator=generator).unsqueeze(-1)
        return arm, probs[arm]

    @torch.no_grad()
    def observe(
        self,
        arm: Tensor,
        prob: Tensor,
        episode_return: Tensor,
        length: Tensor,
        done: Tensor,
        acted: Tensor | None = None,
    ) -> None:
        """Learn from finished episodes.

        The rows of a call are one update: the decayed sums are those of one update a row. The
        weights are so only nearly: range, :math:`r_0` and :math:`b`, with the call's unadvised
        rows, are taken once a call, and they are shared once, by :math:`1 - (1 - α)^n` for
        :math:`n` episodes.

        Args:
            arm: Arm of the episode, int64 ``[N, 1]`` or any other shape.
            prob: Probability it was drawn with, same shape.
            episode_return: Undiscounted return, same shape.
            length: Steps of the episode, same shape; unknown where not positive.
            done: Rows at which an episode ended, boolean, same shape, in order of time.
                All other rows are left out.
            acted: Whether advice moved the policy in the episode at all, boolean, same
                shape. Else :math:`d`, :math:`b` and :math:`u` take it for an unadvised one; the
                mean advised return in :math:`v_1` goes by the arm alone. Default: ``None``,
                wherever the arm is above 0.

        Raises:
            ValueError: If the shapes differ.
        """
        shapes = [tuple(value.shape) for value in (arm, prob, episode_return, length, done)]
        if len(set(shapes)) > 1:
            raise ValueError(f"arm, prob, episode_return, length, done: shapes differ, {shapes}.")
        if not arm.numel():
            return
        arm, done = arm.reshape(-1), done.reshape(-1)
        acted = arm > 0 if acted is None else (arm > 0) & acted.reshape(-1)
        prob, value, length = (x.reshape(-1).float() for x in (prob, episode_return, length))
        usable = (value.abs() <= _LARGEST_RETURN) & (prob > 0)
        counted = done & usable
        self.ignored.add_((done & ~usable).sum())
        value, prob = value.where(counted, 0.0), prob.where(counted, 1.0)
        span = self.high - self.low
        self.low.copy_(torch.minimum(self.low, value.amin()))
        self.high.copy_(torch.maximum(self.high, value.amax()))
        # Differences are kept on the scale of returns: they shrink as the range grows.
        self.uplift_sum.mul_(torch.where(span > 0, span / (self.high - self.low), 1.0))
        seen = counted.float()
        index = torch.arange(self.num_arms, device=arm.device)
        chosen = (arm.unsqueeze(-1) == index) * seen.unsqueeze(-1)

        ones, usual = torch.ones_like(value), self._usual()
        recent, forget = forgetting(seen, self.decay)
        timed = (length.isfinite() & (length > 0)).float()
        length = torch.where(timed > 0, length, 0.0)
        for sums, added in (
            (self.counts, ones),
            (self.return_sums, value),
            (self.length_counts, timed),
            (self.length_sums, length),
        ):
            sums.mul_(forget).add_((recent * added) @ chosen)

        advised, alone = seen * acted, seen * ~acted
        self.advised_episodes.add_(advised.sum().long())
        self.episodes.add_(seen.sum())
        weight, fade = forgetting(alone, _BASELINE_DECAY)
        self.baseline_sum.mul_(fade).add_((value * weight).sum())
        self.baseline_count.mul_(fade).add_(weight.sum())

        # Before any reward there is nothing to compare.
        uplift = self._normalised(value, ones) - self._baseline()
        uplift = torch.where(self.high > self.low, uplift, 0.0)
        self.uplift_sum.mul_(forget).add_((uplift * advised * recent).sum())
        self.uplift_count.mul_(forget).add_((advised * recent).sum())
        hits = (advised * (uplift > 0)).flip(0).cumsum(0).flip(0)
        cost = ones if self.whole_length is None else (length / self.whole_length).clamp_max(1.0)
        cost = torch.where(timed > 0, cost, 1.0) * self.arms[arm]
        self.barren.mul_(hits[0] == 0).add_((cost * advised * (hits == 0)).sum())

        self.obtained.add_(value.sum())
        self.inverse_probs.add_((1.0 / prob) @ chosen)
        self.weighted_returns.add_((value / prob) @ chosen)

        loss = (usual - self._normalised(value, ones)) / (prob + self.exploration_ix)
        log_weights = self.log_weights - self.learning_rate * (loss @ chosen)
        if self.sharing:
            kept = seen.sum() * math.log1p(-self.sharing)
            shared = torch.log(-torch.expm1(kept) / self.num_arms)
            shared = shared + torch.logsumexp(log_weights, -1)
            log_weights = torch.logaddexp(log_weights + kept, shared)
        self.log_weights.copy_(log_weights - log_weights.amax())
        self.refresh()

    def regret(self) -> Tensor:
        r"""Estimate the return missed against the best fixed arm, in normalised episodes.

        .. math::
            \max\Bigl(0, \max_k N \frac{\sum_t [k_t = k]\, r_t / p_t}{\sum_t [k_t = k] / p_t}
                - \sum_t r_t\Bigr)

        A self-normalised estimate: what an arm would have returned is known only from the
        episodes that drew it, and the largest of noisy estimates is too large on average.
        """
        known = self.inverse_probs > 0
        mean = self.weighted_returns / torch.where(known, self.inverse_probs, 1.0)
        best = self._normalised(mean, known.float()).amax()
        return (self.episodes * best - self._normalised(self.obtained, self.episodes)).clamp_min(0)

    def regret_bound(self, num_episodes: int, *, num_switches: int = 0) -> float:
        """Bound the expected regret with ``gated=False``, in normalised episodes.

        See :func:`~lore_torchrl.control.regret.exp3_regret_bound`.

        Args:
            num_episodes: Number of episodes.
            num_switches: How often the best arm changes. Default: ``0``.
        """
        return exp3_regret_bound(
            num_episodes,
            num_switches,
            num_arms=self.num_arms,
            least_weight=self._least_weight,
            learning_rate=self.learning_rate,
            exploration=self.exploration,
            exploration_ix=self.exploration_ix,
            sharing=self.sharing,
        )

    def stats(self) -> dict[str, float]:
        """Return numbers for the log; waits for the device."""
        values = {name: getattr(self, name)() for name in ("evidence", "trust", "credit", "regret")}
        values |= {"advised_episodes": self.advised_episodes, "ignored": self.ignored}
        parts = torch.cat((torch.stack([v.float() for v in values.values()]), self.probs()))
        names = (*values, *(f"prob_{arm:g}" for arm in self.arms.tolist()))
        return dict(zip(names, parts.tolist(), strict=True))
