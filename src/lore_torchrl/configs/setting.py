"""One setting: its default, what it means, and what it may be."""

from __future__ import annotations

import operator
from dataclasses import field, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

_BOUNDS = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}


# What else is taken for a type.
_ALSO = {int: Integral, float: Real, list: (list, tuple)}


def setting(default: Any, doc: str, **limits: Any) -> Any:
    """Return a dataclass field that carries its documentation and its limits.

    Args:
        default: The default; a class or a function is called for it.
        doc: One or two sentences, with the unit.

    Keyword Args:
        **limits: ``ge``, ``gt``, ``le``, ``lt`` (bounds) or ``among`` (choices). ``None`` is
            not compared: where it is possible, ``doc`` says what it means.
    """
    kind = {"default_factory": default} if callable(default) else {"default": default}
    return field(**kind, metadata={"doc": doc, **limits})


@cache
def _types(group: type) -> dict[str, tuple[type, ...]]:
    """Return the types that each field of a group may have, none where all may be."""
    found = {}
    for name, hint in get_type_hints(group).items():
        union = get_origin(hint) in (Union, UnionType)
        kinds = [get_origin(kind) or kind for kind in (get_args(hint) if union else (hint,))]
        found[name] = () if Any in kinds else tuple(kinds)
    return found


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, _ALSO.get(kind, kind))


class Settings:
    """A group of settings, which are checked when it is made.

    Attributes:
        prefix: Name of the group on the command line, given as keyword of a subclass.

    Raises:
        ValueError: With the full name of the setting, its value and what it must be.
    """

    prefix: ClassVar[str]

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls.prefix = prefix

    def __post_init__(self) -> None:
        for part in fields(self):
            value, limits = getattr(self, part.name), part.metadata
            if kinds := _types(type(self))[part.name]:
                names = ["null" if kind is NoneType else kind.__name__ for kind in kinds]
                fits = any(_fits(value, kind) for kind in kinds)
                self.require(fits, part.name, f"it must be {' or '.join(names)}")
            if value is None:
                continue
            for name, (text, holds) in _BOUNDS.items():
                if name in limits:
                    rule = f"it must be {text} {limits[name]}"
                    self.require(holds(value, limits[name]), part.name, rule)
            if "among" in limits:
                chosen = value if isinstance(value, (list, tuple)) else [value]
                known = {*chosen} <= {*limits["among"]}
                self.require(known, part.name, f"choose from {list(limits['among'])}")

    def full_name(self, name: str) -> str:
        """Return what a field of this group is called on the command line."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def require(self, condition: bool, name: str, rule: str) -> None:
        """Raise a ``ValueError`` unless ``condition`` holds.

        Args:
            condition: Whether the value is possible.
            name: Field of this group.
            rule: What it must be, and what to set instead.
        """
        if not condition:
            value = getattr(self, name)
            value = list(value) if isinstance(value, list) else value
            raise ValueError(f"{self.full_name(name)}={value!r} is impossible: {rule}.")
