from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from lore_torchrl.envs.picture import encode_png


def decode_png(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


def test_pixels_survive_the_file():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(decode_png(encode_png(pixels)), pixels)


def test_a_view_is_drawn_with_the_agent_facing_up():
    pytest.importorskip("minigrid")
    from lore_torchrl.envs.minigrid import MiniGridDescriber

    view = np.ones((7, 7, 3), dtype=np.uint8)
    view[..., 1:] = 0
    view[0, 0] = (0, 0, 0)
    view[5, 2] = (8, 1, 0)
    seen = {"image": view, "direction": np.array([0]), "mission": "go"}
    drawn = decode_png(MiniGridDescriber(image=True).request(0, seen).image)
    assert drawn.shape == (7 * 24, 7 * 24, 3)
    # The goal, two rows from the top, is green; the agent, bottom middle, is red and
    # narrows upwards.
    assert drawn[2 * 24 + 12, 5 * 24 + 12].argmax() == 1
    agent = drawn[6 * 24 :, 3 * 24 : 4 * 24].astype(int)
    red = (agent[..., 0] > agent[..., 1] + 50).sum(1)
    assert red[:12].sum() < red[12:].sum()
    assert MiniGridDescriber().request(0, seen).image is None
