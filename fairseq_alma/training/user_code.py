"""Import the training features and learners of users (``--features-from``, ``--learners-from``)."""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from fairseq_alma.errors import USER_CODE, AlmaError, in_one_line


def import_from(path: Path) -> ModuleType:
    """Import a Python file or package folder, and return the module.

    A second call with the same file returns the same module. The file name need not be a valid module name. The code
    may import other modules from the folder of the file.
    """
    root = path.resolve()
    file = root / "__init__.py" if root.is_dir() else root
    if not file.is_file() or file.suffix != ".py":
        raise AlmaError(f"{path}: no Python code found; give a file X.py, or a folder that contains __init__.py")
    name = f"_user_code_{hashlib.sha256(os.fsencode(file)).hexdigest()}"
    if name not in sys.modules:
        USER_CODE.append(str(root))
        sys.path.append(str(root.parent))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None  # holds for every .py file
        sys.modules[name] = importlib.util.module_from_spec(spec)
        with in_one_line():
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
