"""TorchRL's own dreamer_v3 recipe, as the wheel ships it, with LoRe put in.

    python examples/torchrl_recipe.py             # CartPole, with advice
    python examples/torchrl_recipe.py calls=0     # the recipe as it is
    python examples/torchrl_recipe.py --config-name torchrl_recipe_minigrid

Its functions are used as they are. In a copy of the recipe's ``train.py`` the same changes are
the lines that ``docs/torchrl_recipe.md`` lists.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import hydra
import numpy as np
import torch
import torchrl
from omegaconf import DictConfig
from torchrl.envs import GymWrapper

from lore_torchrl import AdviceRequest, LoRe, LoReConfig
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.configs import CallsConfig
from lore_torchrl.envs.minigrid import MiniGrid, MiniGridDescriber, MiniGridPlanner
from lore_torchrl.envs.minigrid.environment import one_hot_view

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")


class CartPoleDescriber:
    """Tells how the pole leans; states with equal keys share an answer."""

    in_keys = ("observation",)
    actions = ("push the cart left", "push the cart right")

    def observe(self, row, observation, action, *, reset):
        """Remember nothing."""

    def cache_key(self, row, observation):
        """Return angle and angular velocity, rounded."""
        _, _, angle, velocity = observation["observation"]
        return f"{angle:.2f},{velocity:.1f}"

    def abstract_state(self, row, observation):
        """Return the side to which the pole is falling."""
        _, _, angle, velocity = observation["observation"]
        return "right" if angle + velocity / 4 > 0 else "left"

    def request(self, row, observation):
        """Return the question."""
        _, _, angle, velocity = (float(value) for value in observation["observation"])
        return AdviceRequest(
            f"The pole leans {angle:.2f} rad to the right, turning right at {velocity:.1f} rad/s.",
            self.actions,
            self.cache_key(row, observation),
            facts={"angle": angle, "velocity": velocity},
        )


def push_under(request: AdviceRequest) -> list[float]:
    """Push the cart to the side to which the pole is falling."""
    falls_right = request.facts["angle"] + request.facts["velocity"] / 4 > 0
    return [float(not falls_right), float(falls_right)]


class OneHotView(gym.ObservationWrapper):
    """Writes the view as the vector that the recipe's encoder reads, beside the view itself."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        vector = gym.spaces.Box(0.0, 1.0, (1033,), np.float32)
        spaces = {**env.observation_space.spaces, "observation": vector}
        self.observation_space = gym.spaces.Dict(spaces)

    def observation(self, observation: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return view, direction and vector."""
        view, direction = (torch.as_tensor(observation[key]) for key in ("image", "direction"))
        return {**observation, "observation": one_hot_view(view, direction).numpy()}


def make_minigrid(*, seed: int | None, env_index: int, num_envs: int, env_id: str) -> GymWrapper:
    """Make one environment; the recipe seeds it."""
    return GymWrapper(OneHotView(MiniGrid(env_id).make_gym()))


class DoorKeyDescriber(MiniGridDescriber):
    """The describer of views, for one mission that the environment does not repeat."""

    in_keys = ("image", "direction")
    mission = "use the key to open the door and then get to the goal"

    def request(self, row, observation):
        """Return the question."""
        return super().request(row, {**observation, "mission": self.mission})

    def cache_key(self, row, observation):
        """Return the key of what is seen."""
        return super().cache_key(row, {**observation, "mission": self.mission})

    def abstract_state(self, row, observation):
        """Return what is carried, what is ahead, and where things lie."""
        return super().abstract_state(row, {**observation, "mission": self.mission})


def load_recipe() -> ModuleType:
    """Import the recipe's train.py out of the installed wheel; its folder is no package."""
    folder = Path(torchrl.__file__).parent.parent / "sota-implementations" / "dreamer_v3"
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is missing: install torchrl 0.14 as a wheel.")
    sys.path.insert(0, str(folder))
    import train

    return train


def add_lore(recipe: ModuleType, config: DictConfig) -> None:
    """Put LoRe into the functions of the recipe."""
    build_learner, build_collection = recipe._build_learner, recipe._build_collection
    serial, select = recipe.SerialEnv, recipe.SelectTransform

    def learner_with_advice(*args, **kwargs):
        learner = build_learner(*args, **kwargs)
        cartpole = config.env.name.startswith("CartPole")
        lore = LoRe(
            LoReConfig(calls=CallsConfig(budget=config.calls)),
            actor=learner.actor_loss.actor_model,
            value=learner.value_loss.value_model,
            advisor=ScriptedAdvisor(push_under if cartpole else MiniGridPlanner()),
            describer=CartPoleDescriber() if cartpole else DoorKeyDescriber(),
            seed=config.env.seed,
        )
        # 1. The environments ask for advice, and replay keeps it.
        recipe.SerialEnv = lambda *envs: lore.advise(serial(*envs))
        recipe.SelectTransform = partial(select, *lore.selected_keys)
        # 2. The policy that collects mixes it in; evaluation keeps the stock actor.
        advised = recipe.build_real_world_actor(
            world_model=learner.world_model, actor_model=lore.policy()
        )

        def collection(config, device, learner, *args, **kwargs):
            *args, hook = args

            def observe(batch):
                lore.observe(batch)
                hook(batch)

            learner = learner._replace(real_world_actor=advised)
            return build_collection(config, device, learner, *args, observe, **kwargs)

        recipe._build_collection = collection
        # 3. The loss learns from it.
        recipe.DreamerV3Loss = lore.loss
        recipe.lore = lore
        return learner

    recipe._build_learner = learner_with_advice


@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="torchrl_recipe")
def main(config: DictConfig) -> None:
    """Run the recipe."""
    recipe = load_recipe()
    if config.calls:
        add_lore(recipe, config)
    recipe.main.__wrapped__(config)
    if config.calls:
        with recipe.lore as lore:
            stats = lore.stats()
            hits = stats["advice/cache_hits"] + stats["advice/cache_shared_hits"]
            segments = stats["bandit/advised_segments"]
            print(
                f"{lore.service.budget.spent} calls, {hits:.0f} answers from the cache, "
                f"{segments:.0f} advised segments"
            )


if __name__ == "__main__":
    main()
