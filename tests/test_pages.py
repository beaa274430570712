"""README and pages: every command runs as it stands, every link leads to a file, every page is short."""

import contextlib
import importlib
import random
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fairseq_alma.options import Options
from tests.runs.results import stage_records
from tests.scripts import run_script

CHECKOUT = Path(__file__).parent.parent
PAGES = ["README.md", *(str(page.relative_to(CHECKOUT)) for page in sorted((CHECKOUT / "docs").rglob("*.md")))]
PARSERS = {
    "alma-prep-text": ("data_prep.text.command", "parse_options"),
    "alma-stream": ("fairseq_alma.cli.stream", "read_arguments"),
    **{
        f"alma-{name}": (f"fairseq_alma.cli.{name.replace('import', 'import_model')}", "main")
        for name in ("update", "export", "import", "report", "ensemble")
    },
}
NOT_TYPED = {
    "pip ": "installs packages",
    **dict.fromkeys(("python -m build", "python -m venv"), "test_installation.py and exchange/test_export.py"),
    "bash recipes/quickstart.sh": "tests/recipes runs it with --dry-run",
    "bash tests/run.sh": "runs the tests",
    "python recipes/lm/ladder.py": "takes hours; tests/recipes/test_ladder.py",
    "python -m tests.kills.matrix": "takes hours; tests/kills/test_matrix.py",
    **({} if find_spec("lm_eval") else dict.fromkeys(("python recipes/lm_eval", "lm_eval "), "needs [evaluate]")),
}
"""Beginnings of the commands that no test types as they stand, and why."""
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "nine", "dogs", "barked", "and", "nobody", "slept", "."]


def blocks_of(page):
    """The bash blocks of a page."""
    return re.findall(r"^```bash\n(.*?)^```", (CHECKOUT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands_of(page):
    """The words of each command of this package on a page, without redirections and what follows a pipe."""
    for block in blocks_of(page):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in PARSERS and "s-from" not in line:  # these register code
                stop = next((place for place, word in enumerate(words) if word in ("|", ">", ">>", "&", "&&")), None)
                yield words[:stop]


class Parsed(Exception):
    """The arguments are accepted."""


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_accepted_by_its_parser(page, monkeypatch):
    def accepted(*_, **further):
        raise Parsed

    monkeypatch.setattr(Options, "read", accepted)
    for name, *arguments in commands_of(page):
        module, function = PARSERS[name]
        with contextlib.nullcontext() if function == "read_arguments" else pytest.raises(Parsed):
            getattr(importlib.import_module(module), function)(arguments)


@pytest.mark.parametrize("page", [*PAGES, "recipes/README.md", "tests/README.md"])
def test_every_link_of_a_page_leads_to_a_file(page):
    path = CHECKOUT / page
    if not path.exists():
        pytest.skip("not written")
    links = {link.partition("#")[0] for link in re.findall(r"\]\((?!http)([^)]+)\)", path.read_text(encoding="utf-8"))}
    assert [link for link in sorted(links - {""}) if not (path.parent / link).exists()] == []


def lines_of(page):
    """The commands of a page that are typed, and its Python blocks, in order."""
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(bash|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "python":
            yield language, block
        else:
            lines = block.replace("\\\n", " ").splitlines()
            yield from ((language, line) for line in lines if line and not line.startswith(("#", *NOT_TYPED)))


def type_line(language, line, folder):
    """Run a command, or a block of Python, in a folder; a block whose first line is a file's name becomes that file."""
    named = re.match(r"# (\w+\.py)\n", line)
    if named:
        (folder / named[1]).write_text(line, encoding="utf-8")
        return
    words = [sys.executable, "-c", line] if language == "python" else shlex.split(line, comments=True)
    if words[0].startswith(("alma-", "fairseq-")):
        words = [str(CHECKOUT / word) if word == "fairseq_alma" else word for word in words]  # --user-dir
        done = run_script(words, cwd=folder)
    elif language == "python":
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    else:  # recipes find the checkout by their own path
        in_checkout = re.sub(r"(?<!\S)recipes/", f"{CHECKOUT}/recipes/", line)
        done = subprocess.run(["bash", "-c", in_checkout], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with what the pages name as the reader's own, in which the commands for own text have been typed."""
    from tests.data_prep.published_images import write_mnist
    from tests.exchange.test_import import write_folder

    folder = tmp_path_factory.mktemp("desk")
    (folder / "my_text").mkdir()
    for number, name in enumerate(("my_text/all.txt", "2026-01.txt", "2026-02.txt")):
        draw = random.Random(number)
        documents = [" ".join(draw.choices(WORDS, k=30)) for _ in range(120 if number else 400)]
        (folder / name).write_text("\n\n".join(documents), encoding="utf-8")
    (folder / "held_out.txt").write_text("the cat sat\n\nnobody slept\n", encoding="utf-8")
    (folder / "alma_text.jsonl").write_text('{"text": "the cat sat"}\n', encoding="utf-8")
    write_folder(folder / "qwen_folder")
    write_mnist(folder / "mnist_files", 1100, 50)
    for line in list(lines_of("docs/how-to/own-text.md"))[:2]:
        type_line(*line, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(True for _ in lines_of(page))])
def test_a_page_is_typed_from_top_to_bottom(page, desk, tmp_path, monkeypatch):
    folder = shutil.copytree(desk, tmp_path / "desk")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    for language, line in lines_of(page):
        if "SlurmPipelineExecutor" in line:  # needs a cluster; its imports and arguments are checked
            line = line[: line.index("run_stages(stages,")]
        type_line(language, line, folder)
    if page == "docs/how-to/own-learner.md":  # its learner starts from random weights in every third stage
        assert [record["megabatches"] for record in stage_records(folder / "runs/reset")] == [[0], [1], [2], [3]]
        logs = [path.read_text() for path in sorted(folder.glob("runs/reset/stage-*/train-member-0.log"))]
        assert ["--continue-once" in log for log in logs] == [False, True, True, False]


def test_pages_are_few_and_short():
    limits = {"docs/results.md": 250}
    lines = {page: (CHECKOUT / page).read_text(encoding="utf-8").count("\n") for page in PAGES}
    assert {page: number for page, number in lines.items() if number > limits.get(page, 120)} == {}
    assert len(lines) <= 15
