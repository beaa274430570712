import math

from fairseq_alma.report.write_report import Report, describe_run, result_table, sentences
from tests.report.fakes import image_stream, text_stream


def test_two_sentences_say_who_was_best_by_how_much_and_over_how_many_seeds(groups):
    two = text_stream(2)  # both have the same average
    sm = [{"values": [30.0, 20.0 + s / 10], "stream": two, "seed": s} for s in (1, 2, 3)]
    ens = [{"values": [32.0, 18.0 + s / 10], "stream": two, "seed": s, "learner": "ens"} for s in (1, 2, 3)]
    end, avg = sentences(groups(*sm, *ens))
    assert end == (
        "Best at the end: Ens_w1, test perplexity 18.20 ± 0.10 over 3 seeds, 9.9 % lower than SM_w1 (20.20 ± 0.10)."
    )
    assert avg.startswith("Best over all 2 arrivals: SM_w1, avg PPL 25.10 ± 0.05 over 3 seeds, 0.0 % lower than Ens_w1")
    assert "not significant" in avg


def test_one_seed_and_runs_under_way_are_no_evidence(groups):
    one = {"stream": image_stream(4)}
    end, _ = sentences(groups(one, {**one, "learner": "ens", "num_members": (5,)}))
    assert "over 1 seed," in end and end.endswith("another seed may change the order.")


def test_learners_that_diverged_or_that_are_not_complete_are_not_compared(groups):
    one = {"stream": text_stream(2), "values": [30.0, math.inf]}
    assert sentences(groups(one, {**one, "learner": "ens"})) == []
    assert sentences(groups({}, {"learner": "ens", "num_stages": 1})) == []


def test_models_of_several_vocabularies_are_compared_in_bits_per_byte(groups):
    streams = [text_stream(vocab_size=size, fingerprint=str(size) * 32) for size in (50, 60)]
    found = groups(*({"values": [20.0 + n] * 4, "stream": each} for n, each in enumerate(streams)))
    (sentence,) = sentences(found)
    assert ", bits per byte 1.080 over 1 seed" in sentence and result_table(found).best == {"bits per byte"}


def test_a_single_run_is_described(runs):
    (run,) = runs({"values": [30.0, 24.0], "stream": text_stream(2)})
    (run.path / "sample.txt").write_text("In the beginning\n")
    log = '2026 | INFO | train | {"epoch": 1, "train_loss": "5", "train_nll_loss": "4.0", "train_ppl": "16"}\n'
    (run.path / "stage-001" / "train-member-0.log").write_text(log)
    details = dict(Report([run]).details)
    assert details["Newest model"].startswith("after mega-batch 2 of 2: test perplexity 24.00, 1.146 bits per byte, 1k")
    assert details["Last arrival"] == "test perplexity 20.0 % lower than after the previous stage (30.00)"
    assert details["Training and test"] == "mean train perplexity 16.00 in the last epoch, test perplexity 24.00"
    assert details["Sample of text, SM_w1"] == "In the beginning"


def test_nothing_is_said_of_a_run_that_has_not_begun_and_no_gain_of_a_diverged_one(runs):
    run, diverged = runs({"num_stages": 0}, {"values": [30.0, math.nan], "stream": text_stream(2)})
    assert list(describe_run(run)) == [] and [title for title, _ in describe_run(diverged)] == ["Newest model"]
