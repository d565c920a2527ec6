"""The standby: a keeper in waiting, for machines whose PID 1 restarts nothing.

Joined to the keeper's socket, everything imported. On EOF, or one silent second while a record is open, it kills what
is left of the keeper and takes its place. A keeper that leaves on purpose says so first.
"""

import gc
import os
import select
import signal
import socket
import time

from chaosgpu.node import keeper, places, supervisor, wire
from chaosgpu.node.lock import hold_lock, lock_holder
from chaosgpu.node.log import forget_logger, logger

SILENT_SECONDS = 1.0
STARVED_SECONDS = 5.0
TAKE_SECONDS = 2.0


def keep(bundle: str) -> None:
    """The life of keeper and standby, which become each other. The caller holds the keeper lock."""
    while True:
        supervisor.own_cgroup("keeper")
        if not _serve(bundle):
            return
        _forget_the_keeper()  # here, where no frame of the keeper's is left to hold a descriptor
        if not wait():
            return


def _serve(bundle: str) -> bool:
    """Be the keeper; True in a child that shall be its standby, False when there is nothing left to keep."""
    try:
        keeper.main(bundle)
    except keeper.BecomeStandby:
        return True
    return False


def _forget_the_keeper() -> None:
    """In the forked child: drop every descriptor of the keeper's, and start a session of our own.

    First everything that still refers to the keeper's objects, then the objects, then what is left by number: an object
    that outlived the sweep would later close a descriptor that is someone else's by then.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    forget_logger()
    gc.unfreeze()
    gc.collect()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                pass  # the listing's own descriptor
    os.setsid()


def wait() -> bool:
    """Wait for the keeper's end: True with its lock in hand, False when it left or another took its place."""
    supervisor.own_cgroup("standby")
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.connect(places.socket_path())
        sock.sendall(wire.encode({"op": "standby"}))
    except OSError:
        return False
    guarded = wire.peer(sock).pid
    ended = _keeper_ended(wire.Line(sock), guarded)
    sock.close()
    if not ended or not take_lock(guarded):
        return False
    logger().warning("keeper %d is gone or was silent: taking its place", guarded)
    return True


def _keeper_ended(line: wire.Line, pid: int) -> bool:
    """Block until the keeper leaves (False), or dies or falls silent with a record open (True).

    One silent second is enough for a keeper that does nothing; one that is being run, on a starved machine, is given
    ``STARVED_SECONDS``, since replacing it would only add to the load.
    """
    opened = True  # until the first word: a keeper that never answers is sick
    silent_since, used = time.monotonic(), _cpu_ticks(pid)
    while True:
        readable, _, _ = select.select([line.sock], [], [], SILENT_SECONDS if opened else None)
        if not readable:
            now_used = _cpu_ticks(pid)
            if now_used == used or time.monotonic() - silent_since > STARVED_SECONDS:
                return True
            used = now_used
            continue
        for message in line.receive():
            if message.get("leave"):
                return False
            opened = bool(message.get("open"))
        if line.eof:
            return True
        silent_since, used = time.monotonic(), _cpu_ticks(pid)


def _cpu_ticks(pid: int) -> int:
    """CPU time a process has used, in clock ticks; -1 when it is stopped or gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"T", b"t", b"Z", b"X") else int(fields[11]) + int(fields[12])


def take_lock(kill: int) -> bool:
    """Take the keeper lock, with SIGKILL for process ``kill`` should it still hold it; False: another was faster."""
    give_up = time.monotonic() + TAKE_SECONDS
    while not hold_lock():
        holder = lock_holder()
        if holder == kill:
            try:
                os.kill(kill, signal.SIGKILL)
            except ProcessLookupError:
                pass
        elif holder or time.monotonic() > give_up:
            return False
        time.sleep(0.005)
    return True
