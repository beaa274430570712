"""What the README and the how-tos show can be typed from top to bottom, in one folder."""

import itertools
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.text.options import parse_options
from fairseq_alma.cli import export, generate, import_model, report, score, start, update, verify
from fairseq_alma.cli.stream import read_arguments

PAGES = (
    "README.md",
    *(
        f"docs/how-to/{name}.md"
        for name in (
            "own-text", "next-month", "images", "by-hand", "growing", "ensembles", "cluster", "export", "watching",
            "evaluating", "operations",
        )
    ),
)  # fmt: skip
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "nine", "dogs", "barked", "and", "nobody", "slept", "."]
FOR_TYPING = ("own-text", "next-month")
OF_THE_READER = re.compile(r"my_text/?|mnist_files|gpt2_folder|.*\.(txt|jsonl|xz)(\.xz)?|my_model|model")
PARSERS = {
    "alma-prep-text": parse_options,
    "alma-stream": read_arguments,
    "alma-update": update.build_parser().parse_args,
    **{
        f"alma-{name}": lambda words, module=module: module.build_parser().parse_args(words)
        for name, module in (
            ("export", export), ("generate", generate), ("import", import_model), ("report", report), ("score", score),
            ("verify", verify),
        )
    },
}  # fmt: skip


def blocks_of(checkout, page):
    text = (checkout / page).read_text(encoding="utf-8")
    return re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands_of(checkout, page):
    """The words of each command of a page that is one command line, without redirections and what follows a pipe."""
    for block in blocks_of(checkout, page):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in (*PARSERS, "alma-prep-images") and "$" not in line:
                stop = next((place for place, word in enumerate(words) if word in ("|", ">", ">>", "&", "&&")), None)
                yield words[:stop]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_whole_and_its_options_are_known(page, checkout):
    assert "…" not in "".join(blocks_of(checkout, page))
    for words in commands_of(checkout, page):
        PARSERS.get(words[0], len)(words[1:])


def test_pages_use_nothing_that_none_of_them_has_made_before(checkout):
    made, makers = set(), {}
    for page in PAGES:
        for words in commands_of(checkout, page):
            given = dict(itertools.pairwise(words))
            used = [given[flag] for flag in ("--stream", "--path") if flag in given]
            used += words[1:2] if words[0] in ("alma-export", "alma-score", "alma-generate") else []
            for name in used:
                at_hand = name in made or any(name.startswith(f"{each}/") for each in made)
                assert at_hand or OF_THE_READER.fullmatch(name) or name.startswith("m1/"), (page, words)
            for flag in ("--out", "--run"):
                name = given.get(flag)
                if name is None:
                    continue
                if words[0] == "alma-prep-text" and "--append" not in words:
                    assert makers.setdefault(name, words) == words, f"{page}: {name} is another stream already"
                made.add(name)


def write_text(path, seed, num_documents):
    draw = random.Random(seed)
    documents = [" ".join(draw.choices(WORDS, k=30)) for _ in range(num_documents)]
    path.write_text("\n\n".join(documents), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", FOR_TYPING)
def test_a_page_is_typed_from_top_to_bottom(page, checkout, tmp_path):
    (tmp_path / "my_text").mkdir()
    for number, name in enumerate(("my_text/all.txt", "2026-01.txt", "2026-02.txt")):
        write_text(tmp_path / name, number, 120)
    (tmp_path / "candidates.jsonl").write_text('{"text": "the dogs slept"}\n')
    (tmp_path / "bin").mkdir()
    for name, module in start.COMMANDS.items():  # also where the package was installed before it had them all
        file = tmp_path / "bin" / f"alma-{name.removesuffix('_model').replace('_', '-')}"
        body = "from fairseq_alma.cli.start import start\nif __name__ == '__main__':\n    raise SystemExit"
        file.write_text(f"#!{sys.executable}\n{body}(start('{module}'))\n")
        file.chmod(0o755)
    folders = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(folders), "PYTHONPATH": str(checkout)}
    script = "set -e\n" + "\n".join(blocks_of(checkout, f"docs/how-to/{page}.md"))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
