"""Every table and every verdict of the README files is that of the records that are kept beside them."""

import json
import re
import tarfile
from pathlib import Path

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.finding import Verdict
from tests.recipes.programs import load
from tests.report.fakes import image_stream, write_run

ROOT = Path(__file__).parents[2]
tables = load("tables")

DECIDED = [verdict.value for verdict in Verdict if verdict is not Verdict.NOT_ENOUGH]
# In bold, or in plain words; in italics the word itself is meant.
VERDICT = re.compile(rf"\*\*(?:[^*]*: )?({'|'.join(DECIDED)})\*\*|(?<!\*)\b(?:did not hold|too close to tell)\b")


def unfounded(text, findings):
    """Return the lines of a README that pronounce a verdict which no findings file has."""
    known = {line for each in findings for line in each.splitlines()}
    lines = []
    for line in text.splitlines():
        if VERDICT.search(line):
            claim = line.removeprefix("- ").partition(". ")[0]
            if not any(each.removeprefix("- ").startswith(claim) for each in known):
                lines.append(line)
    return lines


@pytest.mark.parametrize("readme", ["README.md", "recipes/README.md", "recipes/sensitivity.md"])
def test_no_readme_pronounces_a_verdict_that_no_record_bears_out(readme):
    findings = [path.read_text(encoding="utf-8") for path in tables.RECORDS.glob("*.findings.md")]
    assert unfounded((ROOT / readme).read_text(encoding="utf-8"), findings) == []


@pytest.mark.parametrize(
    "line",
    ["- **held**: Fish can fly. 3 of 3 comparisons bear it out.", "- **Fish can fly: held** in 3 of 3 comparisons.",
     "That fish can fly did not hold."],
)  # fmt: skip
def test_a_verdict_without_a_finding_is_noticed(line):
    assert unfounded(line, ["- **did not hold**: Fish can fly. (somewhere) Contradicted."]) == [line]
    assert unfounded("- **held**: Fish can fly. 3 of 3.", ["- **held**: Fish can fly. (somewhere) 3 of 3."]) == []


@pytest.mark.slow
def test_every_block_of_the_recipes_is_that_of_its_records():
    wanted = tables.everything(tables.names())
    assert all(path.read_text(encoding="utf-8") == text for path, text in wanted.items())
    shown = {name for page in tables.PAGES for _, _, name, *_ in tables._BLOCK.findall(wanted[page])}
    assert shown == set(tables.names())
    assert {path for path in wanted if path.suffix == ".md"} >= set(tables.RECORDS.glob("*.md"))


def test_a_figure_that_is_not_the_records_is_found():
    page = tables.HERE / "anytime" / "README.md"
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition("<!-- arms anytime-deals")
    other = head + begin + rest.replace("| +0.", "| +9.", 1)
    assert other != text == tables.rebuilt(other, {"anytime-deals": tables.read("anytime-deals")})


@pytest.mark.parametrize("page", tables.SENTENCES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_interval_of_a_sentence_is_in_a_table(page):
    known = tables.known_intervals(each.read_text(encoding="utf-8") for each in tables.PAGES)
    assert tables.unknown_intervals(page.read_text(encoding="utf-8"), known) == []


def test_an_interval_of_a_sentence_that_no_table_has_is_found():
    block = "<!-- table name -->\n| -1.26 ± 0.34 | 0.966 [0.952, 0.981] | 0.32 [0.18, 0.47] |\n<!-- end -->\n"
    founded = "Behind by 1.3 ± 0.3 %, 0.966 [0.952, 0.981], 32 % [18, 47].\n| before 9 ± 9 | 1.26 ± 0.34 |\n"
    known = tables.known_intervals([block])
    assert tables.unknown_intervals(block + founded, known) == []
    stale = "Behind by 1.2 ± 0.3 %,\n\n0.967 [0.952, 0.981].\n| page | 9 ± 9 |\n"
    found = [(4, "1.2 ± 0.3"), (6, "0.967 [0.952, 0.981]"), (7, "9 ± 9")]
    assert tables.unknown_intervals(block + stale, known) == found


def test_records_are_small_and_name_no_machine():
    for name in tables.names():
        archive = tables.RECORDS / f"{name}{tables.ENDING}"
        assert archive.stat().st_size < 3_000_000
        with tarfile.open(archive) as file:
            entry = next(each for each in file if each.name.endswith("run.json"))
            assert "/" not in json.load(file.extractfile(entry))["stream"]["path"]


def test_kept_records_make_the_table_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    roots = [
        write_run(tmp_path / f"{name}-{size}" / f"seed-{seed}", [0.5, error], stream=image_stream(2), seed=seed,
                  train_options={"--arch": "alma_mlp", "--width": size}, num_experts=(1,))
        for name, size, error in (("sm", "4", 0.4), ("sm", "64", 0.2)) for seed in (1, 2)
    ]  # fmt: skip
    tables.keep("small", roots)
    text = "Before\n<!-- table small -->\nyesterday\n<!-- end -->\n<!-- findings small -->\n<!-- end -->\nAfter\n"
    page = tmp_path / "README.md"
    page.write_text(text)
    monkeypatch.setattr(tables, "PAGES", (page,))
    readme, findings = tables.everything(["small"]).values()
    assert readme.startswith("Before\n<!-- table small -->\n| learner |") and readme.endswith("<!-- end -->\nAfter\n")
    assert "| SM_w1   | mlp, width 64 |" in readme and "yesterday" not in readme
    assert "- **held**: Larger models are better" in readme
    assert unfounded(readme, [findings]) == []


def test_a_block_is_one_table_of_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    runs = [write_run(tmp_path / f"sm/seed-{seed}", [9.0, 8.0, 7.0, 50.0 + seed], seed=seed) for seed in (1, 3)]
    tables.keep("small", runs)
    page = tables.rebuilt("<!-- report small seeds -->\n<!-- end -->\n", {"small": tables.read("small")})
    assert "| 52.00 ± 1.41" in page and "t3" in page
    with pytest.raises(AlmaError, match=r"report growth: .* no such table of these runs; choose from perplexity, "):
        tables.rebuilt("<!-- report small growth -->\n<!-- end -->\n", {"small": tables.read("small")})


def two_seeds(folder, **options):
    return [
        write_run(folder / f"seed-{seed}", [0.5, 0.4], stream=image_stream(2), seed=seed, **options) for seed in (1, 2)
    ]


def test_what_cannot_be_kept_leaves_the_archive_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path / "records")
    roots = two_seeds(tmp_path / "sm")
    before = tables.keep("small", roots).read_bytes()
    (roots[1] / "stage-001/stage.json").write_text("{")
    same_name = two_seeds(tmp_path / "elsewhere" / "sm")
    refused = [([], "no run to keep"), (roots, "stage-001/stage.json"), ([roots[0], same_name[0]], "called sm/seed-1")]
    for runs, words in refused:
        for incomplete in (True, False):
            with pytest.raises(AlmaError, match=words):
                tables.keep("small", runs, incomplete)
    assert (tmp_path / "records/small.tar.xz").read_bytes() == before
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["small.tar.xz"]


def test_a_table_says_how_many_of_its_runs_have_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path / "records")
    runs = [*two_seeds(tmp_path / "sm"), *two_seeds(tmp_path / "ens", learner="ens", num_stages=1)]
    tables.keep("half", runs, incomplete=True)
    assert "4 runs, 2 complete;" in tables.table_of(tables.read("half"))
    tables.keep("whole", runs)
    assert "2 runs, all complete;" in tables.table_of(tables.read("whole"))


def test_runs_are_added_to_those_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path / "records")
    both = [*two_seeds(tmp_path / "sm"), *two_seeds(tmp_path / "ens", learner="ens")]
    at_once = tables.keep("small", both).read_bytes()
    tables.keep("small", both[:3])
    assert tables.keep("small", both[2:], add=True).read_bytes() == at_once
    assert len(tables.read("small").facts) == 4


@pytest.mark.parametrize("cut", [0, 200])
def test_a_damaged_archive_is_named(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(tables, "RECORDS", tmp_path / "records")
    archive = tables.keep("small", two_seeds(tmp_path / "sm"))
    archive.write_bytes(archive.read_bytes()[:cut])
    with pytest.raises(AlmaError, match=r"records/small.tar.xz: damaged, "):
        tables.read("small")


def test_a_table_is_kept_beside_the_others_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path / "records")
    for name in ("../small", "a/b", ".."):
        with pytest.raises(AlmaError, match="not a path"):
            tables.keep(name, two_seeds(tmp_path / name.replace("/", "-")))
    assert not [*tmp_path.rglob("*.tar.xz")]


def test_a_block_without_records_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path / "records")
    tables.keep("small", two_seeds(tmp_path / "sm"))
    (tmp_path / "README.md").write_text("<!-- table smal -->\nas it was\n<!-- end -->\n")
    monkeypatch.setattr(tables, "PAGES", (tmp_path / "README.md",))
    with pytest.raises(AlmaError, match=r"README.md: a block smal, of which there are no records"):
        tables.everything(["small"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "nothing"], "--only nothing: no such table; choose from"),
        (["--check", "--keep", "small", "R"], "--check changes nothing"),
        (["--incomplete"], "--incomplete says which runs are kept"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, words, capsys):
    with pytest.raises(SystemExit):
        tables.main(options)
    assert words in capsys.readouterr().err
