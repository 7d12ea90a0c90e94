"""What a run with continuous actions cannot have."""

from __future__ import annotations

from lore_torchrl.configs import LoReConfig


def check_continuous(config: LoReConfig) -> None:
    """Refuse settings that need the agent's own actions to be named ones.

    Advice on continuous actions is a distribution over the describer's anchors, and the
    policy a Gaussian: there is no probability of a named action.

    Args:
        config: LoRe's settings.

    Raises:
        ValueError: If one of them is on; all that are, are named.
    """
    wrong = {
        "lore.loss.beta_imagine_max=0": config.loss.beta_imagine_max > 0,
        "lore.loss.imagine_bonus_weight=0": config.loss.imagine_bonus_weight > 0,
        "lore.mixer.mode=logit": config.mixer.mode != "logit",
        "lore.temperature.rate=0": config.temperature.rate > 0,
    }
    needed = [setting for setting, on in wrong.items() if on]
    if needed:
        raise ValueError(f"This environment's actions are continuous: set {', '.join(needed)}.")
