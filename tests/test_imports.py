"""Imports point one way, so that a part can be read, tested and replaced without the parts that use it."""

import ast
import functools
from pathlib import Path
from typing import Callable, Iterator

import pytest

# A layer may import itself and earlier layers; layers in one tuple are on one level.
LAYERS = (
    ("errors", "files", "terminal", "options"),
    ("data", "checkpoints", "growth"),
    ("learners",),  # the schedule of Algorithm 1, which the task needs
    ("moe", "optim", "training", "runs"),
    ("text", "images"),
    ("exchange", "models"),
    ("report",),
    ("cli",),
)
LEVELS = {layer: level for level, layers in enumerate(LAYERS) for layer in layers}
WITHOUT_FAIRSEQ = (*LAYERS[0], *LAYERS[1], "learners", "runs", "report")
OURS_WITH_FAIRSEQ = ("moe", "text", "images", "models")
NEEDS_FAIRSEQ = ("fairseq", "fairseq_cli", *(f"fairseq_alma.{each}" for each in OURS_WITH_FAIRSEQ))
FOR_DATA_PREP = tuple(f"fairseq_alma.{name}" for name in (*LAYERS[0], "data"))
LANGUAGE_WORDS = {"language", "text", "lm", "switch", "tokenizer", "token", "tokens"}
VISION_WORDS = {"image", "images", "vision", "vgg", "mlp", "firefly"}


@functools.cache
def imported_modules(path: Path, root: Path) -> tuple[str, ...]:
    """Return the absolute names of all imports of a file; ``from a.b import c`` is ``a.b.c``, as c may be a module."""
    package, found = path.relative_to(root).parts[:-1], []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = [*above, *(node.module.split(".") if node.module else [])]
            found += [".".join([*source, alias.name]) for alias in node.names]
    return tuple(found)


def imports_of(root: Path, packages: tuple[str, ...] = ("fairseq_alma", "data_prep")) -> Iterator[tuple[str, str]]:
    """Yield each module with each of its imports."""
    for path in (path for package in packages for path in sorted((root / package).rglob("*.py"))):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        yield from ((module, other) for other in imported_modules(path, root))


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def layer_of(module: str) -> str:
    """``fairseq_alma.data.stream`` -> ``data``; empty for the package itself and other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "fairseq_alma" and len(parts) > 1 and parts[1] in LEVELS else ""


def is_about(module: str, words: set[str]) -> bool:
    return bool(words & {word for part in module.split(".")[1:] for word in part.split("_")})


def points_up(module: str, other: str) -> bool:
    here, there = layer_of(module), layer_of(other)
    return bool(here and there) and LEVELS[there] > LEVELS[here]


def needs_fairseq(module: str, other: str) -> bool:
    return is_within(other, *NEEDS_FAIRSEQ) and (layer_of(module) in WITHOUT_FAIRSEQ or is_within(module, "data_prep"))


def crosses(module: str, other: str) -> bool:
    """Return whether language code imports vision code, or the reverse."""
    return is_within(other, "fairseq_alma", "data_prep") and any(
        is_about(module, here) and not is_about(module, there) and is_about(other, there)
        for here, there in ((LANGUAGE_WORDS, VISION_WORDS), (VISION_WORDS, LANGUAGE_WORDS))
    )


def mixture_needs_a_model(module: str, other: str) -> bool:
    return is_within(module, "fairseq_alma.moe") and is_within(other, "fairseq_alma.text", "fairseq_alma.images")


def data_prep_needs_training(module: str, other: str) -> bool:
    return is_within(module, "data_prep") and is_within(other, "fairseq_alma") and not is_within(other, *FOR_DATA_PREP)


RULES = (points_up, needs_fairseq, crosses, mixture_needs_a_model, data_prep_needs_training)


def test_every_folder_of_the_package_has_a_level(checkout: Path) -> None:
    folders = {path.parent.name for path in (checkout / "fairseq_alma").glob("*/__init__.py")}
    assert folders and folders <= set(LEVELS)


@pytest.mark.parametrize("rule", RULES)
def test_imports_point_one_way(rule: Callable[[str, str], bool], checkout: Path) -> None:
    assert [f"{module} -> {other}" for module, other in imports_of(checkout) if rule(module, other)] == []


@pytest.mark.parametrize(
    ("rule", "module", "code"),
    [
        (points_up, "fairseq_alma.data.stream", "from fairseq_alma.models import switch_lm"),
        (points_up, "fairseq_alma.data.stream", "def build():\n    from ..models import switch_lm"),
        (needs_fairseq, "fairseq_alma.growth.split", "from fairseq.models import BaseFairseqModel"),
        (crosses, "fairseq_alma.models.switch_lm", "from fairseq_alma.models.vgg import Vgg"),
        (mixture_needs_a_model, "fairseq_alma.moe", "from fairseq_alma.images import mlp"),
        (data_prep_needs_training, "data_prep.text.command", "from fairseq_alma.cli.stream import main"),
        (None, "fairseq_alma.models.switch_lm", "import fairseq\nfrom fairseq_alma import moe"),
        (None, "data_prep.text.command", "from fairseq_alma.terminal import command"),
    ],
)
def test_a_wrong_import_is_found_and_a_right_one_passes(rule, module: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    found = list(imports_of(tmp_path))
    broken = [each for each in RULES for module, other in found if each(module, other)]
    assert (rule in broken) if rule else (found and not broken)


def test_imported_modules_of_this_project_exist(checkout: Path) -> None:
    """Also those of imports in functions, which neither an import nor a type checker notices."""
    packages = ("fairseq_alma", "data_prep", "tests")
    own = {other.rsplit(".", 1)[0] for _, other in imports_of(checkout, packages) if is_within(other, *packages)}
    paths = [checkout / name.replace(".", "/") for name in own]
    assert [str(path) for path in paths if not (path.is_dir() or path.with_suffix(".py").is_file())] == []
