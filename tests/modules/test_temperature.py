from __future__ import annotations

import math

import pytest
import torch

from lore_torchrl.functional import align_temperature
from lore_torchrl.modules import TemperatureAligner


def advice(n=40, temperature=1.6):
    prior = 2 * torch.randn(n, 4)
    prior = prior - prior.mean(-1, keepdim=True)
    return torch.log_softmax(prior / temperature, -1), prior, torch.ones(n, 1).bool()


def test_full_rate_jumps_to_the_optimum():
    aligner = TemperatureAligner(rate=1.0)
    aligner.update(*advice(temperature=1.6))
    assert aligner.temperature.item() == pytest.approx(1.6, rel=1e-3)


def test_moves_towards_the_optimum_in_log_space():
    aligner = TemperatureAligner(rate=0.25, init=0.6)
    batch = advice(temperature=1.6)
    optimum = align_temperature(*batch, minimum=0.5, maximum=2.0).item()
    distance = abs(math.log(0.6 / optimum))
    for _ in range(5):
        aligner.update(*batch)
        left = abs(math.log(aligner.temperature.item() / optimum))
        assert left == pytest.approx(0.75 * distance, rel=1e-3, abs=1e-5)
        distance = left


def test_rate_zero_holds():
    aligner = TemperatureAligner(rate=0.0, init=0.9)
    aligner.update(*advice())
    assert aligner.temperature.item() == pytest.approx(0.9)


def test_without_a_valid_row_it_keeps_its_own_to_the_bit():
    aligner = TemperatureAligner(rate=0.5, init=0.9)
    before = aligner.temperature.clone()
    log_p, prior, valid = advice()
    aligner.update(log_p, torch.zeros_like(prior), torch.zeros_like(valid))
    assert torch.equal(aligner.temperature, before)


def test_rows_without_advice_change_nothing():
    with_rows, without = TemperatureAligner(rate=0.5), TemperatureAligner(rate=0.5)
    log_p, prior, valid = advice()
    without.update(log_p, prior, valid)
    other = torch.log_softmax(torch.randn(30, 4), -1)
    with_rows.update(
        torch.cat((log_p, other)),
        torch.cat((prior, torch.zeros(30, 4))),
        torch.cat((valid, torch.zeros(30, 1).bool())),
    )
    torch.testing.assert_close(with_rows.temperature, without.temperature, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("policy_scale", "expected"), [(0.0, 2.0), (1e3, 0.5)])
def test_stays_within_its_bounds(policy_scale, expected):
    aligner = TemperatureAligner(rate=1.0)
    _, prior, valid = advice()
    for _ in range(3):
        aligner.update(torch.log_softmax(policy_scale * prior, -1), prior, valid)
        assert 0.5 <= aligner.temperature.item() <= 2.0 + 1e-5
    assert aligner.temperature.item() == pytest.approx(expected, rel=1e-4)


def test_divides():
    prior = torch.randn(3, 4)
    assert torch.equal(TemperatureAligner(init=2.0)(prior), prior / 2)


def test_update_is_in_place_and_leaves_no_graph():
    aligner = TemperatureAligner(rate=0.5)
    buffer = aligner.temperature
    log_p, prior, valid = advice()
    aligner.update(log_p.requires_grad_(), prior, valid)
    assert aligner.temperature is buffer and not buffer.requires_grad
    assert buffer != 1.0


def test_state_dict_roundtrip():
    aligner = TemperatureAligner(rate=1.0)
    aligner.update(*advice())
    resumed = TemperatureAligner(rate=1.0)
    resumed.load_state_dict(aligner.state_dict())
    assert torch.equal(resumed.temperature, aligner.temperature)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"minimum": 0.0}, "minimum.*0.0"),
        ({"minimum": 3.0}, "minimum=3.0.*2.0"),
        ({"init": 5.0}, "init=5.0"),
        ({"init": 0.1}, "init=0.1"),
        ({"rate": 1.5}, "rate.*1.5"),
        ({"rate": -0.5}, "rate.*-0.5"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        TemperatureAligner(**kwargs)
