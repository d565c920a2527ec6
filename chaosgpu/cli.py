"""``chaos gpu ...``: what is broken now, undo it, what could be broken, what an experiment would do, the lab.

Tables and colours on a terminal, plain text in a pipe, ``--json`` everywhere. A stuck injection is the first line of
every command that talks to nodes, and makes its exit status 3.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

STUCK = 3


@click.group()
def gpu() -> None:
    """Faults on GPU clusters: real, proven, bounded and always undone."""


@contextmanager
def _errors() -> Iterator[None]:
    """Expected errors are one line on stderr and exit status 1."""
    from chaosgpu.changes.errors import ChaosgpuError

    try:
        yield
    except ChaosgpuError as error:
        click.echo(f"chaos gpu: {error}", err=True)
        sys.exit(1)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people: drawn on a terminal, tab-separated in a pipe."""
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_coloured(cell) for cell in row))
    Console().print(table)


_COLOURS = {"stuck": "bold red", "active": "yellow", "closed": "green", "refused": "red", "would run": "green"}


def _coloured(cell: str) -> str:
    from rich.markup import escape

    colour = _COLOURS.get(cell)
    return f"[{colour}]{escape(cell)}[/]" if colour else escape(cell)


def _show_faults(entries: list[dict[str, Any]], as_json: bool, empty: str) -> None:
    """Print faults, the stuck first, and exit with 3 when there is one."""
    stuck = [entry for entry in entries if entry["state"] == "stuck"]
    if as_json:
        click.echo(json.dumps(entries, indent=2))
    else:
        for entry in stuck:
            click.secho(
                f"STUCK {entry['injection']} {entry['fault']} on {entry['node']}: {'; '.join(entry['stuck'])}",
                fg="red",
                bold=True,
            )
        if entries:
            rows = [
                (
                    entry["node"],
                    entry["injection"],
                    entry["fault"],
                    entry["state"],
                    f"{entry['seconds_left']:.0f} s" if "seconds_left" in entry else "",
                    entry.get("cause", ""),
                    _verdicts(entry),
                )
                for entry in entries
            ]
            _table(("node", "injection", "fault", "state", "left", "ended by", "verdicts"), rows)
        else:
            click.echo(empty)
    if stuck:
        sys.exit(STUCK)


def _verdicts(entry: dict[str, Any]) -> str:
    words = [verdict for verdict, _ in entry.get("verdicts", {}).values()]
    told = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    details = [detail for _, detail in entry.get("verdicts", {}).values() if detail]
    early = "; ended early" if entry.get("ended_early") else ""
    return f"{told}{': ' + details[0] if details else ''}{early}"


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@gpu.command()
@click.option("--recent", is_flag=True, help="The closed ones too.")
@_json
def faults(recent: bool, as_json: bool) -> None:
    """Faults that are in place, with the time they have left."""
    from chaosgpu.fleet import ask

    with _errors():
        entries = ask.faults(recent=recent)
    _show_faults(entries, as_json, "no faults")


@gpu.command()
@click.argument("injection", required=False)
@click.option("--run", is_flag=False, flag_value="newest", help="Those of one run; without a value, of the newest.")
@click.option("--all", "everything", is_flag=True, help="Every fault there is.")
@_json
def revert(injection: str | None, run: str | None, everything: bool, as_json: bool) -> None:
    """Undo faults now: one by its id, those of a run, or all. Safe when there are none."""
    from chaosgpu.changes.errors import BadArgument
    from chaosgpu.fleet import ask, runs

    with _errors():
        if sum((injection is not None, run is not None, everything)) != 1:
            raise BadArgument(
                "say what to revert: an injection's id, --run [RUN] or --all (chaos gpu faults lists them)"
            )
        if run == "newest":
            run = runs.newest()
        entries = ask.revert([injection] if injection else None, run)
    _show_faults(entries, as_json, "nothing to revert")


@gpu.command()
@click.argument("injection")
@_json
def record(injection: str, as_json: bool) -> None:
    """Everything known of one injection, with the shell lines that undo it by hand."""
    from chaosgpu.fleet import ask

    with _errors():
        lines = ask.record(injection)
    if as_json:
        click.echo(json.dumps(lines, indent=2))
        return
    planned = lines[0]
    click.echo(f"{planned['id']} {planned['fault']} {json.dumps(planned['arguments'])}")
    for line in lines[1:]:
        click.echo(f"  {json.dumps(line)}")
    click.echo("undo by hand, in this order:")
    for _, undo in reversed(planned["shell"]):
        click.echo(f"  {undo}")


@gpu.command()
@_json
def catalogue(as_json: bool) -> None:
    """Every fault with its declaration: what it does, certifies, needs, and how it ends."""
    import dataclasses

    from chaosgpu.faults.base import CATALOGUE

    documents = [
        {
            "name": name,
            "action": f"chaosgpu.actions.{name.partition('.')[2]}",
            "parameters": {
                field.name: {"doc": field.metadata["doc"], "required": field.default is dataclasses.MISSING}
                for field in dataclasses.fields(fault)
            },
            **dataclasses.asdict(fault.declaration),
        }
        for name, fault in sorted(CATALOGUE.items())
    ]
    if as_json:
        click.echo(json.dumps(documents, indent=2))
        return
    rows = [
        (
            document["name"],
            document["summary"],
            document["reversible"],
            document["danger"],
            ", ".join(document["needs"]),
            document["certifies"],
            document["does_not_certify"],
        )
        for document in documents
    ]
    _table(("fault", "what it does", "undone", "danger", "needs", "certifies", "does not certify"), rows)


@gpu.command()
@click.argument("experiment", type=click.Path(exists=True, dir_okay=False))
@click.option("--var", multiple=True, metavar="KEY[:TYPE]=VALUE", help="As for chaos run.")
@click.option("--var-file", multiple=True, type=click.Path(exists=True, dir_okay=False), help="As for chaos run.")
@_json
def plan(experiment: str, var: tuple[str, ...], var_file: tuple[str, ...], as_json: bool) -> None:
    """What every fault of an experiment would change, and why a node would refuse. Nothing is touched."""
    from chaosgpu.fleet import plans

    with _errors():
        planned = plans.plan(experiment, var, var_file)
    refused = any("refused" in entry for entry in planned)
    if as_json:
        click.echo(json.dumps(planned, indent=2))
    elif not planned:
        click.echo("this experiment has no chaosgpu fault")
    else:
        for number, entry in enumerate(planned, 1):
            state = "refused" if "refused" in entry else "would run"
            head = f"{number}. {entry['activity']}: {entry['fault']} for {entry['duration']}: {state}"
            click.secho(head, fg="red" if "refused" in entry else "green", bold=True)
            for line in [*([entry["refused"]] if "refused" in entry else []), *entry.get("warnings", [])]:
                click.echo(f"   ! {line}")
            for apply, undo in entry.get("shell", []):
                click.echo(f"   {apply}")
                click.secho(f"     undone by: {undo}", dim=True)
    sys.exit(1 if refused else 0)


@gpu.group()
def lab() -> None:
    """The rehearsal cluster on this machine."""


def _lab_command(name: str, about: str) -> Callable[..., None]:
    @lab.command(name, help=about)
    @_json
    def command(as_json: bool) -> None:
        from chaosgpu.lab import console

        sys.exit(console.main([name, *(["--json"] if as_json else [])]))

    return command


_lab_command("up", "Bring it up: Prometheus, node_exporter, a two-rank training job, a volume and a network.")
_lab_command("down", "Take all of it away.")
_lab_command("status", "What is there, and how an experiment names it.")
