import numpy as np
import pytest

from fairseq_alma.text.split_losses import KeptPredictions


def kept(members, **log_probs):
    sums = KeptPredictions("text", tuple(members))
    for split, each in log_probs.items():
        for member in each:
            sums.add(split, np.array(member, dtype=np.float32))
    return sums


def test_the_loss_is_that_of_the_mean_probability_in_bits():
    sums = kept("ab", test=[np.log([0.5, 0.25]), np.log([0.25, 0.75])])
    assert sums.loss("test") == pytest.approx(-(np.log2(0.375) + np.log2(0.5)) / 2, rel=1e-6)
    assert kept("ab", test=[[-np.inf, np.log(0.5)], [-np.inf, np.log(0.5)]]).loss("test") == pytest.approx(
        1
    )  # as fairseq


def test_a_file_gives_back_the_same_bits_and_a_further_member_is_added_to_them(tmp_path):
    draw = np.random.default_rng(0)
    members = -draw.random((3, 7)).astype(np.float32)
    kept("ab", valid=members[:2, :3], test=members[:2]).write(tmp_path / "kept.npz")
    read = KeptPredictions.read(tmp_path / "kept.npz")
    now = KeptPredictions("text", ("a", "b", "c"))
    assert now.is_begun_by(read)
    now.log_sums = dict(read.log_sums)
    now.add("test", members[2])
    assert now.loss("test") == kept("abc", test=members).loss("test")
    assert [len(each) for each in read.log_sums.values()] == [3, 7]


def test_sums_of_other_members_or_of_other_text_are_not_gone_on_with(tmp_path):
    now = KeptPredictions("text", ("a", "b"))
    assert not now.is_begun_by(None) and not now.is_begun_by(KeptPredictions("text", ("b",)))
    assert not now.is_begun_by(KeptPredictions("other text", ("a",)))
    assert KeptPredictions.read(tmp_path / "none.npz") is None
    kept("a", test=[[0.0]]).write(tmp_path / "cut.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-30])
    assert KeptPredictions.read(tmp_path / "cut.npz") is None
