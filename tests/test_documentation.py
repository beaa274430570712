"""The documentation builds without a warning: links, anchors, snippets; commands are as their parsers have them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="extra [docs]")


def test_the_pages_build_with_all_links_and_every_command(checkout: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    commands = (tmp_path / "site" / "reference" / "commands.html").read_text()
    for command in ("alma-prep-text", "alma-prep-images", "alma-stream", "alma-export", "alma-generate"):
        assert f'id="{command}"' in commands
    assert "--grow-schedule" in commands and "--context-window" in commands
    options = (tmp_path / "site" / "reference" / "options.html").read_text()
    for option in ("--wait", "--grow-schedule", "--ema-half-life", "--moe-freq", "--last-pool", "--lr"):
        assert f"<code>{option}</code>" in options
    assert ">alma_prep_text</span>" in (tmp_path / "site" / "index.html").read_text()  # the tour itself
    assert (tmp_path / "site" / "figures" / "mnist_growth_map.png").is_file()


def test_the_readme_links_to_what_is_there(checkout: Path) -> None:
    text = (checkout / "README.md").read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\((?!http)([^)]+)\)", text)}
    assert {"docs/how-to/cluster.md", "recipes/README.md"} <= links
    assert [link for link in sorted(links) if not (checkout / link).is_file()] == []
    assert text.count("\n") <= 250, "the README is the entrance; what belongs to a how-to stands in docs/how-to"


@pytest.mark.parametrize("page", ["follow-a-document.md", "follow-an-image.md"])
def test_a_walk_through_the_code_names_files_that_are_there(page, checkout):
    table = (checkout / "docs" / "reference" / page).read_text(encoding="utf-8").split("| step | files |")[1]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("|") and ".py" in line]
    folder, missing = Path(), []
    names = re.findall(r"`([\w/]+\.py)`", "".join(rows))
    assert f"\n{len(names)} files (" in table
    for name in names:  # one without a folder stands in that of the one before
        folder = Path(name).parent if "/" in name else folder
        places = (checkout / top / folder / Path(name).name for top in ("", "fairseq_alma"))
        missing += [] if any(place.is_file() for place in places) else [name]
    assert rows and missing == []
