import pytest

from fairseq_alma.report.finding import Comparison, Finding, Spread, Verdict
from fairseq_alma.report.findings import all_findings
from fairseq_alma.report.paper import paper_tables
from tests.report.fakes import image_stream, table_of, text_stream, write_run

WIDTHS = {"base": "512", "large": "768"}


def verdicts(roots):
    ((_, found),) = all_findings(table_of(roots))
    return {finding.claim: finding for finding in found}


def about(found, words):
    """The one finding whose claim has these words."""
    (finding,) = [finding for claim, finding in found.items() if words in claim]
    return finding


def write_paper(folder):
    """Runs with the figures of the paper's Tables 1 and 2."""
    stream, roots = text_stream(vocab_size=50000), []
    for row in paper_tables().table2:
        name, _, steps = row.learner.partition(" (")
        learner, wait = name.split("_w")
        times = int(steps[0]) if steps else 1
        sizes = [(*size.split("@"), "1")[:2] for size in row.experts.split(", ")]
        options = {"--arch": "alma_switch_lm", "--decoder-embed-dim": WIDTHS[row.size], "--max-update": f"{times}00"}
        roots.append(
            write_run(
                folder / f"{row.size} {row.learner} {row.experts}", [ppl for ppl in row.ppl if ppl is not None],
                learner.lower(), stream, num_params=row.num_params, num_experts=[int(size[0]) for size in sizes],
                num_members=[int(size[1]) for size in sizes], wait=int(wait), drop_rest=wait == "3",
                train_options=options if learner == "gMoE" else {**options, "--num-experts": sizes[0][0]},
            )
        )  # fmt: skip
    for control in paper_tables().table1:
        for k, ppl in control.iid.items():
            options = {"--arch": "alma_switch_lm", "--decoder-embed-dim": WIDTHS[control.size], "--max-update": "100"}
            roots.append(
                write_run(folder / f"{control.size} iid {k}", [ppl], "ens", stream, num_members=(2,), iid=k,
                          train_options={**options, "--num-experts": "4"})
            )  # fmt: skip
    return roots


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    return verdicts(write_paper(tmp_path_factory.mktemp("paper")))


@pytest.mark.parametrize(
    "words",
    ["Larger models are better", "sample efficient", "Growing beats not growing", "Growing does not improve",
     "gEns is ahead of gMoE", "Ensembles perform best", "With small models", "Learning sequentially is harder",
     "The larger the model", "Waiting for all data ends best"],
)  # fmt: skip
def test_the_papers_own_numbers_point_to_its_findings_but_one_seed_is_no_verdict(words, paper):
    finding = about(paper, words)
    assert finding.verdict is Verdict.ONE_SEED
    points = [comparison.points for comparison in finding.comparisons]
    assert min(points) >= 0 and 2 * points.count(1) >= len(points)
    assert f"rest on one seed, {points.count(1)} of which" in finding.decided_by.replace("rests", "rest")
    assert all(comparison.outcome == 0 for comparison in finding.comparisons)


def test_what_the_runs_cannot_decide_says_what_is_missing(paper):
    finding = about(paper, "smooth")
    assert finding.verdict is Verdict.NOT_ENOUGH
    assert finding.decided_by == "Needs a complete run of gMoE that splits experts."


def test_a_finding_that_runs_contradict_did_not_hold(tmp_path):
    def runs(seed):
        few, many = ({"train_options": {"--num-experts": number}, "seed": seed} for number in ("4", "8"))
        few = write_run(tmp_path / f"few{seed}", [20.0 + seed] * 4, **few)
        return [few, write_run(tmp_path / f"many{seed}", [25.0 + seed] * 4, num_experts=(8,), **many)]

    finding = about(verdicts(runs(0)), "Larger models are better")
    assert finding.verdict is Verdict.ONE_SEED
    assert finding.decided_by == "1 rests on one seed, and does not point to it."
    shown = "avg PPL: SM_w1 (8 experts) 25.00 > SM_w1 (4 experts) 20.00; one seed decides nothing"
    assert finding.comparisons[0].show() == shown
    finding = about(verdicts([tmp_path / "few0", tmp_path / "many0", *runs(1)]), "Larger models are better")
    assert finding.verdict is Verdict.NOT_HELD
    assert finding.decided_by == "The one comparison contradicts it."


def test_seeds_decide_whether_a_difference_is_too_close_to_tell(tmp_path):
    def runs(name, values, experts):
        options = {"--num-experts": f"{experts}"}
        return [
            write_run(tmp_path / f"{name}{seed}", [value] * 4, seed=seed, num_experts=(experts,), train_options=options)
            for seed, value in enumerate(values)
        ]

    few, many = runs("few", [30.0, 31.0, 32.0], 4), runs("many", [29.0, 33.0, 30.0], 8)
    assert about(verdicts([*few, *many]), "Larger models are better").verdict is Verdict.TOO_CLOSE
    hardly = runs("hardly", [29.9, 30.8, 31.9], 16)  # 0 is in the interval of 0.13 ± 0.14
    assert about(verdicts([*few, *hardly]), "Larger models are better").verdict is Verdict.TOO_CLOSE
    better = runs("better", [29.9, 30.88, 31.9], 12)
    finding = about(verdicts([*few, *better]), "Larger models are better")
    assert finding.verdict is Verdict.HELD
    assert "(by 0.11 ± 0.03, 95 % over 3 shared seeds)" in finding.comparisons[0].show()


def image_run(folder, learner, width, wait, final, seeds=(1, 2, 3), **options):
    """Complete runs, one for each seed, whose error falls at once to what it ends with, which moves with the seed."""
    stream, words = image_stream(20), options.pop("words", {})
    members = 5 if learner in ("ens", "umix") else 1
    num_params, num_experts = options.pop("num_params", (100 * width * members,)), options.pop("num_experts", (1,))
    return [
        write_run(
            folder / f"{learner}-{width}-w{wait}-{options.get('replay', False)}-{seed}", [final + seed / 1000] * 20,
            learner, stream, wait=wait, num_experts=num_experts, num_members=(members,), num_params=num_params,
            train_options={"--arch": "alma_mlp", "--width": f"{width}", **words}, seed=seed, **options,
        ) for seed in seeds
    ]  # fmt: skip


def flat(runs):
    return [run for each in runs for run in each]


def test_the_best_wait_is_found_for_small_and_large_models(tmp_path):
    small, large = ((1, 0.5), (2, 0.3), (5, 0.29), (20, 0.25)), ((1, 0.1), (2, 0.099), (5, 0.098), (20, 0.09))
    runs = [image_run(tmp_path, "sm", 4, wait, final) for wait, final in small]
    runs += [image_run(tmp_path, "sm", 64, wait, final) for wait, final in large]
    found = verdicts(flat(runs))
    assert about(found, "intermediate waiting time").verdict is Verdict.HELD
    smaller = about(found, "Smaller waiting times")
    assert smaller.verdict is Verdict.HELD
    assert (
        smaller.comparisons[0].show().startswith("best waiting time, mega-batches: SM (mlp, width 64) 1 ± 0 < SM (mlp")
    )
    assert about(found, "Waiting for all data ends best").verdict is Verdict.HELD
    assert about(found, "Waiting for all data is worst").verdict is Verdict.HELD


def test_mixtures_are_compared_with_those_of_the_same_gates(tmp_path):
    """A soft gMoE that is behind a soft MoE is not ahead of "not growing" because a hard MoE is worse."""

    def mixtures(gate, growing, fixed):
        words = {"--gate": gate}
        grows = {"num_experts": (2, 3, 4), "num_params": (400, 800, 1200)}
        return [
            image_run(tmp_path / gate, "gmoe", 4, 1, growing, words=words, **grows),
            image_run(tmp_path / gate, "moe", 4, 1, fixed, words=words, num_experts=(2,)),
        ]

    found = verdicts(flat(mixtures("soft", 0.2, 0.1) + mixtures("hard", 0.4, 0.5)))
    growing = about(found, "Growing beats not growing")
    assert growing.verdict is Verdict.IN_PART
    assert [each.outcome for each in growing.comparisons] == [-1, 1]


def test_a_gate_that_is_not_named_is_a_soft_one(tmp_path):
    arch = {"--arch": "alma_moe_mlp"}
    runs = [
        image_run(tmp_path, "gmoe", 4, 1, 0.2, words={**arch, "--gate": "hard"}, num_experts=(2, 3), num_params=(4, 8)),
        image_run(tmp_path, "moe", 4, 1, 0.3, words=arch, num_experts=(2,)),
    ]
    assert not about(verdicts(flat(runs)), "Growing beats not growing").comparisons


def test_the_best_wait_is_one_of_those_that_small_and_large_models_have(tmp_path):
    small = [image_run(tmp_path, "sm", 4, wait, final) for wait, final in ((1, 0.5), (2, 0.3), (4, 0.3), (5, 0.3))]
    large = [image_run(tmp_path, "sm", 64, wait, final) for wait, final in ((2, 0.1), (4, 0.2), (5, 0.2))]
    (comparison,) = about(verdicts(flat(small + large)), "Smaller waiting times").comparisons
    assert comparison.low.by_seed == {(seed, 1): 2 for seed in (1, 2, 3)} == comparison.high.by_seed
    found = verdicts(flat(small[:3] + large))
    assert not about(found, "Smaller waiting times").comparisons


@pytest.mark.parametrize(
    ("other", "words"), [({"stage_average": "mean"}, {}), ({}, {"--num-experts": "2"})], ids=["average", "experts"]
)
def test_learners_of_other_options_are_other_learners(other, words, tmp_path):
    """Neither one's waiting times nor its sizes are the other's."""
    runs = [image_run(tmp_path, "moe", 4, wait, final) for wait, final in ((1, 0.5), (5, 0.4))]
    runs.append(image_run(tmp_path, "moe", 4, 2, 0.2, words=words, **other))
    runs.append(image_run(tmp_path, "moe", 64, 1, 0.45, words=words, **other))
    found = verdicts(flat(runs))
    assert not about(found, "intermediate waiting time").comparisons
    assert len(about(found, "Larger models are better").comparisons) == (1 if words else 0)


@pytest.mark.parametrize(
    ("claims", "runs"),
    [
        (["intermediate waiting time"], [("sm", 4, wait, final) for wait, final in ((1, 0.3), (2, 0.299), (20, 0.25))]),
        (["Smaller waiting times"], [("sm", width, wait, wait / width) for width in (4, 64) for wait in (1, 2)]),
        (["For a given memory"], [("ens", 4, 1, 0.25), ("gens", 4, 1, 0.35, {"num_params": (400, 2000, 4000)})]),
        (
            ["For a given memory", "For a given training compute it is"],
            [("sm", 8, 20, 0.2), ("gmoe", 8, 20, 0.3)],
        ),
        (
            ["Replay lowers the CER", "Replay gives no better"],
            [
                ("sm", 8, 2, 0.25, {"replay": True, "train_flops": 2e12}),
                ("sm", 8, 1, 0.10, {"train_flops": 2e12}),
            ],
        ),
    ],
    ids=[
        "waiting for all is the worst, not the longest of three",
        "two waiting times do not tell which is best",
        "one part of a claim of two",
        "a growing learner that waits too long to grow",
        "replay at another waiting time",
    ],
)
def test_there_are_not_enough_runs_for_a_claim(claims, runs, tmp_path):
    found = verdicts(flat([image_run(tmp_path, *run[:4], **(run[4] if run[4:] else {})) for run in runs]))
    assert {about(found, claim).verdict for claim in claims} == {Verdict.NOT_ENOUGH}


@pytest.mark.parametrize("values", [[None], [[], []]], ids=["one run", "runs without an update"])
def test_a_single_run_and_runs_without_an_update_decide_nothing(values, tmp_path):
    learners = zip(values, ("sm", "ens"), strict=False)
    found = verdicts([write_run(tmp_path / learner, each, learner) for each, learner in learners])
    assert {each.verdict for each in found.values()} == {Verdict.NOT_ENOUGH}


def test_no_single_size_is_called_large(tmp_path):
    runs = [image_run(tmp_path, learner, 64, 1, final) for learner, final in (("sm", 0.2), ("ens", 0.1))]
    assert about(verdicts(flat(runs)), "Ens is the best learner").verdict is Verdict.NOT_ENOUGH
    runs.append(image_run(tmp_path, "sm", 4, 1, 0.3))
    assert about(verdicts(flat(runs)), "Ens is the best learner").verdict is Verdict.HELD


def test_a_learner_is_compared_with_the_next_size_that_it_was_run_with(tmp_path):
    runs = [image_run(tmp_path, "sm", width, 1, 1 / width) for width in (4, 8, 64)]
    runs += [image_run(tmp_path, "ens", width, 1, 1 / width) for width in (4, 64)]
    found = verdicts(flat(runs))
    for claim in ("Larger models are better", "sample efficient"):
        pairs = [(each.higher, each.lower) for each in about(found, claim).comparisons]
        assert pairs == [
            ("SM_w1, mlp, width 4", "SM_w1, mlp, width 8"),
            ("Ens_w1, 5 models, mlp, width 4", "Ens_w1, 5 models, mlp, width 64"),
            ("SM_w1, mlp, width 8", "SM_w1, mlp, width 64"),
        ]


def test_growing_learners_are_compared_at_the_same_budget(tmp_path):
    runs = [
        image_run(tmp_path, "sm", 8, 1, 0.20),
        image_run(tmp_path, "gmoe", 4, 1, 0.25, num_params=(400, 800, 1200), num_experts=(1, 2, 3)),
        image_run(tmp_path, "sm", 64, 1, 0.01),  # too large to be compared with
    ]
    (comparison,) = about(verdicts(flat(runs)), "For a given memory").comparisons
    assert (comparison.lower, comparison.outcome) == ("SM_w1, mlp, width 8", 1)


def test_the_operating_point_matters(tmp_path):
    runs = [image_run(tmp_path, "umix", 4, 1, 0.30), image_run(tmp_path, "ens", 4, 1, 0.35)]
    runs += [image_run(tmp_path, "umix", 64, 1, 0.20), image_run(tmp_path, "ens", 64, 1, 0.10)]
    found = verdicts(flat(runs))
    assert about(found, "operating point").verdict is Verdict.HELD
    assert about(found, "Ens is the best learner").verdict is Verdict.HELD
    found = verdicts(flat([*runs[:3], image_run(tmp_path / "other", "ens", 64, 1, 0.25)]))
    assert about(found, "operating point").verdict is Verdict.IN_PART


def test_a_vote_is_no_second_ensemble(tmp_path):
    runs = [image_run(tmp_path, "umix", 4, 1, 0.30), image_run(tmp_path, "ens", 4, 1, 0.35)]
    runs += [image_run(tmp_path, "umix", 64, 1, 0.20), image_run(tmp_path, "ens", 64, 1, 0.10)]
    runs += [image_run(tmp_path / "vote", "ens", width, 1, 0.31, combine="vote") for width in (4, 64)]
    found = verdicts(flat(runs))
    assert len(about(found, "operating point").comparisons) == 2
    (comparison,) = about(found, "Ens is the best learner").comparisons
    assert comparison.higher.startswith("UMix")


def test_one_half_of_a_claim_is_no_verdict_on_it_but_contradicts_it(tmp_path):
    sizes = [image_run(tmp_path, "sm", width, 1, 0.4) for width in (4, 64)]
    half = [image_run(tmp_path, "umix", 4, 1, 0.30), image_run(tmp_path, "ens", 4, 1, 0.35)]
    assert about(verdicts(flat([*sizes, *half])), "operating point").verdict is Verdict.NOT_ENOUGH
    half[1] = image_run(tmp_path / "other", "ens", 4, 1, 0.25)
    assert about(verdicts(flat([*sizes, *half])), "operating point").verdict is Verdict.NOT_HELD


def test_the_best_of_many_is_chosen_on_other_seeds_than_it_is_compared_on(tmp_path):
    # Each waiting time between is ahead for one seed alone, by chance; the best of the means would be ahead of wait 1.
    errors = {
        1: (0.5, 0.5, 0.5),
        2: (0.40, 0.53, 0.53),
        3: (0.53, 0.40, 0.53),
        4: (0.53, 0.53, 0.40),
        5: (0.6, 0.6, 0.6),
    }
    runs = [
        write_run(tmp_path / f"w{wait}-{seed}", [error] * 20, stream=image_stream(20), seed=seed, wait=wait,
                  train_options={"--arch": "alma_mlp", "--width": "4"}, num_experts=(1,))
        for wait, each in errors.items() for seed, error in enumerate(each)
    ]  # fmt: skip
    found = about(verdicts(runs), "intermediate waiting time")
    (against_eager,) = [each for each in found.comparisons if each.higher.startswith("SM_w1")]
    assert "of 3 the best on the other seeds" in against_eager.lower
    assert against_eager.low.mean > against_eager.high.mean


def test_a_stream_that_is_shorter_than_the_beginning_of_another_is_no_traceback(tmp_path):
    runs = [
        write_run(tmp_path / f"{arrivals}-{width}", [30.0 - params / 1000] * arrivals, num_params=(params,),
                  stream=text_stream(2) | {"num_megabatches": arrivals},
                  train_options={"--arch": "alma_switch_lm", "--decoder-embed-dim": width})
        for arrivals in (2, 30) for width, params in (("64", 1000), ("128", 4000))
    ]  # fmt: skip
    (comparison,) = about(verdicts(runs), "sample efficient").comparisons
    assert "after t2" in comparison.show()


def test_what_is_the_same_model_counts_once(tmp_path):
    runs = [image_run(tmp_path, "sm", 64, 10, 0.2), image_run(tmp_path, "sm", 4, 10, 0.4)]
    runs.append(image_run(tmp_path, "gens", 64, 10, 0.2))
    (comparison,) = about(verdicts(flat(runs)), "Larger models are better").comparisons
    assert comparison.outcome == 1
    runs.append(image_run(tmp_path, "gens", 4, 10, 0.4))
    assert len(about(verdicts(flat(runs)), "Larger models are better").comparisons) == 1


@pytest.mark.parametrize(("held", "verdict"), [(2, Verdict.HELD), (1, Verdict.IN_PART)])
def test_a_claim_holds_where_two_thirds_bear_it_out_and_nothing_contradicts_it(held, verdict):
    better = Comparison("a", "b", Spread.of({1: 1.0, 2: 1.0}), Spread.of({1: 2.0, 2: 2.1}), "error")
    level = Comparison("a", "b", Spread.of({1: 1.0, 2: 2.0}), Spread.of({1: 2.0, 2: 1.0}), "error")
    assert Finding("claim", "source", "runs", [better] * held + [level] * (3 - held)).verdict is verdict


def test_replay_is_weighed_against_what_its_compute_buys_without(tmp_path):
    runs = [
        image_run(tmp_path, "sm", 8, 1, 0.30),
        image_run(tmp_path, "sm", 8, 1, 0.25, replay=True),
        image_run(tmp_path, "sm", 64, 1, 0.20, train_flops=8e12),
    ]
    found = verdicts(flat(runs))
    assert about(found, "Replay lowers the CER").verdict is Verdict.HELD
    trade_off = about(found, "Replay gives no better")
    assert (trade_off.verdict, trade_off.comparisons[0].lower) == (Verdict.HELD, "SM_w1, mlp, width 64")
    # Without replay for a tenth of its compute a higher error shows nothing; for as much, it does.
    assert about(verdicts(flat(runs[:2])), "Replay gives no better").verdict is Verdict.NOT_ENOUGH
    runs[2] = image_run(tmp_path, "sm", 32, 1, 0.28, train_flops=8e12)
    assert about(verdicts(flat(runs)), "Replay gives no better").verdict is Verdict.NOT_HELD


@pytest.mark.parametrize("after,verdict", [(10.0, Verdict.HELD), (10.001, Verdict.HELD), (10.5, Verdict.NOT_HELD)])
def test_growth_is_smooth_if_a_split_changes_nothing(after, verdict, tmp_path):
    before = {"valid": {"loss": 3.0, "ppl": 10.0}}
    grown = [{}, {"before_growth": before, "after_growth": {"valid": {"loss": 3.0, "ppl": after}}}]
    run = write_run(tmp_path / "R", [9.0, 8.0], "gmoe", text_stream(2), num_experts=(4, 6), grow_method="split",
                    stage_extras=grown)  # fmt: skip
    assert about(verdicts([run]), "smooth").verdict is verdict


def test_smoothness_of_image_mixtures_is_told_by_the_loss_not_by_the_error(tmp_path):
    def grown(name, after):
        splits = [{}, {"before_growth": {"valid": {"loss": 0.3, "error": 0.05}},
                       "after_growth": {"valid": {"loss": after, "error": 0.05}}}]  # fmt: skip
        return write_run(tmp_path / name, [0.1, 0.05], "gmoe", image_stream(2), num_experts=(1, 2), stage_extras=splits)

    finding = about(verdicts([grown("smooth", 0.30000003)]), "smooth")
    assert finding.verdict is Verdict.HELD
    assert "nats: gMoE_w1 (1 to 2 experts) 3e-08 < limit 0.001" in finding.comparisons[0].show()
    assert about(verdicts([grown("jump", 0.35)]), "smooth").verdict is Verdict.NOT_HELD


def test_what_growth_by_copies_does_stands_beside_what_splits_do(tmp_path):
    roots = [write_run(tmp_path / f"{method}-{seed}", [9.0, 8.0], "gmoe", text_stream(2), seed, num_experts=(4, 6),
                       stage_extras=[{}, {"before_growth": {"valid": {"loss": 3.0, "ppl": 10.0}},
                                          "after_growth": {"valid": {"loss": 3.0, "ppl": after}}}], grow_method=method)
             for method, seed, after in (("split", 1, 10.0), ("copy", 1, 10.5), ("copy", 2, 10.1))]  # fmt: skip
    finding = about(verdicts(roots), "smooth")
    assert finding.verdict is Verdict.HELD
    assert finding.decided_by.endswith("Growth of a flat mixture, as by copies, changes it by up to 0.049 nats.")


def test_losing_for_far_less_compute_decides_nothing_and_is_not_hidden(tmp_path):
    def pair(wait, growing, fixed):
        grows = {"num_params": (400, 800, 1200), "train_flops": 1e12}
        return [image_run(tmp_path, "gens", 4, wait, growing, **grows), image_run(tmp_path, "ens", 4, wait, fixed)]

    claim = "gEns beats Ens"
    runs = pair(1, 0.2, 0.3) + pair(2, 0.3, 0.2) + pair(4, 0.3, 0.2)
    finding = about(verdicts(flat(runs)), claim)
    assert finding.verdict is Verdict.NOT_ENOUGH
    assert finding.decided_by.startswith("1 of 3 comparisons bears it out, 2 decide nothing. Needs")
    assert "decides nothing, the first one costs less" in finding.comparisons[-1].show()
    assert about(verdicts(flat(runs[:4])), claim).verdict is Verdict.HELD


def test_waiting_for_all_is_compared_with_every_waiting_time(tmp_path):
    """Against waiting 1 alone the claim would hold."""
    runs = [image_run(tmp_path, "sm", 4, wait, final) for wait, final in ((1, 0.5), (2, 0.2), (20, 0.25))]
    found = verdicts(flat(runs))
    finding = about(found, "Waiting for all data ends best")
    assert finding.verdict is Verdict.IN_PART
    ends = [(each.lower, each.higher, each.outcome) for each in finding.comparisons]
    assert ends == [("SM_w20", "SM_w1", 1), ("SM_w20", "SM_w2", -1)]
    assert about(found, "Waiting for all data is worst").verdict is Verdict.HELD  # which is another question


def test_what_rests_on_one_seed_is_shown_and_does_not_count(tmp_path):
    runs = [image_run(tmp_path, "sm", width, 1, 1 / width) for width in (4, 8)]
    runs += [image_run(tmp_path, "ens", 4, 1, 0.1), image_run(tmp_path, "ens", 8, 1, 0.2, seeds=(1,))]
    finding = about(verdicts(flat(runs)), "Larger models are better")
    assert finding.verdict is Verdict.HELD
    assert finding.decided_by == "1 of 2 comparisons bears it out, 1 rests on one seed, and does not point to it."
    assert finding.comparisons[1].show().endswith("; one seed decides nothing")


def test_settings_that_differ_are_put_to_the_test_apart(tmp_path):
    by_accuracy = {"--select": "accuracy", "--patience": "25"}
    runs = [image_run(tmp_path, "sm", 4, 1, 0.2), image_run(tmp_path, "sm", 64, 1, 0.1, words=by_accuracy)]
    found = all_findings(table_of(flat(runs)))
    assert [run.setting for run, _ in found] == ["", "--select accuracy, --patience 25"]
    slowly = image_run(tmp_path, "ens", 4, 1, 0.1, words={"--optimizer": "adadelta", "--lr": "0.01"})
    usual = image_run(tmp_path, "umix", 4, 1, 0.1, words={"--least-gain": "0.0", "--lr": "1", "--cpu": ""})
    found_both = all_findings(table_of(flat([runs[0], slowly, usual])))
    assert [run.setting for run, _ in found_both] == ["", "--lr 0.01"]
    assert {each.verdict for _, findings in found for each in findings} == {Verdict.NOT_ENOUGH}
    runs.append(image_run(tmp_path / "other", "sm", 4, 1, 0.2, words=by_accuracy))
    (_, paper), (_, code) = all_findings(table_of(flat(runs)))
    assert {each.verdict for each in paper} == {Verdict.NOT_ENOUGH}
    assert Verdict.HELD in {each.verdict for each in code}


@pytest.mark.parametrize("claim", ["no more training compute", "no more memory, too"])
def test_an_ensemble_is_weighed_against_a_single_model_of_its_budget(claim, tmp_path):
    runs = [
        image_run(tmp_path, "ens", 4, 1, 0.25, train_flops=1e12),  # five members: 5e12, 2000 parameters
        image_run(tmp_path, "sm", 4, 1, 0.40, train_flops=1e12),
        image_run(tmp_path, "sm", 20, 1, 0.22, train_flops=5e12),
    ]
    (comparison,) = about(verdicts(flat(runs)), claim).comparisons
    assert (comparison.lower, comparison.higher) == ("Ens_w1, 5 models, mlp, width 4", "SM_w1, mlp, width 20")
    assert comparison.outcome == -1


def test_growing_is_compared_with_not_growing(tmp_path):
    grows = {"num_params": (400, 800, 1200), "num_experts": (1, 2, 3)}
    runs = [image_run(tmp_path, "sm", 4, 1, 0.30), image_run(tmp_path, "gmoe", 4, 1, 0.35, **grows)]
    assert about(verdicts(flat(runs)), "Growing beats not growing").verdict is Verdict.NOT_HELD


def test_streams_are_not_compared_with_each_other(tmp_path):
    few = write_run(tmp_path / "few", train_options={"--num-experts": "4"})
    other = text_stream(fingerprint="b" * 64)
    many = write_run(tmp_path / "many", stream=other, num_experts=(8,), train_options={"--num-experts": "8"})
    found = all_findings(table_of([few, many]))
    assert len(found) == 2
    assert {each.verdict for _, findings in found for each in findings} == {Verdict.NOT_ENOUGH}
