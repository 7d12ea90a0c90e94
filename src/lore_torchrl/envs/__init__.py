"""Environment adapters: each makes a batch of environments and describes it to an advisor.

The contract is :class:`lore_torchrl.envs.adapter.EnvAdapter`. Nothing is imported here, so that
each adapter's extra stays optional: MiniGrid needs ``lore-torchrl[minigrid]``, Crafter
``lore-torchrl[crafter]``, FrozenLake, Snake and Pendulum need Gymnasium, and
:class:`~lore_torchrl.envs.finance.FinancialRegimes` needs TorchRL only.
"""
