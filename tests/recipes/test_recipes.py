import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.data_prep.images.published import MNIST_NAMES

RECIPES = Path(__file__).parents[2] / "recipes"
EIGHT = re.compile(r"^for RANK in 0 1 2 3 4 5 6 7; do .* RANK=\$RANK .*?(?=fairseq-train )")
SINGLE_MODELS = [RECIPES / "lm" / "sm_base.sh", RECIPES / "lm" / "sm_large.sh"]


def dry_run(recipe, tmp_path, *options, **knobs):
    done = subprocess.run(
        ["bash", str(recipe), "--dry-run", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "STREAM": str(tmp_path / "S"), "RUNS": str(tmp_path / "runs"), **knobs},
    )
    assert done.returncode == 0, done.stderr
    return re.sub(r" \\\n +", " ", done.stdout)


@pytest.mark.parametrize("recipe", sorted(RECIPES.rglob("*.sh")), ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_recipe_is_valid_bash(recipe):
    assert subprocess.run(["bash", "-n", str(recipe)]).returncode == 0


def test_a_row_that_ends_between_two_looks_at_it_has_its_outcome_noted(tmp_path):
    begin = f"set -eu; RUNS={tmp_path} DRY_RUN=0; source {RECIPES}/lib/jobs.sh; table T; start row true"
    jobs = 'jobs() { [ -e "$RUNS/seen" ] || { touch "$RUNS/seen"; echo "${PIDS[row]}"; }; }'  # it runs only at first
    code = f"{begin}; {jobs}; settle"
    done = subprocess.run(["bash", "-c", f"{code}; echo ${{OUTCOMES[row]}}"], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "done", done.stderr


@pytest.mark.parametrize("recipe", SINGLE_MODELS, ids=lambda path: path.stem)
def test_the_single_model_is_trained_with_the_papers_settings(recipe, tmp_path):
    lines = dry_run(recipe, tmp_path, EXPERTS="12").splitlines()
    training = [line for line in lines if "fairseq-train " in line]
    assert len(training) == 4
    for option in (
        "--adam-betas '(0.9, 0.98)'", "--adam-eps 1e-8", "--lr-scheduler polynomial_decay", "--max-update 120000",
        "--total-num-update 120000", "--tokens-per-sample 512", "--num-experts 12", "--capacity-factor 1.0",
        "--balance-loss-weight 0.01", f"--arch alma_switch_lm_{recipe.stem.removeprefix('sm_')}",
    ):  # fmt: skip
        assert all(option in line for line in training), option


@pytest.mark.parametrize(("gpus", "local", "update_freq"), [(8, 8, 3), (1, 8, 24), (16, 4, 3)])
def test_an_update_has_192_sequences_on_any_number_of_devices(gpus, local, update_freq, tmp_path):
    assert gpus * local * update_freq == 192
    knobs = {"GPUS": str(gpus), "LOCAL_BATCH": str(local)}
    trainings = [line for line in dry_run(SINGLE_MODELS[0], tmp_path, **knobs).splitlines() if "-train " in line]
    assert trainings
    for training in trainings:
        assert f"--tokens-per-sample 512 --batch-size {local} --update-freq {update_freq} " in training
        assert (f"--distributed-world-size {gpus} " in training) == (gpus > 1)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"GPUS": "5"}, "GPUS=5: 192 sequences cannot be dealt to them in batches of 8; give GPUS=1, 2, 4 or 8"),
        ({"GPUS": "8", "LOCAL_BATCH": "48"}, "GPUS=8: 192 sequences cannot be dealt to them in batches of 48"),
        ({"GPUS": "0"}, "GPUS=0: a whole number of at least 1 is needed"),
        ({"LOCAL_BATCH": "half"}, "LOCAL_BATCH=half: a whole number of at least 1 is needed"),
        ({"SMOKE": "1", "GPUS": "3"}, "GPUS=3: 4 sequences cannot be dealt to them in batches of 1"),
    ],
)
def test_devices_that_cannot_share_an_update_are_one_line(knobs, said, tmp_path):
    command = ["bash", str(SINGLE_MODELS[0]), "--dry-run"]
    environment = {**os.environ, "STREAM": str(tmp_path / "S"), "RUNS": str(tmp_path / "runs"), **knobs}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert said in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_smallest_recipe_runs_with_two_processes(tmp_path):
    environment = {**os.environ, "RUNS": str(tmp_path / "runs"), "SMOKE": "1", "GPUS": "2"}
    command = ["bash", str(SINGLE_MODELS[0]), "--stage", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.glob("runs/smoke/*/stage-000/stage.json")
    assert json.loads(record.read_text())["num_updates"] == 4
    log = (record.parent / "train-member-0.log").read_text()
    assert "--distributed-world-size 2 " in log and "training on 2 devices" in log


def test_waiting_leaves_the_rest_and_takes_more_steps_as_in_table_2(tmp_path):
    out = dry_run(SINGLE_MODELS[0], tmp_path, WAIT="3", STEPS="3")
    assert out.count("fairseq-train ") == 1
    assert "--megabatch 2 --wait 3" in out
    assert "--max-update 360000" in out
    assert "w3-x3/stage-000" in out


def test_one_stage_can_be_asked_for(tmp_path):
    out = dry_run(SINGLE_MODELS[0], tmp_path, "--stage", "2")
    assert out.count("fairseq-train ") == 1
    assert "--megabatch 2 " in out


@pytest.mark.parametrize("size", ["base", pytest.param("large", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("learner", "counts"), [("ens", (8, 4, 0, 4)), ("gens", (4, 4, 0, 3)), ("gmoe", (4, 4, 3, 0))])
def test_each_row_of_table_2_has_a_recipe_that_trains_what_it_says(learner, counts, size, tmp_path):
    lines = dry_run(RECIPES / "lm" / f"{learner}_{size}.sh", tmp_path).splitlines()
    programs = [re.sub(r"^python[\d.]*$", "python", EIGHT.sub("", line).split()[0]) for line in lines]
    assert counts == tuple(map(programs.count, ("fairseq-train", "python", "alma-grow", "alma-ensemble")))


def test_a_growing_mixture_gets_its_experts_from_the_grown_checkpoint(tmp_path):
    lines = dry_run(RECIPES / "lm" / "gmoe_base.sh", tmp_path, METHOD="split").splitlines()
    training = [line for line in lines if "fairseq-train " in line]
    assert ["--num-experts 4" in line for line in training] == [True, False, False, False]
    assert all("/grown.pt" in line for line in training[1:])
    growing = [line for line in lines if line.startswith("alma-grow")]
    assert [re.search(r"--experts (\d+)", line)[1] for line in growing] == ["2", "2", "4"]
    assert all("--method split" in line and "--noise" not in line for line in growing)
    noisy = dry_run(RECIPES / "lm" / "gmoe_base.sh", tmp_path, "--grow-noise", "0.01").splitlines()
    assert [line.count("--noise 0.01") for line in noisy if line.startswith("alma-grow")] == [1, 1, 1]


def test_the_control_of_table_1_makes_the_updates_of_k_stages_at_once(tmp_path):
    out = dry_run(RECIPES / "lm" / "ens_base.sh", tmp_path, IID="3")
    assert out.count("fairseq-train ") == 2
    assert "--megabatch 2 --wait 3" in out
    assert "--total-num-update 360000 --max-update 360000" in out


@pytest.mark.slow
def test_the_small_tables_have_all_rows_and_none_twice(tmp_path):
    out = dry_run(RECIPES / "lm" / "cpu" / "all.sh", tmp_path, SIZES="base", SEEDS="1 2", UPDATES="10")
    runs = re.findall(r"--save-dir \S*/runs/(\S+?)/stage-000/member-0 ", out)
    assert len(runs) == len(set(runs))
    both_seeds = ["sm-4-w1", "sm-8-w1", "sm-12-w1", "ens-4@2-w1", "gens-w1", "gmoe-copy-w1", "gmoe-split-w1",
                  "ens-4@2-iid3", "ens-4@2-iid4"]  # fmt: skip
    one_seed = ["sm-8-w3", "sm-8-w3-x3", "sm-12-w4", "sm-12-w4-x4", "ens-4@4-w1", "ens-4@2-w3", "ens-4@2-w3-x3",
                "ens-4@2-w4", "ens-4@2-w4-x4"]  # fmt: skip
    expected = [f"{name}-base-seed{seed}" for name in both_seeds for seed in (1, 2)]
    assert set(runs) == {*expected, *(f"{name}-base-seed1" for name in one_seed)}


def test_the_quickstart_runs_four_learners(tmp_path):
    out = dry_run(RECIPES / "quickstart.sh", tmp_path, OUT=str(tmp_path / "quickstart"), UPDATES="9")
    assert out.count("fairseq-train ") == 4 + 8 + 4 + 4
    assert out.count("alma-grow ") == 3
    assert out.count("alma-ensemble ") == 4 + 3


def test_a_dry_run_of_images_fetches_and_writes_nothing(tmp_path):
    knobs = {"SOURCE": str(tmp_path / "corpus"), "LEARNERS": "sm gmoe", "SIZES": "4", "WAITS": "50", "PRESETS": "paper"}
    prepare, *rows = dry_run(RECIPES / "vision/mnist.sh", tmp_path, "--replay", SEEDS="1 2", **knobs).splitlines()
    assert prepare.startswith("python -m data_prep.corpus mnist ")
    assert [row.split(" -- ")[0].split("--seed ")[1].split()[0] for row in rows] == ["1", "1", "2"]
    assert all(row.startswith("alma-stream ") and "--replay --" in row and "--dry-run" not in row for row in rows)
    assert list(tmp_path.iterdir()) == []


def with_stubs(recipe, tmp_path, knobs, *options, **stubs):
    """Run a recipe with some commands replaced by lines of bash; each notes its name in ``called``."""
    (tmp_path / "bin").mkdir()
    for name, code in stubs.items():
        stub = tmp_path / "bin" / name.replace("_", "-")
        stub.write_text(f'#!/usr/bin/env bash\necho {stub.name} >>"{tmp_path}/called"\n{code}\n')
        stub.chmod(0o755)
    # With an environment of the checkout's own, the recipe would put that in front of the stubs.
    path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ALMA_OWN_VENV": "0"}
    environment = {**os.environ, "RUNS": str(tmp_path / "runs"), **path}
    command = ["bash", str(recipe), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment | knobs)
    called = tmp_path / "called"
    return done, called.read_text().split() if called.exists() else []


def test_the_image_study_ends_with_files_that_are_no_images(tmp_path):
    (tmp_path / "corpus").mkdir()
    for name in MNIST_NAMES:
        (tmp_path / "corpus" / name).write_text("no images")
    knobs = {"SOURCE": str(tmp_path / "corpus"), "LEARNERS": "sm", "SIZES": "4", "WAITS": "1 50"}
    done, called = with_stubs(RECIPES / "vision/mnist.sh", tmp_path, knobs, alma_stream="true")
    assert done.returncode == 1 and called == []
    (line,) = done.stderr.splitlines()
    assert "train-images-idx3-ubyte" in line


@pytest.mark.parametrize("recipe", ["quickstart.sh", "quickstart_images.sh", "lm/cpu/sm_waits.sh"])
def test_a_recipe_for_newcomers_shows_its_table_and_names_its_picture(recipe):
    text = (RECIPES / recipe).read_text(encoding="utf-8")
    assert "alma-report" in text or "finish" in text
    assert "figures/anytime-curve.png" in text
