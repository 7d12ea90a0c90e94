"""Stock DreamerV3 from TorchRL's public parts, and LoRe's place in it.

``agent`` builds networks, ``learner`` losses and the update, ``replay`` the records,
``hooks`` what :class:`~torchrl.trainers.Trainer` calls, ``run`` a whole run from a
:class:`~lore_torchrl.configs.TrainConfig`. Nothing is imported here: ``run`` needs the
``minigrid`` and ``train`` extras, the rest does not.
"""
