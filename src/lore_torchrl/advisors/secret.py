"""A string that does not show itself."""

from __future__ import annotations

import os

from lore_torchrl.advisors.redaction import remember


class Secret:
    """An API key that no repr, log line or error shows.

    :func:`~lore_torchrl.advisors.redaction.redact` hides it from now on.

    Pickled, one that came from an environment variable travels as the variable's name and
    is read again at the other end; so a checkpoint or a worker's start-up file holds none.
    One given as text has to travel as text.

    Args:
        value: The key.

    Keyword Args:
        variable: Environment variable that it came from. Default: none.

    Raises:
        ValueError: If it holds what no HTTP header may: spaces, line ends, letters beyond
            ASCII. The message does not show it.

    Examples:
        >>> from lore_torchrl.advisors.redaction import redact
        >>> secret = Secret("sk-1234")
        >>> secret, redact("bad key sk-1234")
        (Secret('***'), 'bad key [redacted]')
    """

    __slots__ = ("_value", "_variable")

    def __init__(self, value: str, *, variable: str | None = None) -> None:
        if not all("!" <= char <= "~" for char in value):
            raise ValueError(
                f"The API key{f' in {variable}' if variable else ''} holds characters that no "
                "HTTP header may, such as spaces or line ends."
            )
        self._value = value
        remember(value)
        self._variable = variable

    @classmethod
    def from_env(cls, variable: str) -> Secret | None:
        """Return the key in an environment variable, ``None`` where it is unset or empty."""
        value = os.environ.get(variable, "").strip()
        return cls(value, variable=variable) if value else None

    def reveal(self) -> str:
        """Return the key itself, for the one header that needs it."""
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "Secret('***')"

    def __reduce__(self) -> tuple:
        if self._variable is not None:
            return _from_variable, (self._variable,)
        return Secret, (self._value,)


def _from_variable(variable: str) -> Secret:
    return Secret.from_env(variable) or Secret("", variable=variable)
