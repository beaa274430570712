"""Import of a user's own features and learners (``--features-from``, ``--learners-from``)."""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

from fairseq_alma.errors import GIVEN_CODE, AlmaError, in_one_line


def import_from(path: Path) -> None:
    """Import a file or folder of Python by its path; it may import its neighbours.

    A name that is taken (``queue``) or no identifier (``a.b.py``) is replaced.

    Raises:
        AlmaError: there is no such file or folder, or the import fails; names the line.
    """
    here = path.resolve()
    file = here / "__init__.py" if here.is_dir() else here
    if not file.is_file() or file.suffix != ".py":
        raise AlmaError(f"{path}: no Python found; give a file X.py, or a folder with __init__.py in it")
    name = here.stem if here.stem.isidentifier() else "_given"
    if getattr(sys.modules.get(name), "__file__", None) == str(file):
        return
    found = sys.modules.get(name) or importlib.util.find_spec(name)
    if found is not None and getattr(found, "origin", None) != str(file):
        name = f"_given_{hashlib.sha256(os.fsencode(file)).hexdigest()}"
    if name in sys.modules:
        return
    GIVEN_CODE.append(str(here))
    sys.path.append(str(here.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # of any .py file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with in_one_line():
        spec.loader.exec_module(module)
