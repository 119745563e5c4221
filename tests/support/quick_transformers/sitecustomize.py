"""With this folder on PYTHONPATH, transformers finds its names in a third of the time.

To know which of its modules has which name, it reads all of its 1,700 modules twice in each process that imports it.
That is a third of the CPU time that a worker takes to start, and tests start more than a hundred. Here the first
process keeps what it found, and the others read that. Python imports this file at its start.
"""

import importlib.machinery
import marshal
import os
import sys

_MODULE = "transformers.utils.import_utils"
_KEPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__pycache__")


class _Finder:
    """Changes the module while it is imported."""

    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), _keep_names(module))
        return spec


def _keep_names(module):
    scan = getattr(module, "create_import_structure_from_path", None)
    if scan is None:
        return

    def kept_or_scanned(module_path):
        folder = os.path.dirname(module_path) if os.path.isfile(module_path) else os.fspath(module_path)
        if os.path.basename(folder) != "models":
            return scan(module_path)
        version = sys.modules["transformers"].__version__, os.stat(folder).st_mtime_ns, sys.implementation.cache_tag
        file = os.path.join(_KEPT, f"names-{'-'.join(map(str, version))}.marshal")
        try:
            with open(file, "rb") as kept:
                return marshal.load(kept)
        except (OSError, EOFError, ValueError, TypeError):  # there is none yet, or not all of it
            found = scan(module_path)
        try:
            os.makedirs(_KEPT, exist_ok=True)
            with open(f"{file}.{os.getpid()}", "wb") as new:
                marshal.dump(found, new)
            os.replace(new.name, file)
        except OSError:
            pass  # a folder that cannot be written to: each process reads all modules
        return found

    module.create_import_structure_from_path = kept_or_scanned


sys.meta_path.insert(0, _Finder())
