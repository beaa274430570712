"""Recipes as dry runs, which train nothing and write nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.fakes import image_stream, write_run

RECIPES = Path(__file__).parents[2] / "recipes"
TABLE2 = RECIPES / "lm" / "table2.sh"


def run(*command, **knobs):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, **knobs})


def dry_run(tmp_path, recipe, *options, **knobs):
    """Return the commands that a recipe prints, one in each line."""
    folders = {"STREAM": str(tmp_path / "S"), "RUNS": str(tmp_path / "runs"), "SOURCE": str(tmp_path / "corpus")}
    done = run("bash", recipe, *options, "--dry-run", **(folders | knobs))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    return re.sub(r" \\\n +", " ", done.stdout).splitlines()


def programs(lines):
    names = [re.sub(r"^for RANK.*(?=fairseq-train)", "", line).split()[0] for line in lines]
    return {name: names.count(name) for name in ("fairseq-train", "alma-grow", "alma-ensemble")}


def test_runs_in_a_folder_with_a_space_are_reported(tmp_path):
    report = 'alma-report() { printf "<%s>" "$@"; }'
    rows = "DRY_RUN=0; source recipes/lib/jobs.sh; table t; start one true; start two true; finish"
    folder = tmp_path / "a b"
    folder.mkdir()
    done = run("bash", "-c", f'cd "{RECIPES.parent}"; {report}; {rows}', RUNS=str(folder))
    assert f"<{folder}/one><{folder}/two><--out><{folder}/report/t>" in done.stdout, done.stderr


@pytest.mark.parametrize("recipe", sorted(RECIPES.rglob("*.sh")), ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_recipe_is_valid_bash_and_executable_if_it_names_its_interpreter(recipe):
    assert run("bash", "-n", recipe).returncode == 0
    assert os.access(recipe, os.X_OK) == recipe.read_text(encoding="utf-8").startswith("#!")


def test_the_single_model_is_trained_with_the_papers_settings(tmp_path):
    lines = [line for line in dry_run(tmp_path, TABLE2, "sm", "base", EXPERTS="12") if "fairseq-train " in line]
    assert len(lines) == 4
    for option in (
        "--adam-betas '(0.9, 0.98)'", "--adam-eps 1e-8", "--lr-scheduler polynomial_decay", "--max-update 120000",
        "--total-num-update 120000", "--tokens-per-sample 512", "--batch-size 8 --update-freq 3", "--num-experts 12",
        "--capacity-factor 1.0", "--balance-loss-weight 0.01", "--arch alma_switch_lm_base",
        "--distributed-world-size 8",
    ):  # fmt: skip
        assert all(option in line for line in lines), option


def test_each_learner_trains_grows_and_combines_waiting_takes_more_steps_and_a_control_all_at_once(tmp_path):
    for learner, counts in (("ens", (8, 0, 4)), ("gens", (4, 0, 3)), ("gmoe", (4, 3, 0))):
        assert tuple(programs(dry_run(tmp_path, TABLE2, learner, "large")).values()) == counts
    (line,) = [one for one in dry_run(tmp_path, TABLE2, "sm", "base", WAIT="3", STEPS="3") if "fairseq-train " in one]
    assert "--megabatch 2 --wait 3" in line and "--max-update 360000" in line and "w3-x3/stage-000" in line
    lines = [each for each in dry_run(tmp_path, TABLE2, "ens", "base", IID="3") if "fairseq-train " in each]
    assert len(lines) == 2 and all("--megabatch 2 --wait 3" in each and "--max-update 360000" in each for each in lines)
    assert programs(dry_run(tmp_path, TABLE2, "gmoe", "base", "--stage", "2"))["fairseq-train"] == 1


def test_a_wrong_knob_is_one_line(tmp_path):
    for size, knobs, said in (
        ("base", {"GPUS": "5"}, "GPUS=5 LOCAL_BATCH=8: their product must divide 192"),
        ("base", {"LOCAL_BATCH": "half"}, "LOCAL_BATCH=half"),
        ("huge", {}, "usage: "),
    ):
        done = run("bash", TABLE2, "sm", size, RUNS=str(tmp_path / "runs"), **knobs)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
        assert list(tmp_path.iterdir()) == []


def test_a_queue_has_a_job_for_each_new_member_and_quotes_words_for_sh(tmp_path):
    (tmp_path / "sbatch").write_text('#!/bin/sh\nwhile [ "$1" != --wrap ]; do shift; done; sh -c "$2" >&2; echo 7\n')
    (tmp_path / "alma-stream").write_text('#!/bin/sh\necho "$@"\n')
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    knobs = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LC_ALL": "C", "LOGS": str(tmp_path), "STAGES": "2"}
    done = run("bash", RECIPES / "slurm.sh", "--run", "dürfen's", "--learner", "gens", MEMBERS="2", **knobs)
    assert re.findall("--run dürfen's .*--member (.)", done.stderr) == [*"0123"] and done.stderr.count("\n") == 6


@pytest.mark.slow  # 17 dry runs
def test_the_small_tables_have_all_rows_and_none_twice(tmp_path):
    lines = dry_run(tmp_path, RECIPES / "lm" / "two_cores.sh", SEEDS="1", STEPS="3", METHOD="split")
    runs = re.findall(r"--save-dir \S*/runs/(\S+?)/stage-000/member-0 ", "\n".join(lines))
    assert len(runs) == len(set(runs)) == 17
    assert {"sm-small-12-w4-x4", "ens-small-4@2-iid3", "ens-small-4@4-w1", "gmoe-small-4-copy-w1"} <= set(runs)


def test_a_text_is_cut_between_two_characters(tmp_path):
    cut = re.search(r"head -c .*?text.txt\"\n", (RECIPES / "lm" / "two_cores.sh").read_text(), re.DOTALL)[0]
    (tmp_path / "long.txt").write_text("é" * 10, encoding="utf-8")
    assert run("bash", "-c", cut, TEXT=str(tmp_path / "long.txt"), RUNS=str(tmp_path), BYTES="5").returncode == 0
    assert (tmp_path / "text.txt").read_text(encoding="utf-8") == "éé"


@pytest.mark.slow  # it prepares its text first
def test_the_quickstart_prints_what_it_trains(tmp_path):
    done = run("bash", RECIPES / "quickstart.sh", "--dry-run", RUNS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = programs(line for line in done.stdout.splitlines() if line and not line[0].isspace())
    assert found == {"fairseq-train": 4 + 8 + 4 + 1, "alma-grow": 3, "alma-ensemble": 4 + 17}  # averages of weights too


@pytest.mark.parametrize("recipe", [*(RECIPES / "vision").glob("[!c]*.sh"), *(RECIPES / "vision").glob("cifar*.sh")])
def test_a_dry_run_of_images_fetches_and_writes_nothing(recipe, tmp_path):
    prepare, *rows = dry_run(tmp_path, recipe, SEEDS="1 2", SIZES="4", WAITS="50", LEARNERS="gmoe", PRESETS="paper")
    assert prepare.startswith("python -m data_prep.corpus ")
    assert rows and all(row.startswith("alma-stream ") and "--dry-run" not in row for row in rows)


def test_an_image_study_ends_with_files_that_are_no_images(tmp_path):
    (tmp_path / "corpus").mkdir()
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (tmp_path / "corpus" / f"{part}-{kind}-ubyte").write_text("no images")
    knobs = {"SOURCE": str(tmp_path / "corpus"), "RUNS": str(tmp_path / "runs")}
    done = run("bash", RECIPES / "vision" / "mnist.sh", **knobs)
    assert done.returncode == 1 and "train-images-idx3-ubyte" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_papers_figures_are_drawn_from_run_folders(tmp_path):
    pytest.importorskip("matplotlib")
    usage, stream = [{"expert_usage": [[0.25, 0.75]], "gate_trees": [[0, 1]]}], image_stream(4)
    runs = [
        write_run(tmp_path / "a", learner="gmoe", stream=stream, num_experts=(2,), stage_extras=usage),
        *(write_run(tmp_path / name, stream=stream, replay=name == "c") for name in "bc"),
    ]
    words = (sys.executable, RECIPES / "paper_figures.py", *runs, "--out")
    done = run(*words, tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    assert run(*words, runs[0] / "run.json").stderr.count("\n") == 1
    assert {path.name for path in (tmp_path / "figures").glob("*.png")} == {"usage.png", "radar.png", "replay.png"}
