"""What a report says above and below its tables and figures; the sentences stand in ``sentences.toml``."""

import functools
import tomllib
from importlib import resources
from typing import Any

import jinja2


@functools.cache
def _templates() -> jinja2.Environment:
    entries = tomllib.loads(resources.files(__package__).joinpath("sentences.toml").read_text(encoding="utf-8"))
    texts = {(name, part): " ".join(text.split()) for name, entry in entries.items() for part, text in entry.items()}
    loader = jinja2.DictLoader(
        {name if part == "text" else f"{name}/{part}": text for (name, part), text in texts.items()}
    )
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined)


def said(name: str, /, **facts: Any) -> tuple[str, str]:
    """Return the title of a table or figure, and what is said below it, from what the sentences ask for."""
    title, text = (_templates().get_template(each).render(facts) for each in (f"{name}/title", name))
    return title, text
