"""The node's code as one file: the floors up to ``node`` with logzero, run by a system Python.

A keeper runs from its own copy, so an upgraded or deleted environment changes nothing for it.
"""

import hashlib
import importlib.machinery
import importlib.util
import io
import marshal
import os
import pkgutil
import sys
import zipfile
from typing import Any, Callable, Dict

from chaosgpu.node import places

FLOORS = ("helpers", "views", "changes", "faults", "node")
_MAIN = b"from chaosgpu.node.cli import main\n\nmain()\n"


def install() -> str:
    """Put the bundle of the running code into ``<state>/bin``; its path, named by its content's hash."""
    running_from = os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    if zipfile.is_zipfile(running_from) and f"{running_from}{os.sep}" in (__file__ or ""):
        content = _read(running_from)
        return _keep(hashlib.sha256(content), lambda: content)
    files = sources()
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    for name, source in sorted(files.items()):
        digest.update(f"{name} {len(source)}\n".encode() + source)
    return _keep(digest, lambda: build(files))


def _keep(digest: Any, content: Callable[[], bytes]) -> str:
    """The file of that digest, made if it is not there: whole or not at all."""
    directory = places.private_dir(os.path.join(places.private_dir(places.state_dir()), "bin"))
    path = os.path.join(directory, digest.hexdigest()[:16] + ".pyz")
    if not os.path.exists(path):
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "wb") as file:
            file.write(content())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    return path


def sources() -> Dict[str, bytes]:
    """Every file of the bundle by its name in it."""
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
    return files


def build(files: Dict[str, bytes]) -> bytes:
    """The zipapp's bytes, the same for the same source and Python."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED)
            archive.writestr(zipfile.ZipInfo(name + "c"), _compiled(files[name], name), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _compiled(source: bytes, name: str) -> bytes:
    """The module's bytecode for the Python that runs here; one of another version ignores it and takes the source.

    In the form of PEP 552, unchecked by hash: magic number, flags 1, the source's hash, the code.
    """
    code = marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=0))
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source) + code


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
