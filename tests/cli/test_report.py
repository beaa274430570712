import csv
import json

import pytest

from fairseq_alma.cli.report import main
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.run_record import describe_run
from tests.learners.fakes import write_manifest


def write_run(root, perplexities, wait=1, num_megabatches=4, seed=1, **options):
    """Write a run whose stages end with the given mega-batches and perplexities."""
    stream = write_manifest(root.parent / f"S{seed}", num_megabatches, seed)
    chosen = {"wait": wait, "replay": False, "drop_rest": False, "init": "previous", **options}
    root.mkdir()
    (root / "run.json").write_text(json.dumps(describe_run("sm", 1, chosen, {}, stream)))
    for index, (arrival, ppl) in enumerate(perplexities.items()):
        record = {
            "stage": index, "megabatches": list(range(arrival + 1)), "num_params": 65_000_000, "num_experts": 4,
            "num_members": 1, "num_updates": 10, "train_tokens": 5, "train_flops": 1e15, "test_flops_per_token": 2,
            "wall_seconds": 1.0, "valid": {"loss": 3.0, "ppl": 8.0}, "test": {"loss": 2.0, "ppl": ppl},
        }  # fmt: skip
        (root / f"stage-00{index}").mkdir()
        (root / f"stage-00{index}" / "stage.json").write_text(json.dumps(record))
    return root


def rows(out):
    """The cells of the printed table, by the run's name."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:1] == "|"]
    header, _, *found = lines
    return {row[1].rsplit("/", 1)[-1]: dict(zip(header, row, strict=True)) for row in found}


def test_the_table_has_a_row_for_each_run_with_size_and_cost(tmp_path, capsys):
    run = write_run(tmp_path / "R", {0: 28.57, 1: 27.45, 2: 26.91, 3: 26.53})
    assert main([str(run)]) == 0
    row = rows(capsys.readouterr().out)["R"]
    assert [row[f"t{t}"] for t in range(4)] == ["28.57", "27.45", "26.91", "26.53"]
    assert (row["learner"], row["experts"], row["params"], row["train FLOPs"]) == ("SM_w1", "4", "65M", "4.00e+15")
    assert row["avg PPL"] == f"{(28.57 + 27.45 + 26.91 + 26.53) / 4:.2f}"
    assert row["final PPL"] == "26.53"
    assert row["bits per byte"] == "0.500"  # 2 bits a token, 100 tokens, 400 bytes


def test_waiting_is_a_star_and_counts_as_an_untrained_model(tmp_path, capsys):
    main([str(write_run(tmp_path / "R", {3: 24.0}, wait=4))])
    row = rows(capsys.readouterr().out)["R"]
    assert [row[f"t{t}"] for t in range(4)] == ["*", "*", "*", "24.00"]
    assert row["avg PPL"] == f"{(3 * 50 + 24) / 4:.2f}"  # the stream has 50 units


def test_a_dropped_rest_is_a_star_too(tmp_path, capsys):
    main([str(write_run(tmp_path / "R", {2: 25.18}, wait=3, drop_rest=True))])
    row = rows(capsys.readouterr().out)["R"]
    assert [row[f"t{t}"] for t in range(4)] == ["*", "*", "25.18", "*"]
    assert row["final PPL"] == "25.18"


def test_a_run_under_way_shows_what_it_has(tmp_path, capsys):
    main([str(write_run(tmp_path / "R", {0: 30.0})), str(write_run(tmp_path / "N", {}))])
    table = rows(capsys.readouterr().out)
    assert [table["R"][f"t{t}"] for t in range(4)] == ["30.00", "–", "–", "–"]
    assert table["R"]["avg PPL"] == "–"
    assert table["N"]["final PPL"] == "–"


def test_tables_are_written_for_people_and_for_programs(tmp_path):
    run = write_run(tmp_path / "R", {3: 24.123456}, wait=4)
    main([str(run), "--out", str(tmp_path / "out")])
    assert "| SM_w4" in (tmp_path / "out" / "perplexity.md").read_text()
    with open(tmp_path / "out" / "perplexity.csv") as file:
        (row,) = csv.DictReader(file)
    assert (row["t0"], row["t3"], row["params"]) == ("", "24.123456", "65000000")


def test_what_cannot_be_read_is_named_and_the_rest_is_reported(tmp_path, capsys):
    good = write_run(tmp_path / "good", {0: 30.0})
    damaged = write_run(tmp_path / "damaged", {0: 30.0, 1: 29.0})
    (damaged / "stage-001" / "stage.json").write_text('{"stage": 1, "megabatches": [1]')
    incomplete = write_run(tmp_path / "incomplete", {0: 30.0})
    (incomplete / "stage-000" / "stage.json").write_text('{"stage": 0, "megabatches": [0], "test": {"loss": 1}}')
    no_run = tmp_path / "S1"
    assert main([str(good), str(damaged), str(incomplete), str(no_run), str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert list(rows(captured.out)) == ["good"]
    errors = captured.err.splitlines()
    assert len(errors) == 4
    assert "damaged/stage-001/stage.json: damaged, not JSON" in errors[0]
    assert "incomplete/stage-000/stage.json: damaged, num_params, num_experts" in errors[1]
    assert "S1: no run.json in it" in errors[2]
    assert "nowhere: no run.json in it" in errors[3]


def test_a_damaged_run_record_is_named(tmp_path, capsys):
    run = write_run(tmp_path / "R", {0: 30.0})
    (run / "run.json").write_text('{"learner": "sm"}')
    assert main([str(run)]) == 1
    assert "R/run.json: damaged" in capsys.readouterr().err


def test_runs_on_different_streams_are_refused_unless_mixed(tmp_path, capsys):
    one, other = write_run(tmp_path / "A", {0: 30.0}), write_run(tmp_path / "B", {0: 31.0}, seed=2, num_megabatches=2)
    with pytest.raises(AlmaError, match=r"B: its stream .* is not that of .*A .*--mix"):
        main([str(one), str(other)])
    assert main([str(one), str(other), "--mix"]) == 0
    assert set(rows(capsys.readouterr().out)) == {"A", "B"}


def test_a_run_whose_stream_grew_has_the_new_arrivals(tmp_path, capsys):
    main([str(write_run(tmp_path / "R", {0: 30.0, 1: 29.0, 2: 28.0}, num_megabatches=2))])
    assert rows(capsys.readouterr().out)["R"]["t2"] == "28.00"
