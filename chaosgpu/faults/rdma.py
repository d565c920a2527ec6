"""Faults of the fabric and the network below it."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Dict, List, Optional, Tuple

from chaosgpu.changes.base import Change
from chaosgpu.changes.errors import BadArgument, ChangeFailed, NoEffect
from chaosgpu.changes.file_value import read_file
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.netns import ask, find, ifindex, link, netns_inode, qdiscs
from chaosgpu.changes.qdisc import IfbLink, IngressQdisc, RootQdisc
from chaosgpu.faults import net, params
from chaosgpu.faults.base import Declaration, Fault, Survey, fault

ND_TYPES = range(133, 138)  # router and neighbour discovery and redirect (RFC 4861): never impaired
BANDS = ["prio", "bands", "4", "priomap", *"1 2 2 2 1 2 0 0 1 1 1 1 1 1 1 1".split()]  # the fourth only by a filter
ASSUMED_BITS_PER_SECOND = 10 * 10**9
MOST_PACKETS = 10**6
DELAY_PINGS = 20
LOSS_PINGS = 200


@fault
@dataclass(frozen=True)
class ImpairNetwork(Fault):
    """Chosen IP traffic of a device is delayed, lost, duplicated, reordered, corrupted or slowed by netem."""

    name: ClassVar[str] = "rdma.impair_network"
    declaration: ClassVar[Declaration] = Declaration(
        layer="fabric",
        summary="delays, loses, duplicates, reorders, corrupts or slows chosen IP traffic in the kernel",
        reversible="exact",
        takes_effect="now",
        scope="device",
        needs=("root", "tool:tc", "tool:ip", "module:sch_netem", "module:sch_prio", "module:cls_flower"),
        certifies="how TCP, UDP and soft-RoCE traffic bears a bad path: NCCL's socket transport, storage, RPC",
        does_not_certify="RDMA on a hardware HCA, which never passes the kernel's queues",
        metrics=("node_network_transmit_drop_total", "node_netstat_Tcp_RetransSegs", "node_qdisc_drops_total"),
        residue="packets queued when the qdisc is put in or taken out are dropped",
        opt_outs=("default_route", "file_server", "tcp_only"),
        seen_on=("guest",),
    )

    device: Optional[str] = params.param(
        params.text(r"[^/\s:]{1,15}", "a network device's name", 15), None, doc="the device; else found by peer"
    )
    peer: Optional[str] = params.param(
        params.text(r"[0-9A-Za-z_.:/-]{1,253}", "an address, a CIDR or a host name", 253), None, doc="only to and from"
    )
    delay: Optional[float] = params.param(params.milliseconds(0.001, 60000), None, doc="milliseconds added")
    jitter: Optional[float] = params.param(params.milliseconds(0.001, 60000), None, doc="milliseconds of variation")
    loss_percent: Optional[float] = params.param(params.percent(0.0001, 100), None)
    duplicate_percent: Optional[float] = params.param(params.percent(0.0001, 100), None)
    reorder_percent: Optional[float] = params.param(params.percent(0.0001, 100), None)
    corrupt_percent: Optional[float] = params.param(params.percent(0.0001, 100), None)
    rate: Optional[int] = params.param(params.bits_per_second(1000), None, doc="bits per second")
    port: Optional[int] = params.param(params.integer(1, 65535), None, doc="only this TCP or UDP port, ours or theirs")
    direction: str = params.param(params.choice("egress", "ingress", "both"), "egress")
    netns: Optional[str] = params.param(params.path(), None, doc="a network namespace: /run/netns/x, /proc/PID/ns/net")

    def check(self) -> None:
        if self.device is None and self.peer is None:
            raise BadArgument("give device or peer (the device is then the one that routes to it)")
        if not self._impairments():
            raise BadArgument(
                "give at least one of delay, loss_percent, duplicate_percent, reorder_percent, corrupt_percent, rate"
            )
        if self.delay is None and (self.jitter is not None or self.reorder_percent is not None):
            raise BadArgument("jitter and reorder_percent need a delay: netem varies and reorders delayed packets")

    def _impairments(self) -> Dict[str, float]:
        names = ("delay", "loss_percent", "duplicate_percent", "reorder_percent", "corrupt_percent", "rate")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    # --- survey

    def survey(self, survey: Survey) -> None:
        facts = survey.facts
        netns = self.netns or ""
        facts.update({"netns": netns, "netns_inode": netns_inode(netns), "peers": []})
        if not facts["netns_inode"]:
            survey.refuse(f"netns {netns} is not there")
            return
        modules = ["sch_netem", "sch_prio", "cls_flower"]
        if self.direction != "egress":
            modules += ["ifb", "act_mirred", "sch_ingress"]
        missing = net.missing_modules(modules)
        if missing:
            survey.refuse(
                f"the kernel lacks {', '.join(missing)}: install its module package (linux-modules-extra or the like)"
                f" or `modprobe {missing[0]}`"
            )
        if self.peer is not None:
            try:
                facts["peers"] = net.addresses(self.peer)
            except ChangeFailed as error:
                survey.refuse(str(error))
                return
        device = self.device or self._device_to_peers(survey)
        details = link(netns, device, survey.grip) if device else None
        if details is None:
            survey.refuse(f"device {self.device} is not there" if self.device else f"there is no route to {self.peer}")
            return
        facts.update({"device": device, "ifindex": details["ifindex"], "mtu": details.get("mtu", 1500)})
        self._survey_paths(survey)
        self._survey_qdiscs(survey)
        facts["handle"] = _free_handle(survey.injection, facts["qdiscs_before"])
        facts["limit"] = self._limit_packets(device, facts["mtu"])
        if not survey.refusals:
            facts["baseline"] = self._baseline(facts, survey.grip)

    def _device_to_peers(self, survey: Survey) -> str:
        """The device that leads to the peer. A name may have addresses beyond others of them: those are not hit."""
        facts = survey.facts
        ways = {peer: net.route_device(peer, facts["netns"], survey.grip) for peer in facts["peers"]}
        device = next((way for way in ways.values() if way), "")
        elsewhere = [peer for peer in facts["peers"] if ways[peer] != device]
        if device and elsewhere:
            survey.warnings.append(f"{', '.join(elsewhere)} of {self.peer} are not reached by {device} and not hit")
            facts["peers"] = [peer for peer in facts["peers"] if ways[peer] == device]
        return device

    def _survey_paths(self, survey: Survey) -> None:
        """Refuse where the fault would do nothing, or would cut off those who could end it."""
        facts, device = survey.facts, survey.facts["device"]
        facts["rdma"] = net.rdma_provider(device, facts["netns"], survey.grip)
        if facts["rdma"] == "hardware":
            survey.refuse(
                f"device {device} belongs to a hardware RDMA adapter: RDMA traffic never passes the kernel's queues,"
                " so this would do nothing to it (a link, rate limit or switch fault would)",
                unless="tcp_only",
            )
        elif net.rdma_devices(hardware_only=True):
            adapters = ", ".join(net.rdma_devices(hardware_only=True))
            survey.warnings.append(f"RDMA traffic of {adapters} on this node is not touched, only IP through {device}")
        facts["control"] = [list(entry) for entry in net.control_peers(facts["netns"])]
        narrowed = self.peer is not None or self.port is not None
        if device in net.default_route_devices(facts["netns"], survey.grip) and not narrowed:
            survey.refuse(
                f"device {device} carries the default route: narrow the fault by peer or port", unless="default_route"
            )
        if not narrowed:
            for server in net.storage_servers(facts["netns"]):
                if net.route_device(server, facts["netns"], survey.grip) == device:
                    survey.refuse(
                        f"device {device} leads to the file server {server} that this machine has mounts from: narrow"
                        " the fault by peer or port",
                        unless="file_server",
                    )
        if self.port in net.CONTROL_PORTS:
            survey.warnings.append(f"port {self.port}: connections that control this machine are spared")
        if device == "lo" and facts["rdma"]:
            survey.warnings.append("soft-RoCE traffic of a device to itself bypasses the kernel's queues")

    def _survey_qdiscs(self, survey: Survey) -> None:
        facts, device = survey.facts, survey.facts["device"]
        before = qdiscs(facts["netns"], device, survey.grip)
        facts["qdiscs_before"] = _shape(before)
        for entry in before:
            if entry.get("kind") not in ("clsact", "ingress", "noqueue") and entry.get("handle") != "0:":
                survey.refuse(
                    f"device {device} has qdisc {entry.get('kind')} {entry.get('handle')}, set by someone else:"
                    " remove it, or have its owner do so"
                )
        if self.direction != "egress" and any(entry.get("kind") in ("clsact", "ingress") for entry in before):
            survey.refuse(
                f"device {device} has an ingress qdisc of someone else (a container network does that):"
                " direction egress works, on this side or the peer's"
            )

    def _limit_packets(self, device: str, mtu: int) -> int:
        """How many packets netem must be able to hold, or a long delay turns into loss (its default is 1000)."""
        speed = "" if self.netns else _megabits_per_second(device)
        bits = self.rate or (int(speed) * 10**6 if speed.isdigit() else ASSUMED_BITS_PER_SECOND)
        seconds = ((self.delay or 0) + 3 * (self.jitter or 0)) / 1000
        return max(1000, min(MOST_PACKETS, math.ceil(1.5 * seconds * bits / 8 / max(mtu, 68))))

    # --- changes

    def _netem(self, limit: int) -> List[str]:
        words = ["netem", "limit", str(limit)]
        if self.delay is not None:
            words += ["delay", f"{self.delay:g}ms", *([f"{self.jitter:g}ms"] if self.jitter is not None else [])]
        for word in ("loss", "duplicate", "reorder", "corrupt"):
            value = getattr(self, f"{word}_percent")
            if value is not None:
                words += [word, f"{value:g}%"]
        if self.rate is not None:
            words += ["rate", f"{self.rate}bit"]
        return words

    def _matches(self, facts: Dict[str, Any], remote: str) -> List[List[str]]:
        """Flower keys for the traffic that is hit. ``remote`` is the peer's side: dst on egress, src on ingress."""
        wanted = []
        for protocol in ("ip", "ipv6"):
            peers = [peer for peer in facts["peers"] if net.family(peer) == protocol]
            if facts["peers"] and not peers:
                continue
            for peer in peers or [""]:
                address = [f"{remote}_ip", peer] if peer else []
                if self.port is None:
                    wanted.append([protocol, *address])
                    continue
                for transport in ("tcp", "udp"):
                    for side in ("dst_port", "src_port"):
                        wanted.append([protocol, *address, "ip_proto", transport, side, str(self.port)])
        return wanted

    def _spared(self, facts: Dict[str, Any], remote: str) -> List[List[str]]:
        """Flower keys for what is never hit: neighbour discovery, and the connections that control this machine."""
        local = "src" if remote == "dst" else "dst"
        spared = [["ipv6", "ip_proto", "icmpv6", "type", str(number), "code", "0"] for number in ND_TYPES]
        for address, port, ours in facts["control"]:
            side = local if ours else remote
            spared.append([net.family(address), f"{remote}_ip", address, "ip_proto", "tcp", f"{side}_port", str(port)])
        return spared

    def changes(self, survey: Survey) -> List[Change]:
        facts = survey.facts
        place = (facts["netns"], facts["netns_inode"], facts["device"], facts["ifindex"])
        changes: List[Change] = []
        if self.direction != "ingress":
            changes.append(self._egress(facts, place))
        if self.direction != "egress":
            ifb = f"cg{survey.injection}"
            netem = self._netem(facts["limit"])
            changes.append(IfbLink(facts["netns"], facts["netns_inode"], ifb, netem))
            changes.append(IngressQdisc(*place, self._ingress(facts, ifb, _first_preference(survey.injection))))
        return changes

    def _ingress(self, facts: Dict[str, Any], ifb: str, first: int) -> List[List[str]]:
        rows = [(keys, ["action", "pass"]) for keys in self._spared(facts, "src")]
        redirect = ["action", "mirred", "egress", "redirect", "dev", ifb]
        rows += [(keys, redirect) for keys in self._matches(facts, "src")]
        return [
            [str(preference), "protocol", keys[0], "flower", *keys[1:], *action]
            for preference, (keys, action) in enumerate(rows, first)
        ]

    def _egress(self, facts: Dict[str, Any], place: Tuple[str, int, str, int]) -> RootQdisc:
        handle, leaf = facts["handle"], f"{int(facts['handle'][:-1], 16) + 1:x}:"
        dev = ["dev", facts["device"]]
        below = [["qdisc", "add", *dev, "parent", f"{handle}4", "handle", leaf, *self._netem(facts["limit"])]]
        preference = 0
        for band, rows in ((1, self._spared(facts, "dst")), (4, self._matches(facts, "dst"))):
            for keys in rows:
                preference += 1
                place_in = ["filter", "add", *dev, "parent", handle, "protocol", keys[0], "pref", str(preference)]
                below.append([*place_in, "flower", *keys[1:], "classid", f"{handle}{band}"])
        return RootQdisc(*place, handle, BANDS, below)

    # --- evidence

    def _baseline(self, facts: Dict[str, Any], grip: Grip) -> Optional[Dict[str, Any]]:
        """The round trip before, to whom answers first: a peer, or a neighbour where all of a device is hit."""
        hosts = [peer for peer in facts["peers"] if "/" not in peer]
        if self.peer is None:
            hosts = net.neighbours(facts["device"], facts["netns"], grip)
        return self._round_trip(hosts[:2], facts, grip, DELAY_PINGS)

    def _round_trip(self, hosts: List[str], facts: Dict[str, Any], grip: Grip, count: int) -> Optional[Dict[str, Any]]:
        """A real round trip through what is hit: TCP connects to the port, else pings; None where nobody answers."""
        for host in hosts:
            if self.port is not None:
                taken = net.connect_ms(host, self.port, facts["netns"], 5)
                if taken is not None:
                    return {"how": f"TCP connect to {host}:{self.port}", "host": host, "rtt_ms": taken}
            else:
                found = net.ping(host, facts["netns"], count, 0.02 if count <= DELAY_PINGS else 0.005, grip)
                if found is not None:
                    return {"how": f"ping {host}", "host": host, **found}
        return None

    def evidence(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        netems = self._netem_counters(facts, changes, grip)
        proof: Dict[str, Any] = {"netem": netems, "baseline": facts.get("baseline")}
        if facts.get("baseline") is None:
            proof["exercised"] = False
            proof["note"] = (
                "nobody answered on this path before, so only the kernel's own account of the qdisc is shown"
            )
            return proof
        count = LOSS_PINGS if self.loss_percent is not None else DELAY_PINGS
        during = self._round_trip([facts["baseline"]["host"]], facts, grip, count)
        proof["during"] = during
        proof["exercised"] = True
        times = 2 if self.direction == "both" else 1
        if during is None:
            if self.loss_percent is None or self.loss_percent < 30:
                raise NoEffect("the peer that answered before does not answer at all: the path broke otherwise")
            return proof
        added = during["rtt_ms"] - facts["baseline"]["rtt_ms"]
        proof["added_ms"] = round(added, 3)
        if self.delay is not None and self.reorder_percent is None:
            least = times * (0.8 * self.delay - 2 * (self.jitter or 0)) - 1
            if added < least:
                raise NoEffect(f"a delay of {self.delay:g} ms was asked for and {added:.2f} ms more were measured")
        if self.loss_percent is not None and "sent" in during:
            lost = during["sent"] - during["received"]
            proof["lost_percent"] = round(100 * lost / during["sent"], 2)
            expected = 1 - (1 - self.loss_percent / 100) ** times
            if lost == 0 and (1 - expected) ** during["sent"] < 1e-4:
                raise NoEffect(
                    f"a loss of {self.loss_percent:g} % was asked for and none of {during['sent']:.0f} was lost"
                )
        proof["netem"] = self._netem_counters(facts, changes, grip)
        return proof

    def _netem_counters(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        """The netem qdiscs of this fault as the kernel accounts for them (`tc -s -j qdisc`)."""
        devices = [change.device for change in changes if isinstance(change, (RootQdisc, IfbLink))]
        found = {}
        for device in devices:
            for entry in ask(facts["netns"], ["tc", "-s", "-j", "qdisc", "show", "dev", device], grip):
                if entry.get("kind") == "netem":
                    counters = {name: entry.get(name, 0) for name in ("packets", "bytes", "drops", "overlimits")}
                    found[device] = {"options": entry.get("options", {}), **counters}
        if len(found) != len(devices):
            raise NoEffect(f"the kernel shows no netem qdisc on {', '.join(sorted(set(devices) - set(found)))}")
        return found

    def restored(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        netns = find(facts["netns"], facts["netns_inode"])
        if netns is None or ifindex(netns, facts["device"]) != facts["ifindex"]:
            return {"note": f"device {facts['device']} is gone"}
        after = _shape(qdiscs(netns, facts["device"], grip))
        return {"qdiscs": after, "as_before": after == facts["qdiscs_before"]}


def _megabits_per_second(device: str) -> str:
    """The link's speed as its driver tells, "" where it tells none.

    Reading it fails with EINVAL for a loopback, or a link that is down (kernel doc, ABI/testing/sysfs-class-net).
    """
    try:
        return read_file(f"/sys/class/net/{device}/speed") or ""
    except ChangeFailed:
        return ""


def _shape(entries: List[Any]) -> List[str]:
    """A device's qdiscs without counters: kind, handle, parent."""
    return sorted(
        f"{entry.get('kind')} {entry.get('handle')} {'root' if entry.get('root') else entry.get('parent', '')}"
        for entry in entries
    )


def _free_handle(injection: str, before: List[str]) -> str:
    """A qdisc handle made from the injection's id, free with its successor: ours for the root and the leaf."""
    taken = {line.split()[1] for line in before}
    number = 0x1000 + int(injection[:3], 16) * 2
    while f"{number:x}:" in taken or f"{number + 1:x}:" in taken:
        number += 2
    return f"{number:x}:"


def _first_preference(injection: str) -> int:
    """Where our filters' preferences begin in a qdisc that others may use too: from the injection's id, and below
    0xC000, from where the kernel takes those that nobody chose."""
    return 0x1000 + int(injection[:2], 16) * 0x80
