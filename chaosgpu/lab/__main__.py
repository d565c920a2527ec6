"""``python -m chaosgpu.lab up|down|status``."""

import sys

from chaosgpu.lab.console import main

sys.exit(main())
