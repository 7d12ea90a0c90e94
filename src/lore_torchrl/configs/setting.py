"""One setting: its default, what it means, and what it may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any, ClassVar

_BOUNDS = {
    "ge": ("at least", lambda value, bound: value >= bound),
    "gt": ("above", lambda value, bound: value > bound),
    "le": ("at most", lambda value, bound: value <= bound),
    "lt": ("below", lambda value, bound: value < bound),
}


def setting(default: Any, doc: str, *, was: str | None = None, **limits: Any) -> Any:
    """Return a dataclass field that carries its documentation and its limits.

    Args:
        default: The default; a class or a function is called for it.
        doc: One or two sentences, with the unit.

    Keyword Args:
        was: Its name in earlier versions; :func:`old_names` refuses it and names the new one.
            Default: ``None``.
        **limits: ``ge``, ``gt``, ``le``, ``lt`` (bounds) or ``among`` (choices). ``None`` is
            not compared: where it is possible, ``doc`` says what it means.
    """
    kind = {"default_factory": default} if callable(default) else {"default": default}
    return field(**kind, metadata={"doc": doc, "was": was, **limits})


def old_names(group: Settings) -> Iterator[tuple[str, str]]:
    """Yield the full old and new name of each renamed setting of a group and those in it.

    Args:
        group: Such as a ``TrainConfig()``.
    """
    for part in fields(group):
        value, old = getattr(group, part.name), part.metadata.get("was")
        if isinstance(value, Settings):
            yield from old_names(value)
        elif old is not None:
            yield tuple(
                f"{group.prefix}.{name}" if group.prefix else name for name in (old, part.name)
            )


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


class Settings:
    """A group of settings, which are checked when it is made.

    Attributes:
        prefix: Name of the group on the command line.
    """

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Refuse a value outside its limits, by its full name."""
        for part in fields(self):
            value = getattr(self, part.name)
            for name, (text, holds) in _BOUNDS.items():
                bound = part.metadata.get(name)
                if bound is not None and value is not None:
                    self.require(holds(value, bound), part.name, f"it must be {text} {bound}")
            choices = part.metadata.get("among")
            if choices is not None:
                known = value is None or set(value if isinstance(value, list) else [value]) <= {
                    *choices
                }
                self.require(known, part.name, f"choose from {list(choices)}")

    def require(self, condition: bool, name: str, rule: str) -> None:
        """Raise unless ``condition`` holds, with the full name and value of a setting.

        Args:
            condition: Whether the value is possible.
            name: Field of this group.
            rule: What it must be.
        """
        value = getattr(self, name)
        if isinstance(value, list):
            value = list(value)
        check(condition, f"{self.prefix}.{name}" if self.prefix else name, value, rule)
