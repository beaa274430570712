"""Loads the programs of recipes/, which is no package."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

RECIPES = Path(__file__).parents[2] / "recipes"


def load(name: str) -> ModuleType:
    """Load a program, which may import others that lie beside it."""
    sys.path.insert(0, str(RECIPES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(RECIPES))
