"""The node command's own log: ``node.log`` in the state directory, never on a filesystem under fault."""

import logging
import os
from functools import lru_cache

from chaosgpu.node import places


@lru_cache(maxsize=1)
def logger() -> logging.Logger:
    """The logger of keeper and standby: one file, rotated at 1 MB, two kept."""
    import logzero

    made: logging.Logger = logzero.setup_logger(
        name="chaosgpu.node",
        logfile=os.path.join(places.state_dir(), "node.log"),
        formatter=logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"),
        maxBytes=1_000_000,
        backupCount=2,
        disableStderrLogger=True,
    )
    return made


def forget_logger() -> None:
    """Close the log in a forked child, which opens its own on its first word."""
    if logger.cache_info().currsize:
        for handler in list(logger().handlers):
            logger().removeHandler(handler)
            handler.close()
        logger.cache_clear()
