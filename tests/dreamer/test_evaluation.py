from __future__ import annotations

import torch
from tiny_run import planner, tiny_config

from lore_torchrl.dreamer.acting import adapter_of
from lore_torchrl.dreamer.evaluation import evaluate
from lore_torchrl.dreamer.run import _example_sample, build_run


def test_evaluation_repeats_itself_and_leaves_training_alone(tmp_path):
    config = tiny_config(tmp_path)
    run = build_run(config, advisor=planner())
    try:
        before = torch.get_rng_state()
        calls = run.service.stats()["calls"]
        adapter = adapter_of(config.env)
        first = evaluate(config, adapter, run.agent)
        assert torch.equal(torch.get_rng_state(), before)
        assert evaluate(config, adapter, run.agent) == first
        assert run.service.stats()["calls"] == calls == 0
        assert set(first) == {"success", "return", "length", "episodes"}
        assert first["episodes"] == config.evaluation.episodes
        assert 1 <= first["length"] <= config.env.max_steps
    finally:
        run.close()


def test_evaluation_leaves_the_number_of_threads(tmp_path):
    config = tiny_config(tmp_path)
    run = build_run(config, advisor=planner())
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            evaluate(config, adapter_of(config.env), run.agent)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
        run.close()


def test_held_out_episodes_are_those_of_the_evaluation_seeds(tmp_path):
    from lore_torchrl.envs.batch import row_seed

    config = tiny_config(tmp_path)
    training = {row_seed(seed, row) for seed in range(50) for row in range(config.env.num_envs)}
    held_out = {
        row_seed(seed, row, evaluation=True)
        for seed in range(50)
        for row in range(config.evaluation.episodes)
    }
    assert not training & held_out


def test_the_sample_to_compile_on_has_the_shape_of_a_real_one(tmp_path):
    config = tiny_config(tmp_path)
    run = build_run(config, advisor=planner())
    try:
        example = _example_sample(run.env, run.replay_hook)
        assert run.service.stats()["calls"] == 0
        run.learner.stepper.step(None, example.clone())
        for _ in range(8):
            run.replay_hook.extend(next(iter(run.collector)))
        run.replay_hook._owed = 1
        # The stepper gives flags their trailing dimension back, which samplers drop.
        prepare = run.learner.stepper._prepare_sample
        example, real = prepare(example), prepare(run.replay_hook.sample(None))
        assert example.batch_size == real.batch_size
        for key in run.learner.loss.in_keys:
            assert example[key].shape == real[key].shape, key
            assert example[key].dtype == real[key].dtype, key
    finally:
        run.close()
