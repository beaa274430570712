import base64
import json
import re
import shlex
from html.parser import HTMLParser

import pytest

from fairseq_alma.cli.stream import learner_options, read_arguments
from fairseq_alma.learners.learner import LEARNERS, build_learner
from fairseq_alma.report.figures import FigureFile
from fairseq_alma.report.write_report import Report, command_of
from tests.report.fakes import image_stream, table_of, text_stream, write_run

VOID = {"meta", "img", "br", "link", "input"}


class Reader(HTMLParser):
    """Reads a page, and fails where an element is not closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


def build(roots, out, figures=(), **options):
    return Report(table_of(roots)).page(figures, out, **options)


@pytest.fixture
def roots(tmp_path):
    return [
        write_run(tmp_path / "sm", [30.0, 20.0], stream=text_stream(2)),
        write_run(tmp_path / "ens<&>", [29.0], "ens", text_stream(2), num_members=(2,), num_params=(2000,)),
    ]


@pytest.mark.parametrize(("size", "said"), [(13, "no 13 words of which"), (None, "parts of which may be trained on")])
def test_the_page_says_whether_the_test_set_was_kept_clean(size, said, tmp_path):
    run = write_run(tmp_path / "sm", [30.0, 20.0], stream={**text_stream(2), "decontaminated": size})
    assert said in Reader(build([run], tmp_path)).text


def test_the_page_says_what_the_runs_are(roots, tmp_path):
    page = Reader(build(roots, tmp_path))
    assert "SM and Ens" in page.text
    assert "text: 2 mega-batches, vocabulary of 50 tokens, 100 tokens in the test set (aaaaaaaaaaaa)" in page.text
    assert "1 of 2 complete, 3 of 4 stages" in page.text
    assert "torch 2.13.0" in page.text
    assert "alma-stream --stream streams/text --learner sm" in page.text
    assert "1 of 2 stages" in page.text
    assert "not enough runs" in page.text


def test_names_of_folders_cannot_break_the_page(roots, tmp_path):
    page = build(roots, tmp_path)
    assert "ens<&>" not in page
    assert "ens&lt;&amp;&gt;" in page
    assert "ens<&>" in Reader(page).text


def test_the_page_needs_nothing_from_elsewhere(roots, tmp_path):
    files = {ending: tmp_path / "figures" / f"f.{ending}" for ending in ("png", "pdf", "svg")}
    (tmp_path / "figures").mkdir()
    for path, content in zip(files.values(), (b"png", b"pdf", b"<svg/>"), strict=True):
        path.write_bytes(content)
    page = build(roots, tmp_path, [FigureFile("f", "A figure", "What it shows.", files)])
    tags = Reader(page).tags
    sources = [attributes["src"] for tag, attributes in tags if "src" in attributes]
    assert sources == [f"data:image/svg+xml;base64,{base64.b64encode(b'<svg/>').decode()}"]
    links = [attributes["href"] for tag, attributes in tags if "href" in attributes]
    assert "figures/f.pdf" in links and "perplexity.csv" in links
    assert not [link for link in links if "://" in link]
    assert not re.search(r"(https?:|url\(|@import)", page)


def test_a_drawing_that_is_too_heavy_or_missing_is_shown_as_a_picture(roots, tmp_path):
    (tmp_path / "f.png").write_bytes(b"png")
    page = build(roots, tmp_path, [FigureFile("f", "A", "B", {"png": tmp_path / "f.png", "pdf": tmp_path / "f.pdf"})])
    assert "data:image/png;base64,cG5n" in page


def test_cells_carry_what_they_are_sorted_by(roots, tmp_path):
    tags = Reader(build(roots, tmp_path)).tags
    values = [attributes["data-value"] for tag, attributes in tags if tag == "td"]
    assert {"SM_w1", "30.0", "1000.0", ""} <= set(values)  # name, perplexity, parameters, not run yet
    assert [attributes for tag, attributes in tags if tag == "td" and "best" in attributes["class"]]


def test_the_page_loads_itself_anew_only_while_it_is_watched(roots, tmp_path):
    assert 'http-equiv="refresh" content="15"' in build(roots, tmp_path, refresh_seconds=15)
    assert "refresh" not in build(roots, tmp_path)


def test_text_and_images_stand_on_one_page(roots, tmp_path):
    images = write_run(tmp_path / "images", learner="gmoe", stream=image_stream(), num_experts=(2, 3, 4))
    page = Reader(build([*roots, images], tmp_path))
    assert "text and images" in page.text
    assert "digits: 10 mega-batches, 10 classes, 300 images in the test set (source of di)" in page.text
    assert "Test error after each mega-batch" in page.text


def test_a_run_names_the_command_that_makes_it(tmp_path):
    options = {"--arch": "alma_switch_lm", "--adam-betas": "(0.9, 0.98)", "--cpu": ""}
    root = write_run(tmp_path / "R", learner="ens", num_members=(2,), replay=True, wait=2, train_options=options)
    (run,) = table_of([root]).facts.itertuples()
    assert command_of(run) == (
        f"alma-stream --stream streams/text --learner ens --run {tmp_path}/R --seed 1 --wait 2 --replay "
        "--init previous --num-members 2 -- --arch alma_switch_lm --adam-betas '(0.9, 0.98)' --cpu"
    )


@pytest.mark.parametrize(
    ("kind", "learner", "options", "shown"),
    [
        ("text", "sm", {"best_checkpoint": True, "best_every": 10, "save_every": 10}, "--save-every 10"),
        ("text", "ens", {"carry_optimizer": True, "branch_decay": 0.2, "branch_shape": "sqrt"}, "--branch-decay 0.2"),
        ("images", "sm", {"stage_average": "mean", "shrink_perturb": 0.4}, "--shrink-perturb 0.4"),
        *((kind, learner, {}, "--wait 1") for kind, learners in LEARNERS.items() for learner in learners),
    ],
)
def test_alma_stream_takes_the_command_of_a_run(kind, learner, options, shown, tmp_path):
    stream = text_stream() if kind == "text" else image_stream()
    schedules = {("text", "gmoe"): "4,6", ("text", "grow"): "layers=1,6"}
    needed = {"grow_schedule": schedules[kind, learner]} if (kind, learner) in schedules else {}
    own = build_learner(LEARNERS[kind][learner], kind, 1, 1, needed).record(kind)
    root = write_run(tmp_path / "R", learner=learner, stream=stream, num_stages=0)
    record = json.loads((root / "run.json").read_text())
    chosen = dict.fromkeys(("replay", "drop_rest", "keep_checkpoints"), False)
    record["options"] = {"wait": 1, "iid": None, **chosen, **own, **options}
    (root / "run.json").write_text(json.dumps(record))
    (run,) = table_of([root]).facts.itertuples()
    command = command_of(run)
    assert shown in command
    parser, arguments, _, words = read_arguments(shlex.split(command)[1:])
    learner_options(parser, arguments, kind)
    assert words == ["--arch", record["train_options"]["--arch"]]
    assert (arguments.save_every, arguments.jobs) == (options.get("best_every"), "jobs" in options or None)
    for name in {**own, **options}.keys() - {"best_every", "save_every", "jobs"}:
        assert str(vars(arguments)[name] or None) == str(record["options"][name] or None)
