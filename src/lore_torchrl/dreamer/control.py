"""What collected steps tell the bandit and the calibrator of PriorNet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TrainerHookBase

from lore_torchrl import keys
from lore_torchrl.advisors.base import Advice
from lore_torchrl.control import ConfidenceCalibrator, EpisodeShare
from lore_torchrl.modules import PriorNet
from lore_torchrl.replay.late_advice import OpenQuestions

# Mean KL(mixed policy, policy) below which advice had no say in a stretch, nats.
_LEAST_KL = 0.01
# Answers at which a second trial may be worth something.
_FIRST_RETRIAL = 20.0


class AdviceControlHook(TrainerHookBase):
    """Show each collector batch to what measures the advice.

    The bandit gets the finished stretches, each with the reward that fell in it. PriorNet's
    calibrator gets the rows whose answer was bought at that very step: what the network
    said there, it said without having seen the answer. The outcome of such a row is what it is
    trained to claim: the adviser's confidence where the first choices agree, and 0 where not.
    Where answers come late, in async mode, what it said is kept until they do.

    Args:
        share: What holds the bandit's arms, or ``None``. Needs ``step_count``.
        prior_net: The network, or ``None``.

    Keyword Args:
        answers: Returns how many answers have been bought so far. Each time they have grown
            by ``retrial_growth`` the bandit is granted a new trial, since advice that is
            averaged over more answers is not the advice that was tried. Default: ``None``.
        exhausted: Returns whether no more answers can be bought; when they no longer can,
            the bandit is granted a last, whole trial. Default: ``None``.
        retrial_growth: Factor above 1, or ``None`` for never; needs ``answers``.
            Default: ``None``.
        device: Where both live. Default: ``"cpu"``.

    Raises:
        ValueError: If there is ``retrial_growth`` but not ``answers``.
    """

    def __init__(
        self,
        share: EpisodeShare | None,
        prior_net: PriorNet | None,
        *,
        answers: Callable[[], float] | None = None,
        exhausted: Callable[[], bool] | None = None,
        retrial_growth: float | None = None,
        device: torch.device | str = "cpu",
    ):
        if retrial_growth is not None and answers is None:
            raise ValueError(
                f"retrial_growth={retrial_growth} grants trials as answers are bought: pass "
                "answers, which counts them, or retrial_growth=None."
            )
        self.share = share
        self.prior_net = prior_net
        self.answers = answers
        self.exhausted = exhausted
        self.retrial_growth = retrial_growth
        self._next_trial = _FIRST_RETRIAL
        self.device = torch.device(device)
        self._running: torch.Tensor | None = None
        self._calibrator: ConfidenceCalibrator | None = None
        # Confidence and preferred action of PriorNet where a question was asked.
        self._open = OpenQuestions()
        # Steps at which PriorNet's advice stood in for a call, whatever weight it was left.
        self.served = torch.zeros((), dtype=torch.long)

    def __call__(self, batch: TensorDictBase) -> None:
        """Take note of a batch ``[E, T]``."""
        if self.share is not None:
            self._tell(batch)
            if self.retrial_growth is not None and self._trial_is_due():
                self.share.bandit.grant(last=self._next_trial == math.inf)
        if self.prior_net is not None:
            self.served += (batch.get(keys.ORIGIN) == keys.ORIGIN_PRIOR_NET).sum().cpu()
            if self.prior_net.calibrator is not None:
                self._calibrate(batch)

    def _trial_is_due(self) -> bool:
        used_up = self.exhausted is not None and self.exhausted()
        if self._next_trial == math.inf and not used_up:  # resumed with a larger budget
            self._next_trial = self.answers() * self.retrial_growth
        if self.answers() >= self._next_trial:
            self._next_trial = self.answers() * self.retrial_growth
            return True
        if used_up and self._next_trial < math.inf:
            self._next_trial = math.inf
            return True
        return False

    def _tell(self, batch: TensorDictBase) -> None:
        reward, done, steps = (
            batch.get(("next", key)).squeeze(-1).cpu() for key in ("reward", "done", "step_count")
        )
        ends = self.share.ends(done, steps)
        # Of the stretch under way in each environment: return, length and divergence.
        steps = torch.stack((reward, torch.ones_like(reward), batch.get(keys.KL).squeeze(-1).cpu()))
        if self._running is None:
            self._running = torch.zeros(3, len(reward))
        sums = torch.zeros_like(steps)
        for step in range(reward.shape[1]):
            self._running += steps[..., step]
            sums[..., step] = self._running
            self._running[:, ends[:, step]] = 0.0
        returns, lengths, divergence = sums
        acted = divergence > _LEAST_KL * lengths
        arm, prob = (batch.get(key).squeeze(-1) for key in (keys.ARM, keys.ARM_PROB))
        # By time: what ended earlier counts earlier.
        entries = (
            value.transpose(0, 1).to(self.device)
            for value in (arm, prob, returns, lengths, ends, acted)
        )
        self.share.bandit.observe(*entries)

    def _calibrate(self, batch: TensorDictBase) -> None:
        fresh = batch.get(keys.MASK) & (batch.get(keys.ADVICE_ID) > 0)
        said = batch.get(keys.PRIOR_NET_LOGITS).argmax(-1, keepdim=True)
        right = (said == batch.get(keys.PRIOR_LOGITS).argmax(-1, keepdim=True)).float()
        claimed = batch.get(keys.CONFIDENCE)
        confidence = batch.get(keys.PRIOR_NET_CONFIDENCE)
        rows = confidence, right * claimed, fresh & claimed.isfinite()
        self.prior_net.calibrator.update(*(value.to(self.device) for value in rows))
        self._open.note(
            batch, lambda _, env, time: (confidence[env, time].item(), said[env, time].item())
        )

    def late(self, answers: Iterable[tuple[int, Advice | None]]) -> None:
        """Show PriorNet's calibrator the answers that came after their steps.

        Args:
            answers: By question, as from
                :meth:`~lore_torchrl.service.AdviceService.take_late`.
        """
        if self.prior_net is None or self.prior_net.calibrator is None:
            return
        taken = self._open.take(answers)
        if not taken:
            return
        confidence = torch.tensor([[sure] for (sure, _), _ in taken], device=self.device)
        said = torch.tensor([action for (_, action), _ in taken])
        preferred = torch.tensor([advice.logits for _, advice in taken]).argmax(-1)
        claimed = torch.tensor([advice.confidence for _, advice in taken])
        outcome = ((said == preferred) * claimed).to(confidence).unsqueeze(-1)
        self.prior_net.calibrator.update(confidence, outcome, torch.ones_like(outcome))

    def gauges(self) -> dict[str, float]:
        """Return the numbers for the log."""
        values = {}
        if self.share is not None:
            stats = self.share.bandit.stats()
            values |= {f"bandit/{name}": value for name, value in stats.items()}
        if self.prior_net is not None:
            values["prior_net/served"] = float(self.served)
            if self.prior_net.calibrator is not None:
                error = self.prior_net.calibrator.expected_calibration_error()
                values["prior_net/ece"] = error.item()
        if self._calibrator is not None:
            error = self._calibrator.expected_calibration_error(keys.ADVISER_GROUP)
            values["advice/ece"] = error.item()
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the count; bandit and calibrator are saved with the loss."""
        return {"served": int(self.served), "next_trial": self._next_trial}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count."""
        self.served.fill_(state_dict["served"])
        self._next_trial = state_dict["next_trial"]

    def register(self, trainer: Trainer, name: str = "advice_control") -> None:
        """Attach to the trainer's batch slot; the loss measures the adviser's confidence."""
        outcomes = getattr(trainer.loss_module, "outcomes", None)
        self._calibrator = None if outcomes is None else outcomes.calibrator
        trainer.register_op("batch_process", self)
        trainer.register_module(name, self)
