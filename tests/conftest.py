from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

# Tests are many and small: threads would only get into each other's way.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# The same examples everywhere, and no verdict on how busy the machine is.
settings.register_profile(
    "lore",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("lore")
