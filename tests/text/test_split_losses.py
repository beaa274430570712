import numpy as np
import pytest

from fairseq_alma.text.split_losses import KeptPredictions

DRAW = np.random.default_rng(0)
FOUND = {name: -DRAW.random((3, 7)).astype(np.float32) for name in ("valid", "test", "later")}


def add_missing(members, files=(), splits=("valid", "test"), text="text"):
    """Return the kept predictions of members a, b, c, …, and the members and splits that were tested."""
    asked = []

    def log_probs(number, some):
        asked.append((number, *some))
        return [(split, FOUND[split]["abc".index(members[number])]) for split in some]

    kept = KeptPredictions(text, list(members))
    kept.add_missing(splits, files, log_probs)
    return kept, asked


def test_the_loss_is_that_of_the_mean_probability_in_bits():
    kept, _ = add_missing("ab")
    probs = np.exp(FOUND["test"][:2].astype(float)).mean(0)
    assert dict(kept.losses())["test"] == pytest.approx(-np.log2(probs).mean(), rel=1e-12)
    infinite = KeptPredictions("text", ["a"])
    infinite.log_sums = {"test": np.array([-np.inf, np.log(0.5)])}
    assert dict(infinite.losses()) == {"test": pytest.approx(1)}  # as fairseq's


def test_a_later_ensemble_tests_only_new_members_and_has_the_same_bits(tmp_path):
    add_missing("ab")[0].write(tmp_path / "kept.npz")
    kept, asked = add_missing("abc", [tmp_path / "none.npz", tmp_path / "kept.npz"])
    assert asked == [(2, "valid", "test")]
    assert list(kept.losses()) == list(add_missing("abc")[0].losses())


def test_all_members_are_tested_on_a_new_split(tmp_path):
    add_missing("ab")[0].write(tmp_path / "kept.npz")
    kept, asked = add_missing("abc", [tmp_path / "kept.npz"], ("valid", "test", "later"))
    assert asked == [(0, "later"), (1, "later"), (2, "valid", "test", "later")]
    assert dict(kept.losses()) == dict(add_missing("abc", splits=("valid", "test", "later"))[0].losses())


@pytest.mark.parametrize("other", ["members", "text", "damaged"])
def test_sums_of_other_members_or_text_and_damaged_files_are_ignored(tmp_path, other):
    path = tmp_path / "kept.npz"
    add_missing("b" if other == "members" else "a", text="other text" if other == "text" else "text")[0].write(path)
    if other == "damaged":
        path.write_bytes(path.read_bytes()[:-30])
    assert len(add_missing("ab", [path])[1]) == 2
