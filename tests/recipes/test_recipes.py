import os
import re
import subprocess
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
SINGLE_MODELS = sorted(RECIPES.glob("lm/sm_*.sh"))


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


@pytest.mark.parametrize("recipe", SINGLE_MODELS, ids=lambda path: path.stem)
def test_the_single_model_is_trained_with_the_papers_settings(recipe, tmp_path):
    lines = dry_run(recipe, tmp_path, EXPERTS="12").splitlines()
    training = [line for line in lines if line.startswith("fairseq-train")]
    assert len(training) == 4
    for option in (
        "--adam-betas '(0.9, 0.98)'", "--adam-eps 1e-8", "--lr-scheduler polynomial_decay", "--max-update 120000",
        "--total-num-update 120000", "--tokens-per-sample 512", "--num-experts 12", "--capacity-factor 1.0",
        "--balance-loss-weight 0.01", f"--arch alma_switch_lm_{recipe.stem.removeprefix('sm_')}",
    ):  # fmt: skip
        assert all(option in line for line in training), option


@pytest.mark.parametrize("gpus,update_freq", [("8", "3"), ("4", "6"), ("1", "24")])
def test_an_update_has_192_sequences_on_any_number_of_devices(gpus, update_freq, tmp_path):
    assert f"--batch-size 8 --update-freq {update_freq} " in dry_run(SINGLE_MODELS[0], tmp_path, GPUS=gpus)


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
