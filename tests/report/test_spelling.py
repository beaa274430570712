"""What a report calls a run: its label, its variant and how it was trained."""

import pytest

from fairseq_alma.report.spelling import label_of, setting_of, variant_of

OPTIONS = {"wait": 10, "replay": False, "drop_rest": False, "iid": None, "keep_checkpoints": True, "init": "previous"}
TRAINING = {"--arch": "alma_mlp", "--optimizer": "adadelta", "--lr": "1.0", "--max-epoch": "100", "--width": "4"}
BY_ACCURACY = {"--select": "accuracy", "--least-gain": "0.001", "--patience": "25"}


def run(learner="sm", training=None, preset="paper", overridden=(), kind="images", **options):
    return {
        "learner": learner, "stream": {"kind": kind}, "options": {**OPTIONS, **options},
        "train_options": {**TRAINING, **(training or {})}, "preset": {"name": preset, "overridden": [*overridden]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "label", "variant"),
    [
        ({}, "SM_w10", "SM"),
        ({"wait": 1, "replay": True}, "SM_w1 replay", "SM"),
        ({"learner": "ens", "num_members": 5, "combine": "vote"}, "Ens_w10 vote", "Ens vote"),
        ({"learner": "ens", "num_members": 3, "combine": "vote"}, "Ens_w10 vote", "Ens vote --num-members 3"),
        ({"stage_average": "mean"}, "SM_w10", "SM --stage-average mean"),
        ({"learner": "gens", "init": "scratch", "num_members": 1}, "gEns_w10", "gEns"),
        ({"learner": "gens", "num_members": 1}, "gEns_w10 previous", "gEns previous"),
        (
            {"learner": "gens", "num_members": 1, "combine": "logits", "preset": "released-code"},
            "gEns_w10 (released code)", "gEns",
        ),
        (
            {"learner": "gens", "num_members": 1, "combine": "logits", "init": "scratch", "preset": "released-code",
             "overridden": ["--init"]},
            "gEns_w10 scratch (released code)", "gEns scratch",
        ),
    ],
)  # fmt: skip
def test_what_is_not_usual_is_told(given, label, variant):
    assert (label_of(run(**given)), variant_of(run(**given))) == (label, variant)


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({}, ""),
        ({"training": {"--lr": "1", "--least-gain": "0", "--cpu": "", "--num-experts": "2", "--gate": "hard"}}, ""),
        ({"training": {"--lr": "0.1", "--patience": "9"}}, "--lr 0.1, --patience 9"),
        ({"training": {"--max-epoch": "30"}}, "--max-epoch 30"),
        ({"training": {"--optimizer": "sgd"}}, "--optimizer sgd"),
        ({"training": {"--arch": "alma_vgg", "--optimizer": "sgd", "--lr": "0.01", "--momentum": "0.9"}}, ""),
        ({"training": {"--lr": "0.1"}, "kind": "text"}, ""),
        ({"training": BY_ACCURACY, "preset": "released-code"}, "released code"),
        (
            {"training": {**BY_ACCURACY, "--select": "loss"}, "preset": "released-code", "overridden": ["--select"]},
            "released code, --select loss",
        ),
        ({"training": {**BY_ACCURACY, "--max-epoch": "5"}, "preset": "released-code"}, "released code, --max-epoch 5"),
        (
            {"learner": "gens", "training": BY_ACCURACY, "preset": "released-code", "overridden": ["--init"],
             "init": "scratch", "combine": "logits"},
            "released code, --init scratch",
        ),
    ],
)  # fmt: skip
def test_how_images_are_trained_on_is_told_where_it_is_not_the_papers_way(given, setting):
    assert setting_of(run(**given)) == setting
