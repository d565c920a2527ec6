"""Debian packages, fetched with apt and unpacked into a cache: never installed, never started as services.

The package archive's own signatures are checked by apt. Nothing outside the cache is written: when the machine has no
package lists, or old ones, apt refreshes private lists inside the cache.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaosgpu.lab.errors import LabError

FETCH_LIMIT_SECONDS = 300


def cache_directory() -> Path:
    """Where the lab keeps what it fetched: ``$CHAOSGPU_CACHE``, else ``chaosgpu`` in the user's cache directory."""
    if own := os.environ.get("CHAOSGPU_CACHE"):
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "chaosgpu"


def place_of(package: str) -> Path:
    """The directory of an unpacked package, whether or not it is there yet."""
    return cache_directory() / "debian" / _release() / package


def unpack(package: str) -> Path:
    """Return the directory into which the Debian package is unpacked, fetching it the first time.

    The tree below it is the package's own: ``unpack("prometheus") / "usr/bin/prometheus"``. The package's dependencies
    are not fetched. Safe to call from several processes at once, and after a call that was killed.

    :raises LabError: apt is not on this machine, the archive cannot be reached, or it has no such package.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise LabError(
                f"{package}: {tool} is not on this machine; the lab takes {package} from Debian's or Ubuntu's archive, "
                "so run it on one of these"
            )
    unpacked = place_of(package)
    shelf = unpacked.parent
    if unpacked.is_dir():
        return unpacked
    try:
        shelf.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"{package}: cannot make {shelf}: {error.strerror}; set CHAOSGPU_CACHE") from error
    with _locked(shelf / ".lock"):
        if not unpacked.is_dir():
            for half_done in shelf.glob(".fetch-*"):
                shutil.rmtree(half_done)
            fetched = Path(tempfile.mkdtemp(prefix=".fetch-", dir=shelf))
            try:
                archive = _download(package, fetched, shelf.parent / "apt")
                _run(package, ["dpkg-deb", "-x", str(archive), str(fetched / "root")], fetched)
                (fetched / "root").rename(unpacked)
            finally:
                shutil.rmtree(fetched)
    return unpacked


def _release() -> str:
    """Name the release and architecture, since a home directory may be shared by machines of several."""
    try:
        said = platform.freedesktop_os_release()
    except OSError:
        said = {}
    return f"{said.get('VERSION_CODENAME') or said.get('ID', 'unknown')}-{os.uname().machine}"


def _download(package: str, into: Path, private: Path) -> Path:
    """Fetch the archive with the machine's package lists, and with fresh private ones where these do not do."""
    # apt drops to the user "_apt" for downloads when root runs it, and that user may not write in a private cache.
    fetch = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3"]
    try:
        _run(package, [*fetch, "download", package], into)
    except LabError:
        for directory in ("state/lists/partial", "cache/archives/partial"):
            (private / directory).mkdir(parents=True, exist_ok=True)
        fetch += [
            "-o", f"Dir::State={private}/state",
            "-o", "Dir::State::status=/var/lib/dpkg/status",
            "-o", f"Dir::Cache={private}/cache",
        ]  # fmt: skip
        unreachable = _run(package, [*fetch, "update"], into)
        try:
            _run(package, [*fetch, "download", package], into)
        except LabError as error:
            # apt only warns when the archive cannot be reached, and then knows no package: say the former.
            raise LabError(f"{error}; apt warned: {unreachable[0]}") if unreachable else error from None
    return next(into.glob("*.deb"))


def _run(package: str, command: list[str], directory: Path) -> list[str]:
    """Run one command of apt or dpkg and return its warnings."""
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FETCH_LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(
            f"{package}: {command[0]} did not finish in {FETCH_LIMIT_SECONDS} s; check the network and the archive "
            "named in /etc/apt, then try again"
        ) from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith(("E:", "dpkg-deb:"))]
        why = (said or done.stderr.splitlines() or [f"exit code {done.returncode}"])[0]
        raise LabError(
            f"{package}: {command[0]} could not get it ({why.removeprefix('E: ')}); check the network and that "
            f"`apt-get download {package}` works in an empty directory"
        )
    return [line.removeprefix("W: ") for line in done.stderr.splitlines() if line.startswith("W:")]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
