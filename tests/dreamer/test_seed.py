"""The seed decides every global random stream, and a resume goes on with each."""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from tiny_run import planner, tiny_config
from torchrl.testing.mocking_classes import CountingEnv

from lore_torchrl.dreamer.run import build_run, train
from lore_torchrl.envs.batch import batch_rows, seed_all
from lore_torchrl.envs.gym_adapter import make_row


class Drawing:
    """An advisor of the user's own, which draws from the global streams."""

    def __init__(self):
        self.drawn = []

    async def advise(self, requests):
        self.drawn.append((random.random(), np.random.random()))
        return await planner().advise(requests)


@pytest.fixture
def global_streams():
    """Leave the streams of the other tests as they were."""
    state = random.getstate(), np.random.get_state()
    yield
    random.setstate(state[0])
    np.random.set_state(state[1])


def drawn(folder, seed):
    random.seed(), np.random.seed()  # As in a process of its own.
    advisor = Drawing()
    config = tiny_config(folder, total_steps=48, seed=seed)
    train(config, advisor=advisor)
    return advisor.drawn


def test_the_seed_decides_the_streams_of_python_and_numpy(tmp_path, global_streams):
    first, same, other = (
        drawn(tmp_path / str(number), seed) for number, seed in enumerate((3, 3, 4))
    )
    assert len(first) > 1 and first == same
    assert first[0] != other[0]


def test_a_resume_goes_on_with_every_stream(tmp_path, global_streams):
    config = tiny_config(tmp_path / "run", total_steps=64, checkpoint_interval=64)
    train(config, advisor=Drawing())
    following = random.random(), np.random.random(), torch.rand(())
    random.seed(), np.random.seed(), torch.seed()
    build_run(replace(config, resume=config.output_dir), advisor=Drawing()).close()
    assert (random.random(), np.random.random(), torch.rand(())) == following


class Whim(gym.Env):
    """Observes draws from the global streams."""

    observation_space = gym.spaces.Dict(observation=gym.spaces.Box(0.0, 1.0, (2,), np.float32))
    action_space = gym.spaces.Discrete(2)

    def observe(self):
        return {"observation": np.array([random.random(), np.random.random()], np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 0.0, False, False, {}


def make_whim(seed):
    return make_row(lambda pixels: Whim(), seed)


def observed(seed):
    env = batch_rows(make_whim, num_envs=2, seed=seed, parallel=True)
    try:
        return env.reset()["observation"]
    finally:
        env.close()


@pytest.mark.slow
def test_the_seed_decides_the_streams_of_workers_too(global_streams):
    stream = torch.get_rng_state()
    first = observed(3)
    assert torch.equal(torch.get_rng_state(), stream), "that of the run's own process is left alone"
    torch.testing.assert_close(observed(3), first, rtol=0, atol=0)
    assert not torch.equal(first[0], first[1]), "each worker has its own"


def streams_after_building(queue) -> None:
    """Build an environment in this process, and tell whether its global streams moved."""
    seed_all(7)
    expected = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    seed_all(7)
    batch_rows(lambda seed: CountingEnv(), num_envs=2, seed=3).reset()
    queue.put([random.random(), float(np.random.rand()), float(torch.rand(()))] == expected)


def test_a_run_that_is_itself_a_child_keeps_its_streams():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=streams_after_building, args=(queue,))
    child.start()
    assert queue.get(timeout=30)
    child.join(10)
