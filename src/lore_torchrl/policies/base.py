"""The protocol between LoRe's modules and the kind of policy that they advise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution


class PolicyKind(nn.Module, ABC):
    r"""All that depends on whether a policy is categorical or Gaussian.

    An advisor proposes a distribution over :math:`K` *named* actions, as logits ``[*B, K]``.
    A *policy* is what the kind's own :meth:`of` and :meth:`read` return: something with
    ``detach()``, ``to(dtype)`` and ``dtype``. Nothing here waits for the device or makes a
    shape depend on values; random numbers are drawn in :meth:`draw`, :meth:`act` and
    :meth:`sample` alone.

    A subclass must keep three properties, which ``tests/policies`` checks for every kind:

    - :meth:`combine` keeps :math:`\mathrm{KL}(\pi_{mix} \| \pi) \le` ``max_kl`` for every policy,
      advice and weight, and returns rows of weight 0 unchanged, bitwise.
    - :meth:`draw` and :meth:`act` consume the random numbers of the stock actor's own draw, and
      give its action, bitwise, where the mixture is the policy.
    - What the policy rules out stays ruled out.
    """

    mix_keys: tuple[str, ...]
    """Entries that a mixture is written under, one for each of :meth:`entries`."""

    @abstractmethod
    def check(self, actor: TensorDictModuleBase) -> None:
        """Raise a ``ValueError`` if an actor's policy is of another kind; see :func:`head_of`."""

    def check_mixing(self, mode: str, *, aligned: bool) -> None:
        """Raise a ``ValueError`` if the kind cannot be mixed in a mode, or be aligned with."""

    @abstractmethod
    def num_actions(self, policy: Any) -> int:
        """Return the number :math:`K` of named actions that advice on a policy speaks of."""

    @abstractmethod
    def of(self, distribution: Distribution) -> Any:
        """Return the policy of an actor's distribution, in float32; the gradient passes."""

    @abstractmethod
    def read(self, *entries: Tensor) -> Any:
        """Return the policy of what an actor or a mixer has written; the gradient passes."""

    @abstractmethod
    def entries(self, policy: Any) -> tuple[Tensor, ...]:
        """Return what is written of a policy, each ``[*B, A]``."""

    @abstractmethod
    def precise(self, policy: Any) -> Any:
        """Return a policy in float32 or better; one that is so already is returned as it is."""

    @abstractmethod
    def entropy(self, policy: Any) -> Tensor:
        """Return the entropy on a scale from 0 to 1, ``[*B, 1]``."""

    @abstractmethod
    def as_policy(self, tempered: Tensor, policy: Any) -> Any:
        """Return advice ``[*B, K]`` as a policy that does nothing that ``policy`` rules out."""

    @abstractmethod
    def combine(
        self,
        policy: Any,
        tempered: Tensor,
        weight: Tensor,
        *,
        max_kl: float,
        mode: str,
        excluded: Tensor | None = None,
    ) -> Any:
        """Return a policy leaned towards advice, in float32 or better, within ``max_kl`` nats.

        The gradient passes the policy alone. ``tempered`` is finite, centered advice divided by its
        temperature, ``[*B, K]``; ``weight`` includes confidence and is not negative, ``[*B, 1]``;
        ``mode`` is that of :class:`~lore_torchrl.modules.LogitMixer`; ``excluded`` are the actions
        that the advice gives no probability, boolean ``[*B, K]``.
        """

    @abstractmethod
    def draw(self, mixture: Any, policy: Any, random: bool) -> tuple[Tensor, Tensor]:
        """Pick from mixture and policy, of one dtype, with the same random numbers.

        Return what the mixture picks, for :meth:`act`, and where its named action is not the one
        that the policy would have picked, boolean ``[*B, 1]``. Not ``random`` picks the mode.
        """

    @abstractmethod
    def act(self, head: nn.Module, mixture: Any, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Return the action of what :meth:`draw` picked, ``[*B, A]``, and its log-probability."""

    @abstractmethod
    def divergence(self, first: Any, second: Any) -> Tensor:
        """Return KL(first, second) of two policies, nats, ``[*B]``."""

    @abstractmethod
    def log_prob(self, policy: Any, action: Tensor) -> Tensor:
        """Return the log-probability of executed actions ``[*B, A]``, ``[*B]``."""

    @abstractmethod
    def expected_log_prob(self, policy: Any, prior: Any) -> Tensor:
        """Return the prior's log-probability of an action, expected under the policy, ``[*B]``."""

    @abstractmethod
    def nearest(self, actions: Tensor) -> Tensor:
        """Return the index of the named action of executed ones ``[*B, A]``, ``[*B, 1]``."""

    @abstractmethod
    def choices(self, policy: Any) -> Tensor:
        """Return the probability that each named action is the nearest one, ``[*B, K]``."""

    @abstractmethod
    def as_advice(self, policy: Any) -> Tensor:
        """Return a policy as logits over the named actions, ``[*B, K]``, for :meth:`as_policy`."""

    @abstractmethod
    def sample(self, policy: Any, number: int) -> Tensor:
        """Return actions drawn from a policy, ``[number, *B, A]``, without gradient."""

    @abstractmethod
    def fit(self, actions: Tensor, weight: Tensor) -> Any:
        """Return the likeliest policy of actions ``[N, *B, A]``.

        The weights ``[N, *B, 1]`` are not negative and sum to one over the first dimension.
        """

    @abstractmethod
    def blend(self, first: Any, second: Any, weight: Tensor | float) -> Any:
        """Return the policy that takes an action of ``first`` with probability ``weight``.

        The others are of ``second``; the weight is a number or ``[*B, 1]``.
        """

    @abstractmethod
    def disagreement(
        self, ensemble: nn.Module, state: Tensor, belief: Tensor, policy: Any
    ) -> Tensor:
        """Return what a :class:`~lore_torchrl.modules.LatentDisagreement` says, ``[*B, 1]``."""


def head_of(actor: TensorDictModuleBase) -> TensorDictModuleBase:
    """Return the probabilistic module that a stock actor ends in.

    Raises:
        ValueError: If that does not write ``"action"``.
        TypeError: If the actor does not end in one, as a
            :class:`~lore_torchrl.modules.LoReActor` does not.
    """
    if not isinstance(actor, ProbabilisticTensorDictSequential):
        raise TypeError(
            "The actor must be the stock one, a ProbabilisticTensorDictSequential, got "
            f"{type(actor).__name__}. A LoReActor only acts: losses and imagination are given the "
            "stock actor that it wraps."
        )
    if "action" not in actor[-1].out_keys:
        raise ValueError(
            f"The actor must write 'action', as TorchRL's Dreamer actors do, got {actor.out_keys}."
        )
    return actor[-1]
