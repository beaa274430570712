from fairseq_alma import metrics


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    coarse = metrics.bits_per_byte(8.0, num_tokens=100, num_bytes=400)
    fine = metrics.bits_per_byte(4.0, num_tokens=200, num_bytes=400)
    assert coarse == fine == 2.0
    assert metrics.bits_per_byte(8.0, 0, 0) is None
