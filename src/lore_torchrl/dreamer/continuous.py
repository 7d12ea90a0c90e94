"""What a run with continuous actions cannot have."""

from __future__ import annotations

from lore_torchrl.configs import LoReConfig


def check_continuous(config: LoReConfig) -> None:
    """Refuse settings that need the agent's own actions to be named ones.

    Advice on continuous actions is a distribution over the describer's anchors, and the
    policy a Gaussian.

    Args:
        config: LoRe's settings.

    Raises:
        ValueError: If one of them is on; all that are, are named, each with the reason.
    """
    wrong = {
        "lore.mixer.mode=logit (two Gaussians added up are none: the mixture has no KL in closed "
        "form)": config.mixer.mode != "logit",
        "lore.temperature.rate=0 (a Gaussian policy has no probabilities of the anchors to align "
        "the advice with)": config.temperature.rate > 0,
    }
    needed = [setting for setting, on in wrong.items() if on]
    if needed:
        raise ValueError(f"This environment's actions are continuous: set {', '.join(needed)}.")
