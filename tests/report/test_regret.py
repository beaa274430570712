import math

import pytest

from fairseq_alma.metrics import updates_for_loss
from fairseq_alma.report.finding import Spread, Verdict, half_width
from fairseq_alma.report.findings import all_findings
from tests.report.fakes import image_stream, table_of, text_stream, write_run
from tests.report.test_tables import tables, texts

CARRIED = {"carry_optimizer": True}


def write_arms(root):
    for seed in (1, 2):
        noise = math.exp(0.01 * seed)
        write_run(root / f"paper{seed}", [40 * noise, 22 * noise], stream=text_stream(2), seed=seed)
        write_run(root / f"carried{seed}", [40.0, 20.2], stream=text_stream(2), seed=seed, **CARRIED)
        for k, ppl in ((1, 40.0), (2, 20.0)):
            write_run(root / f"iid{k}-{seed}", [ppl], stream=text_stream(2), seed=seed, iid=k)
    return [*root.iterdir()]


def test_regret_is_the_loss_beyond_that_of_retraining_paired_by_seed(tmp_path):
    found = tables(write_arms(tmp_path))["regret"]
    by_options = {row[1]: row for row in texts(found)}
    carried = by_options["--carry-optimizer"]
    assert carried[3:6] == ["+0.0000 ± 0.0000", "+0.0100 ± 0.0000", "+0.0100 ± 0.0000"]
    (paper,) = (row for name, row in by_options.items() if name != "--carry-optimizer")
    spread = Spread.of({1: math.log(1.1) + 0.01, 2: math.log(1.1) + 0.02})
    assert paper[4] == f"{spread.mean:+.4f} ± {half_width(spread):.4f}"


def finding_of(paths):
    ((_, found),) = all_findings(table_of(paths))
    return found[-1]


def write_against_controls(root, regrets, **options):
    """Runs of two mega-batches and as many seeds as each arrival has regrets, beside their controls."""
    for seed in range(1, 1 + len(regrets[0])):
        ppl = [20.0 * math.exp(regret[seed - 1]) for regret in regrets]
        write_run(root / f"own{seed}", ppl, stream=text_stream(2), seed=seed, **options)
        for k in (1, 2):
            write_run(root / f"iid{k}-{seed}", [20.0], stream=text_stream(2), seed=seed, iid=k)
    return [*root.iterdir()]


@pytest.mark.parametrize(
    ("first", "second", "verdict", "deciding"),
    [
        ([0.0, 0.0, 0.0], [0.001, 0.002, 0.003], Verdict.HELD, "t1"),  # all of both intervals is below 1 %
        ([0.0, 0.0, 0.0], [0.001, 0.02, -0.01], Verdict.TOO_CLOSE, "t1"),
        ([0.03, 0.031, 0.029], [0.0, 0.06, -0.06], Verdict.NOT_HELD, "t0"),  # the wider one decides nothing
        ([0.0], [0.0], Verdict.ONE_SEED, None),
    ],
)
def test_as_good_as_retraining_is_decided_by_the_worst_arrival(first, second, verdict, deciding, tmp_path):
    finding = finding_of(write_against_controls(tmp_path, [first, second], **CARRIED))
    assert finding.verdict is verdict
    (comparison,) = finding.comparisons
    assert deciding is None or f"after {deciding}," in comparison.show()


def test_runs_of_the_papers_way_are_not_asked_whether_they_equal_retraining(tmp_path):
    assert finding_of(write_against_controls(tmp_path, [[0.0, 0.0], [0.0, 0.0]])).source != "not of the paper"


def test_an_arrival_without_its_control_decides_nothing(tmp_path):
    runs = write_against_controls(tmp_path, [[0.0, 0.0], [0.5, 0.5]], **CARRIED)
    assert finding_of([run for run in runs if not run.name.startswith("iid1")]).verdict is Verdict.NOT_HELD
    assert finding_of([run for run in runs if not run.name.startswith("iid2")]).verdict is Verdict.NOT_ENOUGH


@pytest.mark.parametrize("weaker", [{"num_params": (900,)}, {"train_options": {"--max-update": "1"}}])
def test_a_smaller_control_or_one_with_fewer_updates_is_no_oracle(tmp_path, weaker):
    own = write_run(tmp_path / "own", [40.0, 30.0], stream=text_stream(2), train_options={"--max-update": "10"})
    control = {"train_options": {"--max-update": "10"}, **weaker}
    write_run(tmp_path / "iid", [20.0], stream=text_stream(2), iid=2, **control)
    assert "regret" not in tables([own, tmp_path / "iid"])


def test_orders_of_a_stream_of_images_are_paired_whatever_stands_first(tmp_path):
    runs = []
    for order in (1, 2):
        stream = image_stream(2, seed=order)
        runs.append(write_run(tmp_path / f"sm-{order}", [0.5, 0.4], stream=stream))
        runs.append(write_run(tmp_path / f"iid-{order}", [0.3 + 0.01 * order], stream=stream, iid=2))
    (found,) = {tuple(map(tuple, texts(tables(chosen)["regret"]))) for chosen in (runs, runs[::-1])}
    assert " ± " in " ".join(found[0])


def test_without_a_control_there_is_no_regret(tmp_path):
    assert "regret" not in tables([write_run(tmp_path / "R", stream=text_stream(2))])


def test_updates_for_a_loss_lie_on_a_line_in_logarithms():
    points = [(100.0, 8.0), (200.0, 4.0), (400.0, 2.0)]
    assert updates_for_loss(points, 4.0) == pytest.approx(200)
    assert updates_for_loss(points, 2 * math.sqrt(2)) == pytest.approx(200 * math.sqrt(2))
    assert updates_for_loss(points, 1.0) == pytest.approx(800)
    assert updates_for_loss(points, 16.0) == pytest.approx(50)


@pytest.mark.parametrize(
    ("losses", "loss"),
    [((5.0, 4.5, 4.5001), 4.4), ((5.0, 4.5, 4.4995), 4.4), ((4.0, 4.0), 3.0), ((4.0, 4.1), 4.05), ((8.0, 4.0), 0.1)],
)
def test_points_that_do_not_fall_or_end_too_early_do_not_tell_how_many_updates_a_loss_takes(losses, loss):
    points = [(100.0 * (index + 1), each) for index, each in enumerate(losses)]
    assert updates_for_loss(points, loss) is None
