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

CHECKOUT = Path(__file__).parent.parent
TOUR = CHECKOUT / "recipes" / "tour.py"
COMMANDS = re.compile(r'"(alma-[a-z-]+)=fairseq_alma\.cli\.start:([a-z_]+)"')
MODULES = re.compile(r'def (\w+)\(argv.*?return start\("([\w.]+)", argv\)', re.DOTALL)

# Where a link to a file of the checkout leads that is a page here under another name.
PAGES = {
    "recipes/README.md": "results.md",
    "recipes/anytime/README.md": "anytime.md",
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
        "results.md": results.replace("[records/](records)", "`recipes/records/`"),  # a folder is no page
        "anytime.md": (recipes / "anytime" / "README.md").read_text(encoding="utf-8"),
        "changelog.md": (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for page in [*recipes.glob("*.md"), *recipes.glob("records/*.md")]:
        if page.name != "README.md":
            content = page.read_text(encoding="utf-8").replace("](README.md", "](results.md")
            pages[page.relative_to(recipes).as_posix()] = content
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


def commands_page() -> str:
    """Return what each command's ``--help`` prints, as one page."""
    modules = dict(MODULES.findall((CHECKOUT / "fairseq_alma" / "cli" / "start.py").read_text(encoding="utf-8")))
    parts = ["# Commands", "What `--help` prints. All exit with 0 on success, 2 on a usage error, 1 on anything else."]
    for command, function in COMMANDS.findall((CHECKOUT / "setup.py").read_text(encoding="utf-8")):
        parts.append(f"## {command}\n\n```text\n{help_of(modules[function]).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def help_of(module: str) -> str:
    """Return a command's help, 100 columns wide."""
    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help"])
    return printed.getvalue()
