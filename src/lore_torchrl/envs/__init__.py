"""Environment families: how to make them, describe them and plan in them.

Nothing is imported here, so that each family's extra stays optional. MiniGrid:
:func:`lore_torchrl.envs.minigrid.make_env` needs ``lore-torchrl[minigrid]``;
:class:`lore_torchrl.envs.minigrid_describe.MiniGridDescriber` and
:class:`lore_torchrl.envs.minigrid_planner.MiniGridPlanner` need NumPy only.
"""
