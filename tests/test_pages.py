"""README and pages: every command is accepted by its parser, every link leads somewhere, every page is short."""

import importlib
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
PAGES = ["README.md", *(str(page.relative_to(CHECKOUT)) for page in sorted((CHECKOUT / "docs").rglob("*.md")))]
PARSERS = {
    "alma-prep-text": ("data_prep.text.options", "parse_options"),
    "alma-stream": ("fairseq_alma.cli.stream", "read_arguments"),
    **{
        f"alma-{name}": (f"fairseq_alma.cli.{module}", "build_parser")
        for name, module in (
            ("update", "update"), ("export", "export"), ("import", "import_model"), ("report", "report"),
        )
    },
}  # fmt: skip
TYPED = ("docs/how-to/own-text.md", "docs/how-to/monthly.md")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "nine", "dogs", "barked", "and", "nobody", "slept", "."]


def blocks_of(page):
    """The bash blocks of a page."""
    return re.findall(r"^```bash\n(.*?)^```", (CHECKOUT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands_of(page):
    """The words of each command of this package on a page, without redirections and what follows a pipe."""
    for block in blocks_of(page):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in PARSERS and "$" not in line:
                stop = next((place for place, word in enumerate(words) if word in ("|", ">", ">>", "&", "&&")), None)
                yield words[:stop]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_accepted_by_its_parser(page):
    for name, *arguments in commands_of(page):
        module, function = PARSERS[name]
        parse = getattr(importlib.import_module(module), function)
        (parse().parse_args if function == "build_parser" else parse)(arguments)


@pytest.mark.parametrize("page", [*PAGES, "recipes/README.md", "tests/README.md"])
def test_every_link_of_a_page_leads_to_a_file(page):
    path = CHECKOUT / page
    if not path.exists():
        pytest.skip("not written")
    links = {link.partition("#")[0] for link in re.findall(r"\]\((?!http)([^)]+)\)", path.read_text(encoding="utf-8"))}
    assert [link for link in sorted(links - {""}) if not (path.parent / link).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in TYPED if page in PAGES])
def test_a_page_is_typed_from_top_to_bottom(page, tmp_path):
    (tmp_path / "my_text").mkdir()
    for number, name in enumerate(("my_text/all.txt", "2026-01.txt", "2026-02.txt")):
        draw = random.Random(number)
        documents = [" ".join(draw.choices(WORDS, k=30)) for _ in range(400)]
        (tmp_path / name).write_text("\n\n".join(documents), encoding="utf-8")
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", "set -e\n" + "\n".join(blocks_of(page))],
        cwd=tmp_path,
        env={"PATH": path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_pages_are_few_and_short():
    limits = {"docs/results.md": 250}
    lines = {page: (CHECKOUT / page).read_text(encoding="utf-8").count("\n") for page in PAGES}
    assert {page: number for page, number in lines.items() if number > limits.get(page, 120)} == {}
    assert len(lines) <= 15
