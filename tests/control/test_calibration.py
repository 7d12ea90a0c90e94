from __future__ import annotations

import pytest
import torch

from lore_torchrl.control import ConfidenceCalibrator, superiority


def column(*values):
    return torch.tensor(values).unsqueeze(-1)


def ones(n):
    return torch.ones(n, 1)


class TestSuperiority:
    def test_equals_the_definition(self):
        # Few distinct values, so that there are ties.
        value = torch.randint(0, 6, (200,)).float()
        first, second = torch.rand(200) < 0.4, torch.rand(200) < 0.5
        found = superiority(value, first, second)
        for i in range(200):
            others = value[second]
            share = ((value[i] > others).float() + 0.5 * (value[i] == others).float()).mean()
            assert found[i].item() == pytest.approx(share.item() if first[i] else 0.5)

    def test_mean_is_the_probability_that_one_sample_exceeds_the_other(self):
        value = torch.randn(2000)
        first = torch.arange(2000) < 1000
        value[first] += 1.0
        mean = superiority(value, first, ~first)[first].mean().item()
        # Two unit normals, one apart: Phi(1 / sqrt(2)).
        assert mean == pytest.approx(0.760, abs=0.02)

    def test_nothing_to_compare_with_is_one_half(self):
        value, rows = torch.randn(5), torch.ones(5).bool()
        assert superiority(value, rows, ~rows).eq(0.5).all()

    def test_nan_and_infinities(self):
        nan, inf = float("nan"), float("inf")
        value = torch.tensor([nan, inf, 1.0, nan, 0.0, inf])
        first = torch.tensor([1, 1, 1, 0, 0, 0]).bool()
        # The NaN of the second sample is no member: against 0 and infinity.
        assert superiority(value, first, ~first).tolist() == [0.5, 0.75, 0.5, 0.5, 0.5, 0.5]

    def test_compiles(self):
        value, first = torch.randn(30), torch.rand(30) < 0.5
        compiled = torch.compile(superiority, fullgraph=True, backend="eager")
        assert torch.equal(compiled(value, first, ~first), superiority(value, first, ~first))


class TestForward:
    def test_without_data_it_is_the_claim_to_the_bit(self):
        claim = torch.rand(1000, 1)
        assert torch.equal(ConfidenceCalibrator()(claim), claim)

    def test_formula_of_a_bin(self):
        calibrator = ConfidenceCalibrator(prior_strength=4.0, decay=1.0)
        calibrator.update(column(0.72, 0.78, 0.71), column(1.0, 0.0, 0.5), column(1.0, 2.0, 1.0))
        # Bin 7: outcomes 1.5 of weight 4.
        found = calibrator(column(0.75, 0.65))
        torch.testing.assert_close(found, column((1.5 + 4 * 0.75) / 8, 0.65))

    def test_bins(self):
        calibrator = ConfidenceCalibrator(num_bins=4)
        calibrator.update(column(0.0, 0.24, 0.25, 0.5, 0.75, 1.0, 7.0, -1.0), ones(8), ones(8))
        assert calibrator.counts.tolist() == [[3.0, 1.0, 1.0, 3.0]]
        torch.testing.assert_close(calibrator.claims, torch.tensor([[0.24, 0.25, 0.5, 2.75]]))

    def test_recovers_a_known_miscalibration(self):
        calibrator = ConfidenceCalibrator()
        claim = torch.full((100, 1), 0.9)
        for _ in range(20):
            calibrator.update(claim, torch.bernoulli(torch.full((100, 1), 0.6)), ones(100))
        assert calibrator(claim[:1]).item() == pytest.approx(0.6, abs=0.03)
        assert calibrator.expected_calibration_error().item() == pytest.approx(0.3, abs=0.03)

    def test_error_before_and_after(self):
        def world(n):
            claim = torch.rand(n, 1)
            return claim, torch.bernoulli(claim.square())

        calibrator, judge = ConfidenceCalibrator(), ConfidenceCalibrator()
        calibrator.update(*world(20_000), ones(20_000))
        claim, outcome = world(20_000)
        judge.update(calibrator(claim), outcome, ones(20_000))
        # On average a claim is x - x^2 = 1/6 too high.
        assert calibrator.expected_calibration_error().item() == pytest.approx(1 / 6, abs=0.015)
        assert judge.expected_calibration_error() < 0.025

    def test_groups_are_apart(self):
        calibrator = ConfidenceCalibrator(num_groups=2, prior_strength=1.0)
        claim = torch.full((200, 1), 0.9)
        group = torch.arange(200).remainder(2).unsqueeze(-1)
        calibrator.update(claim, 1.0 - group, ones(200), group)
        found = calibrator(claim[:2], group[:2])
        assert found[0] > 0.99 and found[1] < 0.02
        assert torch.equal(calibrator(claim[:1]), found[:1])
        assert calibrator.expected_calibration_error().item() == pytest.approx(0.5, abs=1e-4)

    def test_forgets(self):
        calibrator = ConfidenceCalibrator(decay=0.9)
        claim = torch.full((10, 1), 0.95)
        for outcome in [ones(10)] * 60 + [0 * ones(10)] * 60:
            calibrator.update(claim, outcome, ones(10))
        assert calibrator(claim[:1]) < 0.1
        assert calibrator.counts.sum().item() == pytest.approx(100, rel=0.01)


class TestRowsThatDoNotCount:
    def test_update_without_a_row_changes_nothing_to_the_bit(self):
        calibrator = ConfidenceCalibrator(decay=0.5)
        calibrator.update(torch.rand(9, 1), torch.rand(9, 1), ones(9))
        before = {name: value.clone() for name, value in calibrator.state_dict().items()}
        nan = torch.full((9, 1), float("nan"))
        calibrator.update(torch.rand(9, 1), torch.rand(9, 1), torch.zeros(9, 1).bool())
        calibrator.update(nan, torch.rand(9, 1), ones(9))
        calibrator.update(torch.rand(9, 1), nan, ones(9))
        calibrator.update(torch.rand(9, 1), torch.rand(9, 1), nan)
        after = calibrator.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)

    def test_decays_once_an_update(self):
        calibrator = ConfidenceCalibrator(decay=0.5, num_bins=1)
        calibrator.update(ones(8), ones(8), ones(8))
        weight = ones(8).bool()
        weight[1:] = False
        calibrator.update(ones(8), torch.zeros(8, 1), weight)
        assert [x.item() for x in (calibrator.counts, calibrator.wins)] == [5.0, 4.0]

    def test_nan_among_the_rows(self):
        calibrator = ConfidenceCalibrator()
        nan = float("nan")
        calibrator.update(column(nan, 0.5, 0.5), column(1.0, nan, 1.0), ones(3))
        assert calibrator.counts.sum() == 1 and calibrator.wins.sum() == 1
        assert calibrator(column(nan)).isnan() and calibrator.trust(column(nan)) == 1

    def test_any_batch_shape(self):
        flat, deep = ConfidenceCalibrator(num_groups=2), ConfidenceCalibrator(num_groups=2)
        claim, outcome, group = torch.rand(12, 1), torch.rand(12, 1), torch.randint(2, (12, 1))
        flat.update(claim, outcome, ones(12), group)
        shape = (3, 4, 1)
        deep.update(*(x.reshape(shape) for x in (claim, outcome, ones(12), group)))
        assert torch.equal(flat.wins, deep.wins)
        same = deep(claim.reshape(shape), group.reshape(shape))
        assert torch.equal(same.reshape(12, 1), flat(claim, group))


class TestTrust:
    def test_without_data_it_is_whole(self):
        assert ConfidenceCalibrator(chance=0.3).trust(torch.rand(100, 1)).eq(1).all()

    @pytest.mark.parametrize(
        ("outcome", "trust"), [(0.9, 1.0), (0.5, 1.0), (0.45, 0.5), (0.4, 0.0), (0.1, 0.0)]
    )
    def test_falls_below_chance(self, outcome, trust):
        calibrator = ConfidenceCalibrator(prior_strength=1e-3)
        claim = torch.full((50, 1), 0.8)
        calibrator.update(claim, torch.full((50, 1), outcome), ones(50))
        assert calibrator.trust(claim[:1]).item() == pytest.approx(trust, abs=1e-3)
        half = calibrator.trust(claim[:1], margin=0.2).item()
        assert half == pytest.approx(min(max(1 + (outcome - 0.5) / 0.2, 0), 1), abs=1e-3)

    def test_a_strong_prior_asks_for_more_data(self):
        weak, strong = ConfidenceCalibrator(), ConfidenceCalibrator(prior_strength=200.0)
        claim = torch.full((10, 1), 0.8)
        for calibrator in (weak, strong):
            calibrator.update(claim, torch.zeros(10, 1), ones(10))
        # q = 5 / 20 and 100 / 210.
        assert weak.trust(claim[:1]).item() == 0.0
        assert strong.trust(claim[:1]).item() == pytest.approx(1 - (0.5 - 100 / 210) / 0.1)


def test_without_data_the_error_is_zero():
    assert ConfidenceCalibrator().expected_calibration_error() == 0
    two = ConfidenceCalibrator(num_groups=2)
    claim, row = torch.full((4, 1), 0.9), torch.ones(4, 1)
    two.update(claim, torch.zeros(4, 1), row, torch.tensor([[0], [0], [1], [1]]))
    two.update(claim, row, row, torch.ones(4, 1, dtype=torch.long))
    assert two.expected_calibration_error(0).item() == pytest.approx(0.9)
    assert two.expected_calibration_error(1) < two.expected_calibration_error() < 0.9


def test_state_dict_goes_on_as_before():
    first = ConfidenceCalibrator(num_groups=2)
    batches = [(torch.rand(7, 1), torch.rand(7, 1), torch.rand(7, 1)) for _ in range(6)]
    for batch in batches[:3]:
        first.update(*batch)
    second = ConfidenceCalibrator(num_groups=2)
    second.load_state_dict(first.state_dict())
    for calibrator in (first, second):
        for batch in batches[3:]:
            calibrator.update(*batch)
    assert set(first.state_dict()) == {"wins", "counts", "claims"}
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


def test_compiles_to_one_graph():
    plain, compiled = ConfidenceCalibrator(num_groups=2), ConfidenceCalibrator(num_groups=2)
    claim, outcome, weight = torch.rand(3, 30, 1).unbind(0)
    group = torch.randint(2, (30, 1))
    options = {"fullgraph": True, "backend": "eager"}
    for calibrator, wrap in (
        (plain, lambda f: f),
        (compiled, lambda f: torch.compile(f, **options)),
    ):
        wrap(calibrator.update)(claim, outcome, weight > 0.5, group)
        calibrator.found = (
            wrap(calibrator.forward)(claim, group),
            wrap(calibrator.trust)(claim, group),
            wrap(calibrator.expected_calibration_error)(),
        )
    assert all(torch.equal(a, b) for a, b in zip(plain.found, compiled.found, strict=True))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_bins": 0}, "num_bins.*0"),
        ({"num_groups": -1}, "num_groups.*-1"),
        ({"decay": 0.0}, "decay.*0.0"),
        ({"decay": 1.1}, "decay.*1.1"),
        ({"prior_strength": 0.0}, "prior_strength.*0.0"),
        ({"chance": 1.0}, "chance.*1.0"),
        ({"chance": float("nan")}, "chance.*nan"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        ConfidenceCalibrator(**kwargs)


def test_bad_calls():
    calibrator = ConfidenceCalibrator()
    with pytest.raises(ValueError, match=r"outcome.*\(4,\)"):
        calibrator.update(ones(4), torch.ones(4), ones(4))
    with pytest.raises(ValueError, match=r"margin.*-1"):
        calibrator.trust(ones(1), margin=-1.0)
