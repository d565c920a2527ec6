"""The lab at the terminal: one line a step, and one for each part's health; plain lines in a pipe."""

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from chaosgpu.lab.cluster import Step, down, up
from chaosgpu.lab.errors import LabError
from chaosgpu.lab.health import status

COLOURS = {"made": "green", "kept": "cyan", "missing": "yellow", "removed": "green", "absent": "bright_black"}


class Shown:
    """Progress on a console: what is going on while it lasts, and a line when it is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: Status | None = None

    def __call__(self, step: Step) -> None:
        """Show one step."""
        self.close()
        if step.outcome == "begins":
            text = f"{step.name} {step.detail}".strip() + " ..."
            if self._console.is_terminal:
                self._running = self._console.status(text)
                self._running.start()
            elif step.name in ("packages", "lock"):  # the two that may take long
                self._console.print(text, markup=False)
            return
        line = Text.assemble(
            (f"{step.outcome:8}", COLOURS[step.outcome]),
            f"{step.name:18}",
            (f"{step.seconds:6.2f} s  ", "bright_black"),
            step.detail,
        )
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        """End the line that shows what is going on."""
        if self._running:
            self._running.stop()
            self._running = None


def show_status(console: Console, found: dict[str, Any]) -> None:
    """Print a status, a line for each part, and the lines that an experiment's author copies."""
    console.print(f"lab at {found['directory']}: [bold]{found['state']}[/]", highlight=False)
    if not found["components"]:
        return
    # Lines and not a rich table: that would fold or cut what people copy.
    for component in found["components"]:
        mark = ("ok   ", "green") if component["healthy"] else ("bad  ", "red")
        pid = f"pid {component['pid']}" if "pid" in component else ""
        console.print(Text.assemble(mark, f"{component['name']:18} {pid:12} {component['detail']}"), soft_wrap=True)
    if "variables" in found:
        console.print(f"\nin an experiment: chaos run --var-file {found['variables']} EXPERIMENT", soft_wrap=True)
        for meaning, query in found["queries"].items():
            console.print(Text(f"{meaning:36} {query}"), soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """``up``, ``down`` or ``status``; the exit code of ``status`` is 1 unless the lab is up."""
    parser = argparse.ArgumentParser(
        prog="python -m chaosgpu.lab", description="The rehearsal cluster on this machine."
    )
    parser.add_argument("command", choices=("up", "down", "status"))
    parser.add_argument(
        "--json", action="store_true", help="print the outcome as JSON, nothing else on standard output"
    )
    given = parser.parse_args(arguments)
    # A pipe gets whole lines, whatever the width that rich would assume for it.
    console = Console(stderr=given.json, width=None if sys.stdout.isatty() else 1000, highlight=False)
    shown = Shown(console)
    try:
        if given.command == "up":
            up(shown)
        elif given.command == "down":
            down(shown)
        found = status()
    except LabError as error:
        shown.close()
        for line in str(error).splitlines():
            print(f"lab: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        shown.close()
        print("lab: interrupted; run up again to complete it, or down to remove it", file=sys.stderr)
        return 130
    if given.json:
        print(json.dumps(found, indent=1))
    elif given.command == "status":
        show_status(console, found)
    return 1 if given.command == "status" and found["state"] != "up" else 0
