import numpy as np
import pytest

from fairseq_alma.text.losses import joint_losses

GENERATOR = np.random.default_rng(0)
FOUND = {name: -GENERATOR.random((3, 7)).astype(np.float32) for name in ("valid", "test", "later")}


def losses_of(members, splits=("valid", "test"), text="text", **files):
    """Return (losses of an ensemble of members a, b, c, …, members and splits that were tested)."""
    tested = []

    def log_probs(number, some):
        tested.append((number, *some))
        return [(split, FOUND[split]["abc".index(members[number])]) for split in some]

    return joint_losses(text, members, splits, log_probs, **files), tested


def test_the_loss_is_that_of_the_mean_probability_in_bits():
    probs = np.exp(FOUND["test"][:2].astype(float)).mean(0)
    assert losses_of("ab")[0]["test"] == pytest.approx(-np.log2(probs).mean(), rel=1e-12)


def test_infinite_losses_do_not_count_as_in_fairseq():
    log_probs = np.array([-np.inf, np.log(0.5)])
    assert joint_losses("text", "a", ["test"], lambda *_: [("test", log_probs)]) == {"test": pytest.approx(1)}


@pytest.mark.parametrize("name", ["known", "out"])
def test_a_later_ensemble_tests_only_new_members_and_has_the_same_bits(tmp_path, name):
    losses_of("ab", out=tmp_path / "kept.npz")
    losses, tested = losses_of("abc", **{"out": tmp_path / "none.npz", name: tmp_path / "kept.npz"})
    assert tested == [(2, "valid", "test")]
    assert losses == losses_of("abc")[0]


def test_all_members_are_tested_on_a_new_split(tmp_path):
    splits = ("valid", "test", "later")
    losses_of("ab", out=tmp_path / "kept.npz")
    losses, tested = losses_of("abc", splits, known=tmp_path / "kept.npz")
    assert tested == [(0, "later"), (1, "later"), (2, "valid", "test", "later")]
    assert losses == losses_of("abc", splits)[0]


@pytest.mark.parametrize("other", ["members", "text", "damaged"])
def test_sums_of_other_members_or_text_and_damaged_files_are_ignored(tmp_path, other):
    path = tmp_path / "kept.npz"
    losses_of("b" if other == "members" else "a", text="other text" if other == "text" else "text", out=path)
    if other == "damaged":
        path.write_bytes(path.read_bytes()[:-30])
    assert len(losses_of("ab", known=path)[1]) == 2
