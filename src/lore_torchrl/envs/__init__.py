"""Environment families: how to make them, describe them and plan in them.

Nothing is imported here, so that each family's extra stays optional. What a family is:
:class:`lore_torchrl.envs.family.EnvFamily`. MiniGrid:
:func:`lore_torchrl.envs.minigrid.make_env` needs ``lore-torchrl[minigrid]``;
:class:`lore_torchrl.envs.minigrid_describe.MiniGridDescriber` and
:class:`lore_torchrl.envs.minigrid_planner.MiniGridPlanner` need NumPy only. FrozenLake,
Snake and what is built on :func:`lore_torchrl.envs.gym_batch.gym_batch` need Gymnasium;
:class:`lore_torchrl.envs.finance.FinancialRegimes` needs TorchRL only.
"""
