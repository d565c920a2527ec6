"""What a survey reads of the network: routes, the way in, RDMA providers, kernel modules, round trips."""

import ipaddress
import json
import os
import re
import socket
import time
from typing import Any, Dict, List, Optional, Set, Tuple

from chaosgpu.changes.errors import ChangeFailed
from chaosgpu.changes.file_value import read_file
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.netns import ask, inside

CONTROL_PORTS = {22: "ssh", 6443: "the API server", 10250: "the kubelet"}
SOFT_RDMA = ("rxe", "siw")
_ESTABLISHED = "01"


def addresses(peer: str) -> List[str]:
    """A peer's addresses: itself for an address or a CIDR, else what its name resolves to. Raises ChangeFailed."""
    try:
        return [str(ipaddress.ip_network(peer, strict=False)) if "/" in peer else str(ipaddress.ip_address(peer))]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(peer, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ChangeFailed(f"peer {peer} is no address and its name does not resolve here") from None
    return sorted({str(entry[4][0]).partition("%")[0] for entry in found})


def family(address: str) -> str:
    """tc's word for an address's protocol."""
    return "ipv6" if ":" in address else "ip"


def route_device(address: str, netns: str, grip: Grip) -> str:
    """The device that packets to an address leave by (`ip route get`); "" when there is no route."""
    target = address.partition("/")[0]
    with inside(netns):
        status, out, _ = grip.run(["ip", "-j", "route", "get", target], check=False)
    if status != 0 or not out:
        return ""
    return str(json.loads(out)[0].get("dev", ""))


def default_route_devices(netns: str, grip: Grip) -> Set[str]:
    """The devices of the default routes of both families."""
    found: Set[str] = set()
    for version in ("-4", "-6"):
        routes = ask(netns, ["ip", "-j", version, "route", "show", "default"], grip)
        found |= {str(route["dev"]) for route in routes if "dev" in route}
    return found


def neighbours(device: str, netns: str, grip: Grip) -> List[str]:
    """Gateways and neighbours on a device that are likely to answer."""
    routes = ask(netns, ["ip", "-j", "route", "show", "default", "dev", device], grip)
    gateways = [str(route["gateway"]) for route in routes if "gateway" in route]
    near = ask(netns, ["ip", "-j", "neigh", "show", "dev", device], grip)
    return gateways + [
        str(entry["dst"]) for entry in near if not {"FAILED", "INCOMPLETE"} & set(entry.get("state", []))
    ]


def control_peers(netns: str) -> List[Tuple[str, int, bool]]:
    """Established connections by which this machine is controlled: (remote address, port, whether the port is ours)."""
    found = set()
    for table in ("tcp", "tcp6"):
        with inside(netns):
            text = read_file(f"/proc/thread-self/net/{table}") or ""
        for line in text.splitlines()[1:]:
            fields = line.split()
            if len(fields) < 4 or fields[3] != _ESTABLISHED:
                continue
            local_port, (remote, remote_port) = _decode(fields[1])[1], _decode(fields[2])
            if local_port in (22, 10250):
                found.add((remote, local_port, True))
            elif remote_port in CONTROL_PORTS:
                found.add((remote, remote_port, False))
    return sorted(entry for entry in found if not ipaddress.ip_address(entry[0]).is_loopback)


def _decode(text: str) -> Tuple[str, int]:
    """An address and port of /proc/net/tcp: 32-bit words in host byte order."""
    words, port = text.split(":")
    packed = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped), int(port, 16)
    return str(address), int(port, 16)


def rdma_provider(device: str, details: Dict[str, Any]) -> str:
    """The RDMA provider on a network device: ``rxe``, ``siw``, ``hardware``, or "" when there is none.

    A hardware HCA's RDMA traffic never passes the kernel's queues: its InfiniBand device has a PCI device above, a soft
    one names its network device in ``parent``.
    """
    parent = details.get("parentdev", "")
    if parent and os.path.isdir(f"/sys/bus/{details.get('parentbus', 'pci')}/devices/{parent}/infiniband"):
        return "hardware"
    base = "/sys/class/infiniband"
    for name in os.listdir(base) if os.path.isdir(base) else []:
        if read_file(f"{base}/{name}/parent") == device:
            return next((soft for soft in SOFT_RDMA if name.startswith(soft)), SOFT_RDMA[0])
    return ""


def missing_modules(names: List[str]) -> List[str]:
    """Those kernel modules that are neither loaded, built in, nor installed for this kernel. Nothing is loaded here."""
    folder = f"/lib/modules/{os.uname().release}"
    listed = "".join(read_file(f"{folder}/{name}") or "" for name in ("modules.builtin", "modules.dep"))
    installed = set(re.findall(r"/([\w-]+)\.ko", listed))
    present = {name.replace("-", "_") for name in installed}
    return [name for name in names if not os.path.isdir(f"/sys/module/{name}") and name not in present]


def ping(address: str, netns: str, count: int, interval_seconds: float, grip: Grip) -> Optional[Dict[str, float]]:
    """Round trips by ping(8): {sent, received, rtt_ms (mean)}; None when ping is missing or nothing came back."""
    wait = "2"
    argv = ["ping", "-n", "-q", "-c", str(count), "-i", f"{interval_seconds:.3f}", "-W", wait, address]
    try:
        with inside(netns):
            _, out, _ = grip.run(argv, check=False, seconds=count * interval_seconds + 8)
    except ChangeFailed:
        return None
    counts = re.search(r"(\d+) packets transmitted, (\d+) received", out)
    times = re.search(r"= [\d.]+/([\d.]+)/", out)
    if not counts or not times:
        return None
    return {"sent": float(counts.group(1)), "received": float(counts.group(2)), "rtt_ms": float(times.group(1))}


def connect_ms(address: str, port: int, netns: str, count: int) -> Optional[float]:
    """The median time of a TCP connect in milliseconds, from inside a namespace; None when it never succeeds."""
    with inside(netns):
        taken = sorted(_connects(address, port, count))
    return taken[len(taken) // 2] if taken else None


def _connects(address: str, port: int, count: int) -> List[float]:
    taken = []
    for _ in range(count):
        begun = time.monotonic()
        try:
            socket.create_connection((address, port), timeout=3).close()
        except OSError:
            continue
        taken.append(1000 * (time.monotonic() - begun))
    return taken
