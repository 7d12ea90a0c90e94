"""An advisor's own state in a checkpoint, and whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl import logger as torchrl_logger

from lore_torchrl.advisors.recorded import RecordingAdvisor


def save_advisor(advisor: Any) -> dict[str, Any]:
    """Return an advisor's state and its kind; nothing for one that has no state.

    Args:
        advisor: The advisor.
    """
    if not hasattr(advisor, "state_dict"):
        return {}
    return {"advisor": advisor.state_dict(), "advisor_kind": _kind(advisor)}


def restore_advisor(advisor: Any, state: Mapping[str, Any]) -> None:
    """Restore an advisor's state; one of another kind than the saved one begins anew.

    Args:
        advisor: The advisor.
        state: What holds the entries of :func:`save_advisor`.
    """
    if "advisor" not in state or not hasattr(advisor, "load_state_dict"):
        return
    # Earlier checkpoints do not tell whose state it is.
    found, saved = _kind(advisor), state.get("advisor_kind", _kind(advisor))
    if found == saved:
        advisor.load_state_dict(state["advisor"])
    else:
        torchrl_logger.warning(f"The advisor was {saved} and is {found}: it begins anew.")


def _kind(advisor: Any) -> str:
    """Name the classes of an advisor and those that it wraps; a recorder is none of them."""
    if isinstance(advisor, RecordingAdvisor):
        return _kind(advisor.advisor)
    parts = getattr(advisor, "__dict__", {})
    inner = [parts[name] for name in ("advisor", "before", "after") if name in parts]
    return "/".join((type(advisor).__name__, *map(_kind, inner)))
