"""chaosgpu: real, proven, bounded and always undone faults for GPU clusters, as a Chaos Toolkit driver."""

from typing import Any

__version__ = "0.1.0"


def discover(discover_system: bool = True) -> Any:
    """List every activity for ``chaos discover chaostoolkit-gpu``.

    The toolkit is imported here and not above, since a bare node runs the lower floors of this package without it.
    """
    from chaoslib.discovery.discover import (
        discover_actions,
        discover_probes,
        initialize_discovery_result,
    )

    found = initialize_discovery_result("chaostoolkit-gpu", __version__, "gpu")
    found["activities"].extend(discover_actions("chaosgpu.actions"))
    found["activities"].extend(discover_probes("chaosgpu.probes"))
    found["activities"].extend(discover_probes("chaosgpu.probes.chaosprometheus"))  # named so for chaos report
    found["activities"].extend(discover_actions("chaosgpu.rollbacks"))
    return found
