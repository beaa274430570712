"""Import of a user's own features and learners (``--features-from``, ``--learners-from``)."""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from fairseq_alma.errors import GIVEN_CODE, AlmaError, in_one_line


def import_from(path: Path) -> ModuleType:
    """Import a file or folder of Python once, by its path and whatever its name; it may import its neighbours.

    Raises:
        AlmaError: there is no such file or folder, or the import fails; names the line.
    """
    here = path.resolve()
    file = here / "__init__.py" if here.is_dir() else here
    if not file.is_file() or file.suffix != ".py":
        raise AlmaError(f"{path}: no Python found; give a file X.py, or a folder with __init__.py in it")
    name = f"_given_{hashlib.sha256(os.fsencode(file)).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    GIVEN_CODE.append(str(here))
    sys.path.append(str(here.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # of any .py file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with in_one_line():
        spec.loader.exec_module(module)
    return module
