"""What depends on the kind of a policy: categorical, or Gaussian with named anchor actions."""

from __future__ import annotations

from lore_torchrl.policies.base import PolicyKind
from lore_torchrl.policies.categorical import CategoricalPolicy
from lore_torchrl.policies.gaussian import Gaussian, GaussianPolicy

__all__ = ["CategoricalPolicy", "Gaussian", "GaussianPolicy", "PolicyKind"]
