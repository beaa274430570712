import argparse

import pytest

from fairseq_alma.number_range import InRange, Range, real, whole


@pytest.mark.parametrize(
    ("bounds", "text", "said"),
    [
        (whole(1), "0", "a number of at least 1 is needed"),
        (whole(1), "1" + "0" * 30, "a number of at most 2,147,483,647 is needed"),
        (whole(1), "2.5", "a whole number is needed"),
        (whole(1), "9" * 5000, "a whole number is needed"),  # longer than Python reads
        (real(0, 1), "nan", "a number is needed"),
        (real(0, 1), "inf", "a number of at most 1 is needed"),
        (real(0, 1), "-inf", "a number of at least 0 is needed"),
        (real(0, 1), "1e-3x", "a number is needed"),
        (real(0, above=True), "0", "a number above 0 is needed"),
        (real(0, 1, below=True), "1", "a number below 1 is needed"),
        (real(0), "1e31", "a number of at most 1e+30 is needed"),
    ],
)
def test_a_text_that_is_no_number_of_the_range_is_refused_with_what_is_needed(bounds, text, said):
    with pytest.raises(ValueError, match=rf"^{said.replace('+', '[+]')}$"):
        bounds.read(text)
    with pytest.raises(argparse.ArgumentTypeError, match=rf"found, {said.replace('+', '[+]')}$"):
        InRange(bounds)(text)


def test_bounds_belong_to_the_range_unless_they_are_left_out():
    assert [whole(1, 3).read(text) for text in ("1", "3")] == [1, 3]
    assert [real(0, 1).read(text) for text in ("0", "1", "1e-400")] == [0, 1, 0]
    assert InRange(real(0, 1, above=True, below=True))("0.5") == 0.5


@pytest.mark.parametrize("text", ["0.1,0.2", "[0.1, 0.2]", "(0.1,0.2,)"])
def test_a_list_is_read_as_fairseq_spells_it(text):
    assert Range(0, is_whole=False, is_list=True).read_all(text) == [0.1, 0.2]
