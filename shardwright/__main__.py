"""The command ``shardwright``, also ``python -m shardwright``: nothing is imported before an interrupt can be taken."""

import os
import signal
from typing import NoReturn


def run() -> None:
    """Run the command line. A SIGINT while it is being imported ends the process without a traceback."""
    # Else it is ignored, as in the background.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from shardwright.cli import main

    main()


def _end(number: int, frame: object) -> NoReturn:
    """End at once: no exception, which whatever is just being imported might keep, or show."""
    os.write(2, b"shardwright: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    run()
