"""Pages of the documentation that are made of something else: commands of their parsers, results, changes.

mkdocs calls `on_files` and `on_page_markdown`.
"""

import contextlib
import importlib
import io
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from fairseq_alma.cli import start
from fairseq_alma.options import SUPPRESS, TRAINING, Option, options_of

CHECKOUT = Path(__file__).parent.parent
TOUR = CHECKOUT / "recipes" / "tour.py"
COMMANDS = re.compile(r'"(alma-[a-z-]+)=fairseq_alma\.cli\.start:([a-z_]+)"')

OPTIONS_HEAD = """# Options

Made of the declarations in the code. *binds*: run.json names it, and the run is resumed with the same value alone.
*shape*: a checkpoint to start from must have the same. A number out of its range is refused before anything is written,
on a command line as in a file."""
TABLE = "| option | values | default | data | effect | meaning |\n| --- | --- | --- | --- | --- | --- |"

# Where a link to a file of the checkout leads that is a page here under another name.
PAGES = {
    "recipes/README.md": "results.md",
    "recipes/anytime/README.md": "anytime.md",
    "recipes/growth/README.md": "growth.md",
    "recipes/lm/ladder/README.md": "ladder.md",
    "recipes/sensitivity.md": "sensitivity.md",
    "recipes/figures/": "figures/",
}
LINK = re.compile(r"\]\(((?:\.\./)*)\.\./(" + "|".join(map(re.escape, PAGES)) + ")")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the figures of the results."""
    recipes = CHECKOUT / "recipes"
    results = (recipes / "README.md").read_text(encoding="utf-8")
    pages = {
        "reference/commands.md": commands_page(),
        "reference/options.md": options_page(),
        "results.md": results.replace("[records/](records)", "`recipes/records/`"),  # a folder is no page
        "anytime.md": (recipes / "anytime" / "README.md").read_text(encoding="utf-8"),
        "growth.md": (recipes / "growth" / "README.md").read_text(encoding="utf-8"),
        "ladder.md": (recipes / "lm" / "ladder" / "README.md").read_text(encoding="utf-8"),
        "changelog.md": (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for page in [*recipes.glob("*.md"), *recipes.glob("records/*.md")]:
        if page.name != "README.md":
            content = page.read_text(encoding="utf-8").replace("](README.md", "](results.md")
            pages[page.relative_to(recipes).as_posix()] = content
    pages = {name: re.sub(r"\]\((?:\.\./)*lm/ladder/README\.md", "](ladder.md", text) for name, text in pages.items()}
    pages["ladder.md"] = pages["ladder.md"].replace("](../../README.md", "](results.md")
    pages = {name: re.sub(r"\]\((?:\.\./)+figures/", "](figures/", text) for name, text in pages.items()}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    for figure in sorted((recipes / "figures").iterdir()):
        files.append(File.generated(config, f"figures/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, **unused: Any) -> str:
    """Put the tour's code where the first page names it, and let links to files lead to the pages made of them."""
    markdown = LINK.sub(lambda link: f"]({link[1]}{PAGES[link[2]]}", markdown)
    code = TOUR.read_text(encoding="utf-8")
    begin, _, rest = markdown.partition("<!-- recipes/tour.py -->")
    return f"{begin}```python\n{code}```{rest.partition('<!-- end -->')[2]}" if rest else markdown


def options_page() -> str:
    """Return all declared options, as tables: it cannot be older than the declarations."""
    from data_prep.images.command import ImagePrepOptions
    from data_prep.text.options import PrepOptions
    from fairseq_alma.checkpoints import model_options
    from fairseq_alma.cli import stream  # registers learners and features
    from fairseq_alma.cli.ensemble import EnsembleOptions
    from fairseq_alma.cli.export import ExportOptions
    from fairseq_alma.cli.generate import GenerateOptions
    from fairseq_alma.cli.import_model import ImportOptions
    from fairseq_alma.cli.report import ReportOptions
    from fairseq_alma.cli.score import ScoreOptions
    from fairseq_alma.cli.update import UpdateOptions
    from fairseq_alma.cli.verify import VerifyOptions
    from fairseq_alma.images.image_train_options import LoopOptions
    from fairseq_alma.runs import study
    from fairseq_alma.runs.lookup import ArrivalOptions
    from fairseq_alma.training.feature import FEATURES
    from fairseq_alma.training.option_ranges import RANGES

    learners = {each: name for kind in stream.LEARNERS.values() for name, each in kind.items()}
    sections: dict[str, dict[str, type]] = {
        "alma-stream: the run": {"": study.StudyOptions},
        "alma-stream: learners": {
            f"--learner {name} ({', '.join(_kinds(each))})": each for each, name in learners.items()
        },
        "alma-stream: a part of the run, processes": {"": study.PartOptions, "Processes": study.ProcessOptions},
        "Features of a training": {_first_line(each): each for each in FEATURES},
        "Models: behind the --, or of fairseq-train": {_first_line(each): each for each in model_options.MODELS},
        "Images: behind the --": {"": LoopOptions},
        "alma-prep-text, alma-prep-images": {"Text": PrepOptions, "Images": ImagePrepOptions},
        "Commands on models and runs": {
            "alma-import": ImportOptions,
            "alma-grow": model_options.GrowOptions,
            "alma-grow of a run": ArrivalOptions,
            "alma-ensemble": EnsembleOptions,
            "alma-export": ExportOptions,
            "alma-score": ScoreOptions,
            "alma-generate": GenerateOptions,
            "alma-update": UpdateOptions,
            "alma-verify": VerifyOptions,
            "alma-report": ReportOptions,
        },
    }
    parts = [OPTIONS_HEAD]
    own: set[str] = set()
    of_runs = [*sections][:-2]
    for title, declared in sections.items():
        parts.append(f"## {title}")
        for name, declaring in declared.items():
            options = [each for each in options_of(declaring).values() if each.help != SUPPRESS]
            own |= {option.flag for option in options}
            if options:
                parts += [f"**{name}**"] if name else []
                parts.append("\n".join([TABLE, *(_row(option, may_bind=title in of_runs) for option in options)]))
    rows = [f"| `{flag}` | {bounds} |" for flag, bounds in sorted(RANGES.items()) if flag not in own and str(bounds)]
    parts += ["## Ranges of fairseq's own options", "\n".join(["| option | number |", "| --- | --- |", *rows])]
    return "\n\n".join(parts) + "\n"


def _row(option: Option, may_bind: bool) -> str:
    """Return an option's row of the table."""
    values = ", ".join(f"`{choice}`" for choice in option.choices) or str(option.range or "")
    defaults = option.defaults or {"": option.default}
    default = ", ".join(
        f"{kind} `{value}`".strip() for kind, value in defaults.items() if option.shown_default(kind or None)
    )
    effects = {
        "fairseq-train's": option.side == TRAINING,
        "binds": may_bind and option.recorded and not option.free,
        "shape": option.shape,
    }
    effect = [word for word, is_so in effects.items() if is_so]
    kinds = ", ".join(option.kinds) if len(option.kinds) == 1 else ""
    cells = (
        f"`{option.flag}`",
        values,
        default,
        kinds,
        ", ".join(effect),
        option.help.replace("|", "\\|").replace("{learners}", "ensembles"),
    )
    return f"| {' | '.join(cells)} |"


def _kinds(learner: type) -> list[str]:
    from fairseq_alma.learners.learner import LEARNERS

    return [kind for kind, learners in LEARNERS.items() if learner in learners.values()]


def _first_line(declaring: type) -> str:
    return (declaring.__doc__ or "").partition("\n")[0].rstrip(".:")


def commands_page() -> str:
    """Return what each command's ``--help`` prints, as one page."""
    parts = ["# Commands", "What `--help` prints. All exit with 0 on success, 2 on a usage error, 1 on anything else."]
    for command, function in COMMANDS.findall((CHECKOUT / "setup.py").read_text(encoding="utf-8")):
        parts.append(f"## {command}\n\n```text\n{help_of(start.COMMANDS[function]).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def help_of(module: str) -> str:
    """Return a command's help, 100 columns wide."""
    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help"])
    return printed.getvalue()
