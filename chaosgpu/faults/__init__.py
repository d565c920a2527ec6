"""The catalogue of faults, one module per family. Importing this package fills ``base.CATALOGUE``."""

from chaosgpu.faults import host as host
from chaosgpu.faults import numa as numa
from chaosgpu.faults import rdma as rdma
from chaosgpu.faults import storage as storage
