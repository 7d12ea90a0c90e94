"""How an impossible value is refused."""

from __future__ import annotations


def check(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise unless ``condition`` holds.

    Args:
        condition: Whether the value is possible.
        name: Full name of the setting.
        value: What it was set to.
        rule: What it must be, and what to set instead.

    Raises:
        ValueError: With name, value and rule.
    """
    if not condition:
        raise ValueError(f"{name}={value!r} is impossible: {rule}.")
