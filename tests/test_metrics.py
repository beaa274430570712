import pytest

from fairseq_alma import metrics


def test_while_waiting_the_model_of_the_last_update_counts():
    assert metrics.in_force({1: 10.0, 3: 5.0}, 5, untrained=90.0) == [90.0, 10.0, 10.0, 5.0, 5.0]


def test_memory_counts_the_model_at_every_arrival_also_while_it_waits():
    assert metrics.cumulative_memory({1: 100, 3: 150}, 5) == 100 + 100 + 100 + 150 + 150
    assert metrics.cumulative_memory({}, 5) == 0


def test_computation_is_what_the_updates_cost():
    assert metrics.cumulative_computation({1: 1e9, 3: 2e9}) == 3e9


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    coarse = metrics.bits_per_byte(8.0, num_tokens=100, num_bytes=400)
    fine = metrics.bits_per_byte(4.0, num_tokens=200, num_bytes=400)
    assert coarse == fine == 2.0
    assert metrics.bits_per_byte(8.0, 0, 0) is None


def test_cer_is_the_sum_of_errors_in_percent_points_before_the_first_update_of_an_untrained_model():
    assert metrics.cumulative_error_rate({0: 0.2, 1: 0.1}, 2, num_classes=10) == pytest.approx(30)
    assert metrics.cumulative_error_rate({2: 0.1}, 3, num_classes=10) == pytest.approx(90 + 90 + 10)


def test_average_perplexity_is_that_of_the_papers_first_row_and_poor_for_who_waits_for_everything():
    row = dict(enumerate([28.57, 27.45, 26.91, 26.53]))
    assert metrics.average_perplexity(row, 4, vocab_size=50000) == pytest.approx(27.365)
    assert metrics.average_perplexity({3: 24.0}, 4, vocab_size=50000) == pytest.approx((3 * 50000 + 24) / 4)
