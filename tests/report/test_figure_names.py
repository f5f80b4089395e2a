"""How figures name what varies."""

import pytest

from ttvd.bench.study import Cell
from ttvd.report.drawings import _name_conditions


@pytest.mark.parametrize(
    ("conditions", "ticks", "label"),
    [
        (
            [(("sites", 1.0),), (("sites", 0.05),)],
            ["100", "5"],
            "share of the source data for class means (%)",
        ),
        ([(("batch_size", 64),), (("batch_size", 8),)], ["64", "8"], "batch size"),
        (
            [(("alpha", 0.1), ("batch_size", 64)), (("alpha", 0.01), ("batch_size", 8))],
            ["0.1\n64", "0.01\n8"],
            "alpha, batch size",
        ),
    ],
)
def test_values_stand_below_each_other(conditions: list[Cell], ticks: list[str], label: str) -> None:
    assert _name_conditions(conditions) == (ticks, label)


def test_conditions_that_vary_different_things_are_written_out() -> None:
    ticks, label = _name_conditions([(("batch_size", 64),), (("batch_size", 8), ("alpha", 0.1))])
    assert ticks[0] == "batch size 64"
    assert not label
