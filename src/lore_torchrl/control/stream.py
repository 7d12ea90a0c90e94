"""A random stream that belongs to one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SeededModule(nn.Module):
    """A module with buffers that draws from a random stream of its own.

    The global stream is left alone. ``state_dict`` holds where the stream is. A copy of the
    module begins at the seed, since a generator cannot be copied, and so does one that is
    moved to another device, which has streams of its own.

    Args:
        seed: Seed of the stream.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.__dict__["_generator"] = None

    def _generator_on(self, device: torch.device) -> torch.Generator:
        # There is no generator on the meta device, where nothing is drawn.
        device = torch.device("cpu") if device.type == "meta" else device
        if self._generator is None or self._generator.device != device:
            self.__dict__["_generator"] = torch.Generator(device).manual_seed(self.seed)
        return self._generator

    def get_extra_state(self) -> Tensor:
        """Return the state of the random stream, for ``state_dict``."""
        return self._generator_on(next(self.buffers()).device).get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Go on with a saved random stream; one of another kind of device is left out."""
        generator = self._generator_on(next(self.buffers()).device)
        if state.numel() == generator.get_state().numel():
            generator.set_state(state.cpu())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generator": None}
