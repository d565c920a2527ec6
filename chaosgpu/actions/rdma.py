"""Actions on the fabric and the network below it."""

from typing import Any, Dict, List

from chaoslib.types import Configuration, Secrets

from chaosgpu.fleet.inject import inject

__all__ = ["impair_network"]


def impair_network(
    duration: str,
    device: str = None,
    peer: str = None,
    delay: float = None,
    jitter: float = None,
    loss_percent: float = None,
    duplicate_percent: float = None,
    reorder_percent: float = None,
    corrupt_percent: float = None,
    rate: int = None,
    port: int = None,
    direction: str = "egress",
    netns: str = None,
    nodes: List[str] = None,
    dry_run: bool = False,
    allow: List[str] = None,
    outlive_run: bool = False,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> Dict[str, Any]:
    """Delay, lose, duplicate, reorder, corrupt or slow chosen IP traffic of a device, IPv4 and IPv6 alike.

    By ``device``, or by ``peer`` (address, CIDR or host name: the device that routes to it, and only that traffic);
    ``port`` narrows to one TCP or UDP port. ``delay`` and ``jitter`` in milliseconds (or "50ms"), ``rate`` in bits per
    second (or "100mbit"), ``direction`` egress, ingress or both, ``netns`` a network namespace's path. Connections that
    control this machine, ARP and neighbour discovery are spared. Refused on hardware RDMA adapters, where it would do
    nothing, and where someone else's qdisc is. By tc-netem(8) below tc-prio(8), chosen by tc-flower(8).
    """
    return inject(
        "rdma.impair_network",
        {
            "device": device,
            "peer": peer,
            "delay": delay,
            "jitter": jitter,
            "loss_percent": loss_percent,
            "duplicate_percent": duplicate_percent,
            "reorder_percent": reorder_percent,
            "corrupt_percent": corrupt_percent,
            "rate": rate,
            "port": port,
            "direction": direction,
            "netns": netns,
        },
        duration=duration,
        nodes=nodes,
        dry_run=dry_run,
        allow=allow,
        outlive_run=outlive_run,
        configuration=configuration,
    )
