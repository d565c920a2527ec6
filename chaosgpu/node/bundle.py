"""The node's code as one file: the floors up to ``node`` with logzero, run by a system Python.

A keeper runs from its own copy, so an upgraded or deleted environment changes nothing for it.
"""

import hashlib
import importlib.machinery
import io
import os
import pkgutil
import sys
import zipfile
from typing import Dict

from chaosgpu.node import places

FLOORS = ("helpers", "views", "changes", "faults", "node")
_MAIN = b"from chaosgpu.node.cli import main\n\nmain()\n"


def install() -> str:
    """Put the bundle of the running code into ``<state>/bin``; its path, named by its content's hash."""
    running_from = os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    if zipfile.is_zipfile(running_from) and f"{running_from}{os.sep}" in (__file__ or ""):
        with open(running_from, "rb") as file:
            content = file.read()
    else:
        content = build()
    directory = places.private_dir(os.path.join(places.private_dir(places.state_dir()), "bin"))
    path = os.path.join(directory, hashlib.sha256(content).hexdigest()[:16] + ".pyz")
    if not os.path.exists(path):
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    return path


def build() -> bytes:
    """The zipapp's bytes, the same for the same source."""
    files: Dict[str, bytes] = {"__main__.py": _MAIN}
    package = importlib.import_module("chaosgpu")
    root = os.path.dirname(package.__file__ or "")
    files["chaosgpu/__init__.py"] = _read(os.path.join(root, "__init__.py"))
    for floor in FLOORS:
        for directory, _, names in os.walk(os.path.join(root, floor)):
            for name in names:
                if name.endswith(".py"):
                    path = os.path.join(directory, name)
                    files["chaosgpu/" + os.path.relpath(path, root)] = _read(path)
    # Not by import: under `chaos` the module of that name is the toolkit's stub, which has no file.
    found = importlib.machinery.PathFinder.find_spec("logzero")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("logzero is not installed, and the keeper needs it: pip install logzero")
    logzero = os.path.dirname(found.origin)
    for module in pkgutil.iter_modules([logzero]):
        files[f"logzero/{module.name}.py"] = _read(os.path.join(logzero, module.name + ".py"))
    files["logzero/__init__.py"] = _read(os.path.join(logzero, "__init__.py"))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
