from fairseq_alma.report.experiment import begun
from fairseq_alma.report.figures.panels import lay_out, left_out
from fairseq_alma.report.read_run import RunTable


def groups_of(runs):
    return begun(RunTable.of(runs))


def sized(width):
    return {"train_options": {"--arch": "alma_mlp", "--width": str(width)}, "num_params": [width]}


def test_each_size_has_a_column(make):
    runs = [
        make(f"{learner}-{width}", learner=learner, **sized(width)) for learner in ("sm", "ens") for width in (8, 4)
    ]
    (row,) = lay_out(groups_of(runs))
    assert [panel.title for panel in row.panels] == ["mlp, width 4", "mlp, width 8"]
    assert [list(panel.groups) for panel in row.panels] == [["SM_w1", "Ens_w1"]] * 2


def test_of_many_sizes_four_that_cover_the_range_are_shown(make):
    groups = groups_of([make(f"{width}", **sized(width)) for width in (1, 2, 3, 4, 5, 6, 7)])
    (row,) = lay_out(groups)
    assert [panel.title[-1] for panel in row.panels] == ["1", "3", "5", "7"]
    assert left_out(groups) == ["mlp, width 2", "mlp, width 4", "mlp, width 6"]


def test_one_size_needs_no_title(make):
    (row,) = lay_out(groups_of([make("a", **sized(4))]))
    assert [panel.title for panel in row.panels] == [""]


def many(make):
    return groups_of(
        [
            make(f"{learner}{wait}", learner=learner, wait=wait)
            for learner in ("sm", "ens", "umix")
            for wait in (1, 2, 4)
        ]
    )


def test_a_crowded_panel_becomes_a_row_for_each_learner(make):
    rows = lay_out(many(make))
    assert [row.title for row in rows] == ["SM", "Ens", "UMix"]
    assert list(rows[1].panels[0].groups) == ["Ens_w1", "Ens_w2", "Ens_w4"]


def test_rows_may_hold_waiting_times_instead(make):
    rows = lay_out(many(make), "shown_wait")
    assert [row.title for row in rows] == ["wait 1", "wait 2", "wait 4"]
    assert list(rows[2].panels[0].groups) == ["SM_w4", "Ens_w4", "UMix_w4"]


def test_a_colour_means_a_learner_and_a_marker_a_waiting_time(make):
    runs = [make(f"{learner}{wait}", learner=learner, wait=wait) for learner in ("sm", "ens") for wait in (1, 2)]
    (row,) = lay_out(groups_of(runs))
    looks = row.styles
    assert looks["SM_w1"].colour == looks["SM_w2"].colour != looks["Ens_w1"].colour
    assert looks["SM_w1"].marker == looks["Ens_w1"].marker != looks["SM_w2"].marker


def test_all_curves_of_a_row_look_different(make):
    runs = [make(f"{lr}", train_options={"--lr": lr}) for lr in ("0.1", "0.2", "0.3")]
    runs += [make("r", replay=True), make("e", learner="ens"), make("w", wait=2), make("i", iid=2)]
    (row,) = lay_out(groups_of(runs))
    assert len({(look.colour, look.marker, look.dash) for look in row.styles.values()}) == len(runs)


def test_the_same_waiting_time_has_the_same_colour_in_all_rows(make):
    rows = lay_out(many(make))
    assert rows[0].styles["SM_w2"].colour == rows[2].styles["UMix_w2"].colour


def test_a_column_is_titled_where_its_first_panel_stands(make_sized):
    runs = [make_sized(learner, 4, wait) for learner in ("sm", "ens", "umix") for wait in (1, 2, 5)]
    rows = lay_out(groups_of([*runs, make_sized("ens", 8, 1), make_sized("umix", 8, 1)]))
    titles = [[panel and panel.title for panel in row.panels] for row in rows]
    assert titles == [["mlp, width 4", None], ["", "mlp, width 8"], ["", ""]]
