"""Rows of a run that a kill cut off are left out; those that are damaged are named."""

from __future__ import annotations

import json
import re

import pytest

from lore_torchrl.dreamer.advice_log import read_advice
from lore_torchrl.dreamer.figures import save_figures
from lore_torchrl.dreamer.logging import read_metrics

GOOD = b'{"step": 100, "train/success": 0.5}\n'


@pytest.mark.parametrize("torn", [b'{"step": 200, "tr', b"\0" * 4096, b"\xff", GOOD[:-1]])
def test_half_a_line_at_the_end_is_left_out(tmp_path, torn):
    for name, read in (("metrics.jsonl", read_metrics), ("advice.jsonl", read_advice)):
        (tmp_path / name).write_bytes(GOOD + b"\n" + GOOD + torn)
        assert [row["step"] for row in read(tmp_path)] == [100, 100]


@pytest.mark.parametrize(
    "line",
    [
        *(b"\0\0\0\0", b"{", b"[1]", b"3", b"null", b"\xff\xfe", b"{}", b"[" * 100_000),
        *(b'{"step": "1"}', b'{"step": NaN}', b'{"step": true}'),
    ],
    ids=lambda line: repr(line[:9]),
)
def test_a_damaged_line_is_named_with_its_file(tmp_path, line):
    for name, read in (("metrics.jsonl", read_metrics), ("advice.jsonl", read_advice)):
        path = tmp_path / name
        path.write_bytes(GOOD + line + b"\n" + GOOD)
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} is damaged: line 2 .*Remove"):
            read(tmp_path)


@pytest.mark.parametrize("value", ['"0.5"', "[1]", "null", "1" + "0" * 400])
def test_a_metric_is_a_number(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + b'{"step": 2, "a": %s}\n' % value.encode())
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: line 2 holds values"):
        read_metrics(path)


@pytest.mark.parametrize("name", ["a$b$", r"$\frac$", "_hidden", "x_y^z{"])
def test_a_run_of_any_name_has_its_figures(tmp_path, name):
    pytest.importorskip("matplotlib")
    folder = tmp_path / name
    folder.mkdir()
    rows = ({"step": step, "train/success": 0.5} for step in (100, 200))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [path.name for path in save_figures(folder)] == ["success.png"]
