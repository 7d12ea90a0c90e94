"""From configuration to advisor and service, and their numbers in the log."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torchrl._utils import logger as torchrl_logger

from lore_torchrl.advisors.base import Advisor
from lore_torchrl.advisors.redaction import remember, secrets_of
from lore_torchrl.advisors.scripted import Planner


def build_advisor(config: Any, *, planner: Planner | None, seed: int) -> Advisor:
    """Build an advisor from its configuration.

    Args:
        config: Mapping or dataclass with ``_target_``, the import path of the advisor's
            class, and its keywords, which may be advisors again. Every class that takes
            a planner or a seed is handed them.

    Keyword Args:
        planner: The environment adapter's, ``None`` where it has none.
        seed: Seed of the advisors' own random streams.

    Raises:
        ValueError: If an advisor needs a planner and there is none.
        ImportError: If Hydra is not installed.
    """
    try:
        from hydra.utils import instantiate
    except ImportError as err:
        raise ImportError(
            "Advisors are built from configuration by Hydra: pip install 'lore-torchrl[train]'."
        ) from err
    settings = dict(config) if isinstance(config, Mapping) else asdict(config)
    return instantiate(_handed(settings, {"planner": planner, "seed": seed}))


def _handed(settings: Any, extra: Mapping[str, Any]) -> Any:
    """Add ``extra`` to each class's settings, as far as its ``__init__`` takes them."""
    if not isinstance(settings, Mapping):
        return settings
    from hydra.utils import get_class

    handed = {name: _handed(value, extra) for name, value in settings.items()}
    if "_target_" in handed:
        accepted = inspect.signature(get_class(handed["_target_"]).__init__).parameters
        if "planner" in accepted and extra["planner"] is None:
            raise ValueError(
                f"{handed['_target_']} needs a planner, and this environment's adapter has none: "
                "choose another advisor, such as advisor=vllm, or give it a make_planner()."
            )
        handed |= {name: value for name, value in extra.items() if name in accepted}
    return handed


def announce(advisor: Advisor) -> None:
    """Log who advises: class, model and the hash of the prompt, as far as there are any.

    The secrets that the advisor holds are hidden from here on.
    """
    remember(*secrets_of(advisor))
    facts = {name: getattr(advisor, name, None) for name in ("model", "prompt_hash")}
    told = "".join(f", {name} {value}" for name, value in facts.items() if isinstance(value, str))
    torchrl_logger.info(f"Advisor: {type(advisor).__name__}{told}")
