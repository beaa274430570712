import csv
import io

from fairseq_alma.metrics.table import render_csv, render_latex, render_markdown, show_count, show_number, show_power


def test_a_markdown_table_is_aligned():
    text = render_markdown(["learner", "t0"], [["SM_w1", "28.57"], ["gEns", "*"]])
    assert text == (
        "| learner |    t0 |\n"
        "|---------|------:|\n"
        "| SM_w1   | 28.57 |\n"
        "| gEns    |     * |\n"
    )  # fmt: skip


def test_a_csv_table_has_full_numbers_and_empty_cells_for_missing_ones():
    text = render_csv(["a", "b", "c", "d"], [["x, y", 1.23456789, None, float("nan")]])
    assert list(csv.reader(io.StringIO(text))) == [["a", "b", "c", "d"], ["x, y", "1.23456789", "", ""]]


def test_numbers_are_spelled_for_people():
    assert [show_number(value, 2) for value in (1234.5, None, float("nan"))] == ["1,234.50", "*", "–"]
    assert [show_count(value) for value in (12, 1721088, 65.4e6, 436e6, 1.2e9, None)] == [
        "12", "1.72M", "65.4M", "436M", "1.2G", "–",
    ]  # fmt: skip
    assert (show_power(3.616e11), show_power(0)) == ("3.62e+11", "0")


def test_a_latex_table_escapes_what_latex_would_read_as_a_command():
    text = render_latex(
        ["a_b", "%"], [[("SM_w1 & \\x", False), ("24.3 ± 0.1", True)], [("*", False), ("3.62e+11", False)]]
    )
    assert text.splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"a\_b & \% \\",
        r"\midrule",
        r"SM\_w1 \& \textbackslash{}x & \textbf{24.3 $\pm$ 0.1} \\",
        r"$\ast$ & $3.62\times 10^{11}$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
