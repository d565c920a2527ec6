"""What a survey reads of the network: routes, the way in, RDMA providers, kernel modules, round trips."""

import glob
import ipaddress
import json
import os
import re
import socket
import time
from typing import Any, Dict, FrozenSet, List, Optional, Set, Tuple

from chaosgpu.changes.errors import ChangeFailed
from chaosgpu.changes.file_value import read_file
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.netns import ask, inside

CONTROL_PORTS = {22: "ssh", 6443: "the API server", 10250: "the kubelet"}
CONTROL_PROGRAMS = frozenset(("sshd", "sshd-session", "dropbear", "kubelet", "k3s", "k3s-server", "k3s-agent", "rke2"))
SOFT_RDMA = ("rxe", "siw")
SYSFS = "/sys"
_ESTABLISHED, _LISTEN = "01", "0A"


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
    """Established connections by which this machine is controlled: (remote address, port, whether the port is ours).

    Those of the well-known ports, and those of an ssh server or a kubelet whatever their port is.
    """
    controlling = _sockets_of(CONTROL_PROGRAMS)
    found = set()
    for table in ("tcp", "tcp6"):
        with inside(netns):
            rows = [line.split() for line in (read_file(f"/proc/thread-self/net/{table}") or "").splitlines()[1:]]
        listening = {_decode(row[1])[1] for row in rows if row[3] == _LISTEN}
        for row in rows:
            if row[3] != _ESTABLISHED:
                continue
            local_port, (remote, remote_port) = _decode(row[1])[1], _decode(row[2])
            controls = row[9] in controlling
            if local_port in (22, 10250) or (controls and local_port in listening):
                found.add((remote, local_port, True))
            elif remote_port in CONTROL_PORTS or controls:
                found.add((remote, remote_port, False))
    return sorted(entry for entry in found if not ipaddress.ip_address(entry[0]).is_loopback)


def _sockets_of(programs: FrozenSet[str]) -> Set[str]:
    """The inodes of every socket that processes of those names (proc(5), comm) hold open."""
    found = set()
    for folder in glob.iglob("/proc/[0-9]*"):
        try:
            if read_file(f"{folder}/comm") not in programs:
                continue
            links = [os.readlink(entry.path) for entry in os.scandir(f"{folder}/fd")]
        except (OSError, ChangeFailed):
            continue  # it has ended
        found |= {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    return found


def _decode(text: str) -> Tuple[str, int]:
    """An address and port of /proc/net/tcp: 32-bit words in host byte order."""
    words, port = text.split(":")
    packed = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped), int(port, 16)
    return str(address), int(port, 16)


def rdma_provider(device: str, netns: str, grip: Grip) -> str:
    """The RDMA provider on a network device: ``hardware``, ``rxe``, ``siw``, or "" when there is none.

    A hardware HCA's RDMA traffic never passes the kernel's queues: its InfiniBand device has a PCI device above, a soft
    one names its network device in ``parent``. A bond, VLAN, macvlan or ipvlan has what is below it: RoCE uses their
    addresses over the HCA's port.
    """
    found = {_provider(details) for details in _with_those_below(device, netns, grip)}
    return next((provider for provider in ("hardware", *SOFT_RDMA) if provider in found), "")


def _with_those_below(device: str, netns: str, grip: Grip) -> List[Dict[str, Any]]:
    """`ip -d link` of a device and of all it sends through."""
    links = {str(entry.get("ifname")): entry for entry in ask(netns, ["ip", "-j", "-d", "link", "show"], grip)}
    seen: List[str] = []
    below = [device]
    while below:
        name = below.pop()
        if name in seen or name not in links:
            continue
        seen.append(name)
        kind = links[name].get("linkinfo", {}).get("info_kind")
        if kind in ("vlan", "macvlan", "ipvlan") and "link" in links[name]:
            below.append(str(links[name]["link"]))
        elif kind in ("bond", "team"):
            below += [other for other, entry in links.items() if entry.get("master") == name]
    return [links[name] for name in seen]


def _provider(details: Dict[str, Any]) -> str:
    parent = details.get("parentdev", "")
    if parent and os.path.isdir(f"{SYSFS}/bus/{details.get('parentbus', 'pci')}/devices/{parent}/infiniband"):
        return "hardware"
    for name in rdma_devices():
        if read_file(f"{SYSFS}/class/infiniband/{name}/parent") == details.get("ifname"):
            return next((soft for soft in SOFT_RDMA if name.startswith(soft)), SOFT_RDMA[0])
    return ""


def rdma_devices(hardware_only: bool = False) -> List[str]:
    """The RDMA devices of this machine; those of hardware have a ``device`` above them."""
    base = f"{SYSFS}/class/infiniband"
    names = sorted(os.listdir(base)) if os.path.isdir(base) else []
    return [name for name in names if not hardware_only or os.path.exists(f"{base}/{name}/device")]


def storage_servers(netns: str) -> List[str]:
    """Addresses of the file servers that this machine has mounts from (nfs(5), ``addr=``); "" netns only."""
    if netns:
        return []
    found = set()
    for line in (read_file("/proc/self/mountinfo") or "").splitlines():
        kind, _, options = line.partition(" - ")[2].split(maxsplit=2)
        if kind in ("nfs", "nfs4", "cifs", "smb3"):
            found |= {word[len("addr=") :] for word in options.split(",") if word.startswith("addr=")}
    return sorted(found)


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
