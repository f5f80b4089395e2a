"""Tables as files: nothing in a cell may break the format."""

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttvd.report.document import MISSING, Cell, Heading, Table
from ttvd.report.export import WRITERS, escape_latex, to_csv, to_latex, to_markdown

NASTY = r"50% of a_b & c#d | $x$ {y} ~ ^ \ `z` *w* <u>"


def table(name: str = "tent") -> Table:
    return Table(
        [Heading("method", under="model"), Heading("ECE (%)", "over the stream"), "interval"],
        [
            [
                Cell(name, name, note="digits"),
                Cell("20.5", 20.512345, best=True, note="±0.2"),
                Cell("-1 to 2", -1.0),
            ],
            [Cell("bn", "bn"), Cell("30.0", 30.0, marked=True, note="±0.1"), MISSING],
        ],
        "Error in %",
        [("", 1), ("digits", 2)],
    )


def test_markdown_is_a_table_of_its_own() -> None:
    lines = to_markdown(table()).splitlines()
    assert lines == [
        "| method | digits: ECE (%) (over the stream) | digits: interval |",
        "|---|---:|---:|",
        "| tent (digits) | **20.5** ±0.2 | -1 to 2 |",
        "| bn | <u>30.0</u> ±0.1 | - |",
    ]


@given(st.text(max_size=40))
def test_no_name_breaks_a_row_of_markdown(name: str) -> None:
    lines = to_markdown(table(name)).split("\n")
    assert len(lines) == 5
    assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines[:4]] == [4] * 4


def test_latex_uses_booktabs_and_spans() -> None:
    text = to_latex(table(NASTY))
    assert text.count(r"\\") == 4
    for part in (
        r"% Error in \%",
        r"\begin{tabular}{lrr}",
        r"\multicolumn{2}{c}{digits}",
        r"\cmidrule(lr){2-3}",
        r"50\% of a\_b \& c\#d \textbar{} \$x\$ \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{}",
        r"\textbf{20.5} {\scriptsize $\pm$0.2}",
        r"\underline{30.0}",
        r"\bottomrule",
    ):
        assert part in text


@given(st.text(max_size=40))
def test_latex_holds_plain_letters_and_balanced_braces(name: str) -> None:
    text = to_latex(table(name))
    bare = re.sub(r"\\[{}%&#$_\\]", "", text)
    assert text.isascii()
    assert bare.count("{") == bare.count("}")
    assert bare.count("&") == 7
    assert "%" not in bare.replace("% Error in ", "")


def test_letters_that_latex_does_not_know_become_plain_ones() -> None:
    assert escape_latex("é ± 中 \uff05 \t") == r"e $\pm$ ? \%  "


def test_csv_holds_all_digits_and_notes_in_columns_of_their_own() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(table(NASTY)))))
    assert rows[0] == [
        "method",
        "model",
        "digits: ECE (%) (over the stream)",
        "digits: ECE (%) (over the stream) ±",
        "digits: interval",
    ]
    assert rows[1] == [NASTY, "digits", "20.512345", "0.2", "-1 to 2"]
    assert rows[2] == ["bn", "", "30", "0.1", ""]


@pytest.mark.parametrize("name", ["=1+1", "@SUM(A1)", "-cmd", "+tent", "-2+3+cmd|' /C calc'!A0", "\t=1"])
def test_a_spreadsheet_takes_no_name_for_a_formula(name: str) -> None:
    assert list(csv.reader(io.StringIO(to_csv(table(name)))))[1][0] == f"'{name}"


def test_numbers_stay_numbers_in_a_spreadsheet() -> None:
    made = to_csv(Table(["a"], [[Cell("-0.5", -0.5)], [Cell("+0.5", 0.5)]]))
    assert made == "a\n-0.5\n0.5\n"


def test_every_format_ends_with_a_line() -> None:
    assert all(write(table()).endswith("\n") for write in WRITERS.values())
