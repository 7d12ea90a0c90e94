"""Situations that are near enough to share advice: a coarse key, or a near latent."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike


class Neighbourhood:
    """An index from coarse keys and latents to the exact keys of situations.

    Under a coarse key the highest number comes first. Latents are compared by Euclidean
    distance; the search looks at all of them, which suits the thousands of answers that
    a budget buys. They say something only about the world model that made them.

    Args:
        radius: Largest distance at which two latents are neighbours; ``None`` for no
            search by latents. Default: ``None``.

    Raises:
        ValueError: If ``radius`` is not a positive finite number.

    Examples:
        >>> near = Neighbourhood(radius=1.0)
        >>> near.add("a", 1, coarse="room 1", latent=[0.0, 0.0])
        >>> near.add("b", 2, coarse="room 1", latent=[0.0, 3.0])
        >>> near.find(coarse="room 1")
        ['b', 'a']
        >>> near.find(latent=[0.0, 0.5])
        ['a']
    """

    def __init__(self, radius: float | None = None) -> None:
        if radius is not None and not (math.isfinite(radius) and radius > 0):
            raise ValueError(
                f"radius must be a positive finite distance, got {radius}. "
                "Use None for no search by latents."
            )
        self.radius = radius
        self._coarse: dict[str, dict[str, int]] = {}  # its exact keys and their numbers
        self._latents: dict[str, np.ndarray] = {}
        self._places: dict[str, str] = {}  # exact key to coarse key
        self._tables: dict[int, tuple[list[str], np.ndarray]] = {}

    def add(
        self,
        key: str,
        number: int,
        *,
        coarse: str | None = None,
        latent: ArrayLike | None = None,
    ) -> None:
        """Enter ``key``, anew if it is known.

        Args:
            key: Exact key.
            number: Higher for a later answer.
            coarse: Its coarse key. Default: none.
            latent: Its latent, ``[D]``. Default: none. One that is not finite is left out.

        Raises:
            ValueError: If ``latent`` is not a vector.
        """
        self.drop(key)
        if coarse is not None:
            self._coarse.setdefault(coarse, {})[key] = number
            self._places[key] = coarse
        vector = None if latent is None else as_vector(latent)
        if self.radius is not None and vector is not None:
            self._latents[key] = vector
            self._tables.pop(len(vector), None)

    def drop(self, key: str) -> None:
        """Forget ``key``, if it is known."""
        coarse = self._places.pop(key, None)
        if coarse is not None:
            del self._coarse[coarse][key]
            if not self._coarse[coarse]:
                del self._coarse[coarse]
        latent = self._latents.pop(key, None)
        if latent is not None:
            self._tables.pop(len(latent), None)

    def find(self, *, coarse: str | None = None, latent: ArrayLike | None = None) -> list[str]:
        """Return the neighbours' exact keys, best first.

        Args:
            coarse: Coarse key of the situation; its latest neighbour leads the list.
                Default: none.
            latent: Latent of the situation, ``[D]``; its neighbours follow by distance.
                Default: none.

        Raises:
            ValueError: If ``latent`` is not a vector.
        """
        numbers = {} if coarse is None else self._coarse.get(coarse, {})
        found = sorted(numbers, key=numbers.__getitem__, reverse=True)
        vector = None if latent is None or self.radius is None else as_vector(latent)
        if vector is not None:
            keys, table = self._table(len(vector))
            # Another program's numbers may lie further away than a float32 tells.
            with np.errstate(over="ignore"):
                distances = np.sqrt(((table - vector) ** 2).sum(1))
            order = np.argsort(distances, kind="stable")
            found += [keys[i] for i in order if distances[i] <= self.radius]
        return found

    def _table(self, length: int) -> tuple[list[str], np.ndarray]:
        # By length: another world model that wrote into the same store is no neighbour.
        if length not in self._tables:
            keys = [key for key, latent in self._latents.items() if len(latent) == length]
            rows = [self._latents[key] for key in keys]
            table = np.stack(rows) if rows else np.zeros((0, length), dtype=np.float32)
            self._tables[length] = keys, table
        return self._tables[length]


def as_vector(latent: ArrayLike) -> np.ndarray | None:
    """Return ``latent`` as a float32 vector of its own, ``None`` if it is not finite.

    Args:
        latent: Numbers of shape ``[D]``.

    Raises:
        ValueError: If it has another shape.
    """
    vector = np.array(latent, dtype=np.float32)
    if vector.ndim != 1 or not len(vector):
        raise ValueError(f"A latent must be a vector [D], got shape {vector.shape}. Flatten it.")
    return vector if np.isfinite(vector).all() else None
