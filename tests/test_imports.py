"""Imports point one way, so that a part can be read, tested and replaced without what stands below it."""

import ast
import functools
from pathlib import Path
from typing import Iterator

import pytest

# A layer may import itself and what stands before it; layers in one tuple stand side by side.
LAYERS = (
    ("errors", "files", "terminal", "options"),
    ("metrics", "data", "checkpoints", "growth"),
    ("learners",),  # the schedule of Algorithm 1, which the task asks for, and what a learner decides
    ("moe", "optim", "training", "watch", "runs"),
    ("text", "images"),
    ("exchange", "models", "criterions", "tasks"),
    ("report",),
    ("cli",),
)
LEVELS = {layer: level for level, layers in enumerate(LAYERS) for layer in layers}
BASE = ("errors", "files", "terminal", "options")
WITHOUT_FAIRSEQ = (*BASE, "metrics", "data", "checkpoints", "growth", "learners", "runs", "report")
FOR_DATA_PREP = tuple(f"fairseq_alma.{name}" for name in (*BASE, "data", "cli.entry"))
OWN = ("fairseq_alma.", "data_prep.", "tests.")
LANGUAGE_WORDS = {"language", "text", "lm", "switch", "tokenizer", "token", "tokens"}
VISION_WORDS = {"image", "images", "vision", "vgg", "mlp", "firefly"}


@functools.cache
def imported_modules(path: Path, root: Path) -> tuple[str, ...]:
    """Names of all modules that a file imports, at its top or in a function; relative names made absolute.

    ``from a.b import c`` counts as ``a.b.c``, as c may be a module.
    """
    return tuple(_imported_modules(path, root))


def _imported_modules(path: Path, root: Path) -> Iterator[str]:
    package = path.relative_to(root).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = [*above, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*source, alias.name]) for alias in node.names)


def modules_of(root: Path, package: str) -> Iterator[tuple[Path, str]]:
    """Each file of a package with the dotted name of its module."""
    for path in sorted((root / package).rglob("*.py")):
        yield path, ".".join(path.relative_to(root).with_suffix("").parts)


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    """True if the module is one of the packages, or stands inside of one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def layer_of(module: str) -> str:
    """``fairseq_alma.data.stream`` -> ``data``; empty for the package itself and other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "fairseq_alma" and len(parts) > 1 and parts[1] in LEVELS else ""


def is_about(module: str, words: set[str]) -> bool:
    """True if a word of the module's folders or file is among ``words``."""
    parts = module.split(".")[1:]
    return bool(words & {word for part in parts for word in part.split("_")})


def upward_imports(root: Path) -> list[str]:
    """Imports of a layer that stands further down."""
    return [
        f"{module} -> {other}"
        for path, module in modules_of(root, "fairseq_alma")
        for other in imported_modules(path, root)
        if layer_of(module)
        and layer_of(other)
        and LEVELS[layer_of(other)] > LEVELS[layer_of(module)]
        and not is_within(other, ("fairseq_alma.cli.entry",))
    ]


def fairseq_imports(root: Path) -> list[str]:
    """Imports of fairseq where it has no place, itself or by way of a layer that needs it."""
    needs_fairseq = tuple(f"fairseq_alma.{each}" for each in ("moe", "text", "images", "models", "criterions", "tasks"))
    files = [(path, module) for path, module in modules_of(root, "fairseq_alma") if layer_of(module) in WITHOUT_FAIRSEQ]
    return [
        f"{module} -> {other}"
        for path, module in [*files, *modules_of(root, "data_prep")]
        for other in imported_modules(path, root)
        if is_within(other, ("fairseq", "fairseq_cli", *needs_fairseq))
    ]


def crossings(root: Path) -> list[str]:
    """Imports between language code and vision code."""
    return [
        f"{module} -> {other}"
        for package in ("fairseq_alma", "data_prep")
        for path, module in modules_of(root, package)
        for other in imported_modules(path, root)
        if is_within(other, ("fairseq_alma", "data_prep"))
        for here, there in ((LANGUAGE_WORDS, VISION_WORDS), (VISION_WORDS, LANGUAGE_WORDS))
        if is_about(module, here) and not is_about(module, there) and is_about(other, there)
    ]


def mixture_imports(root: Path) -> list[str]:
    """Imports of the mixture from what it serves: layers of language models and of image models."""
    return [
        f"{module} -> {other}"
        for path, module in modules_of(root, "fairseq_alma")
        for other in imported_modules(path, root)
        if is_within(module, ("fairseq_alma.moe",)) and is_within(other, ("fairseq_alma.text", "fairseq_alma.images"))
    ]


def data_prep_imports(root: Path) -> list[str]:
    """Imports of data_prep from the package, other than of files, errors and the front of commands."""
    return [
        f"{module} -> {other}"
        for path, module in modules_of(root, "data_prep")
        for other in imported_modules(path, root)
        if is_within(other, ("fairseq_alma",)) and not is_within(other, FOR_DATA_PREP)
    ]


def test_every_folder_of_the_package_has_its_place_in_the_order(checkout: Path) -> None:
    folders = {path.parent.name for path in (checkout / "fairseq_alma").glob("*/__init__.py")}
    assert folders and folders <= set(LEVELS)


@pytest.mark.parametrize("violations", [upward_imports, fairseq_imports, crossings, mixture_imports, data_prep_imports])
def test_imports_point_one_way(violations, checkout: Path) -> None:
    assert violations(checkout) == []


def write_module(root: Path, name: str, code: str) -> None:
    path = root / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)


@pytest.mark.parametrize(
    ("violations", "module", "code"),
    [
        (upward_imports, "fairseq_alma.data.stream", "from fairseq_alma.models import switch_lm"),
        (upward_imports, "fairseq_alma.data.stream", "from ..models import switch_lm"),
        (upward_imports, "fairseq_alma.moe.gate", "from fairseq_alma import tasks"),
        (upward_imports, "fairseq_alma.models.switch_lm", "def build():\n    import fairseq_alma.cli.stream"),
        (fairseq_imports, "fairseq_alma.growth.split", "from fairseq.models import BaseFairseqModel"),
        (fairseq_imports, "fairseq_alma.learners.sm", "import fairseq_alma.models.switch_lm as lm"),
        (fairseq_imports, "data_prep.text.encode", "import fairseq"),
        (crossings, "fairseq_alma.models.switch_lm", "from fairseq_alma.models.vgg import Vgg"),
        (crossings, "data_prep.images.command", "from data_prep.text import readers"),
        (mixture_imports, "fairseq_alma.moe.gate", "from fairseq_alma.images import mlp"),
        (data_prep_imports, "data_prep.text.command", "from fairseq_alma.cli.stream import main"),
    ],
)
def test_a_wrong_import_is_found(violations, module: str, code: str, tmp_path: Path) -> None:
    write_module(tmp_path, module, code)
    assert len(violations(tmp_path)) == 1


def test_imports_that_point_the_right_way_pass(tmp_path: Path) -> None:
    write_module(tmp_path, "fairseq_alma.models.switch_lm", "import fairseq\nfrom fairseq_alma.moe import gate")
    write_module(tmp_path, "fairseq_alma.learners.sm", "from fairseq_alma.data.stream import Stream\nimport json")
    write_module(tmp_path, "data_prep.text.command", "from fairseq_alma.cli.entry import command")
    for violations in (upward_imports, fairseq_imports, crossings, mixture_imports, data_prep_imports):
        assert violations(tmp_path) == []


def test_what_is_imported_of_our_own_is_there(checkout: Path) -> None:
    """Also in functions, where neither an import of the module nor a type checker would notice."""
    files = (path for package in ("fairseq_alma", "data_prep", "tests") for path in (checkout / package).rglob("*.py"))
    sources = {
        (path, node.module)
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    own = [(path, checkout / name.replace(".", "/")) for path, name in sources if name.startswith(OWN)]
    assert [str(path) for path, named in own if not (named.is_dir() or named.with_suffix(".py").is_file())] == []
