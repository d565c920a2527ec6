"""``chaos gpu ...``: what is broken now, undo it, what could be broken, what an experiment would do, the lab.

Tables and colours on a terminal, plain lines in a pipe (tab-separated where they are a table), ``--json`` everywhere.
An injection whose undo is stuck is the first line of every command (on stderr with ``--json``), and makes the exit
status 3; else it is 1 for an error, which is one line.
"""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

STUCK = 3


@click.group()
def gpu() -> None:
    """Faults on GPU clusters: real, proven, bounded and always undone."""
    from chaosgpu.node import client

    client.warn_if_not_root()


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@gpu.command()
@click.option("--recent", is_flag=True, help="The closed ones too.")
@_json
def faults(recent: bool, as_json: bool) -> None:
    """Faults that are in place, with the time they have left."""
    from chaosgpu.fleet import ask

    _respond(as_json, lambda: ask.faults(recent=recent), lambda entries: _show_faults(entries, "no faults"))


@gpu.command()
@click.argument("injection", required=False)
@click.option("--run", is_flag=False, flag_value="newest", help="Those of one run; without a value, of the newest.")
@click.option("--all", "everything", is_flag=True, help="Every fault there is.")
@_json
def revert(injection: str | None, run: str | None, everything: bool, as_json: bool) -> None:
    """Undo faults now: one by its id, those of a run, or all. Safe when there are none."""
    from chaosgpu.changes.errors import BadArgument
    from chaosgpu.fleet import ask, runs

    def reverted() -> list[dict[str, Any]]:
        if sum((injection is not None, run is not None, everything)) != 1:
            raise BadArgument(
                "say what to revert: an injection's id, --run [RUN] or --all (chaos gpu faults lists them)"
            )
        return ask.revert([injection] if injection is not None else None, runs.newest() if run == "newest" else run)

    _respond(as_json, reverted, lambda entries: _show_faults(entries, "nothing to revert"))


@gpu.command()
@click.argument("injection")
@_json
def record(injection: str, as_json: bool) -> None:
    """Everything known of one injection, with the shell lines that undo it by hand."""
    from chaosgpu.fleet import ask

    _respond(as_json, lambda: ask.record(injection), _show_record)


@gpu.command()
@_json
def catalogue(as_json: bool) -> None:
    """Every fault with its declaration: what it does, certifies, needs, and how it ends."""
    _respond(as_json, _catalogue, _show_catalogue)


@gpu.command()
@click.argument("experiment")
@click.option("--var", multiple=True, metavar="KEY[:TYPE]=VALUE", help="As for chaos run.")
@click.option("--var-file", multiple=True, type=click.Path(exists=True, dir_okay=False), help="As for chaos run.")
@_json
@click.pass_context
def plan(
    context: click.Context, experiment: str, var: tuple[str, ...], var_file: tuple[str, ...], as_json: bool
) -> None:
    """What every fault of an experiment would change, and why a node would refuse. Nothing is touched.

    EXPERIMENT is a file or a URL, as for chaos run. The exit status is 1 where a fault would be refused.
    """

    def planned() -> list[dict[str, Any]]:
        from chaosgpu.fleet import plans

        settings = (context.obj or {}).get("settings_path")
        return plans.plan(experiment, var, var_file, **({"settings": settings} if settings else {}))

    _respond(as_json, planned, _show_plan, lambda steps: int(any("refused" in step for step in steps)))


@gpu.group()
def lab() -> None:
    """The rehearsal cluster on this machine."""


def _lab_command(name: str, about: str) -> None:
    @lab.command(name, help=about)
    @_json
    def command(as_json: bool) -> None:
        from chaosgpu.lab import console

        stuck = _tell_stuck(as_json)
        status = console.main([name, *(["--json"] if as_json else [])])
        sys.exit(STUCK if stuck else status)


_lab_command("up", "Bring it up: Prometheus, node_exporter, a two-rank training job, a volume and a network.")
_lab_command("down", "Take all of it away.")
_lab_command("status", "What is there, and how an experiment names it.")


# --- answers


def _respond(
    as_json: bool, ask: Callable[[], Any], show: Callable[[Any], None], status: Callable[[Any], int] = lambda _: 0
) -> NoReturn:
    """Ask, say first what is stuck, then show the answer as JSON or for people, and exit."""
    from chaosgpu.changes.errors import ChaosgpuError, Unreachable

    try:
        answer = ask()
    except ChaosgpuError as error:
        stuck = not isinstance(error, Unreachable) and _tell_stuck(as_json)
        click.echo(f"chaos gpu: {error}", err=True)
        sys.exit(STUCK if stuck else 1)
    stuck = _tell_stuck(as_json)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(answer)
    sys.exit(STUCK if stuck else status(answer))


def _tell_stuck(as_json: bool) -> bool:
    """Name every injection whose undo is stuck; whether there is one."""
    from chaosgpu.changes.errors import ChaosgpuError
    from chaosgpu.fleet import ask

    try:
        stuck = ask.stuck()
    except ChaosgpuError:
        return False  # the keeper cannot be asked: a command that talks to it has failed with that
    for entry in stuck:
        line = f"STUCK {entry['injection']} {entry['fault']} on {entry['node']}: {'; '.join(entry['stuck'])}"
        click.secho(line, fg="red", bold=True, err=as_json)
    return bool(stuck)


_COLOURS = {"stuck": "bold red", "active": "yellow", "closed": "green"}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: drawn on a terminal, tab-separated in a pipe."""
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, _COLOURS.get(cell, "")) for cell in row))
    Console().print(table)


def _show_faults(entries: list[dict[str, Any]], empty: str) -> None:
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
    if rows:
        _table(("node", "injection", "fault", "state", "left", "ended by", "verdicts"), rows)
    else:
        click.echo(empty)


def _verdicts(entry: dict[str, Any]) -> str:
    """Such as ``2 restored, 1 superseded: CPU affinity of 71 was set by someone else; ended early``."""
    verdicts = list(entry.get("verdicts", {}).values())
    words = [verdict for verdict, _ in verdicts]
    told = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    details = "; ".join(detail for _, detail in verdicts if detail)
    early = "; ended early" if entry.get("ended_early") else ""
    return f"{told}{': ' + details if details else ''}{early}"


def _show_record(lines: list[dict[str, Any]]) -> None:
    planned = lines[0] if lines[0].get("line") == "planned" else None
    if planned:
        click.secho(f"{planned['id']} {planned['fault']} {json.dumps(planned['arguments'])}", bold=True)
    else:
        click.echo("its first line is damaged; this is what is left of it")
    for line in lines[1 if planned else 0 :]:
        click.echo(f"  {json.dumps(line)}")
    from chaosgpu.node.ledger import undo_lines

    closed = lines[-1].get("line") == "closed"
    click.echo("it is closed; it would have been undone by hand so:" if closed else "undo by hand, in this order:")
    for undo in undo_lines(lines) or ["# no line that tells how is left"]:
        click.echo(f"  {undo}")


def _show_plan(steps: list[dict[str, Any]]) -> None:
    if not steps:
        click.echo("this experiment has no chaosgpu fault")
    for number, step in enumerate(steps, 1):
        refused = "refused" in step
        where = f" on {step['node']}" if "node" in step else ""
        head = f"{number}. {step['activity']}: {step.get('fault', step['action'])}{where} for {step['duration']}: "
        click.secho(head, bold=True, nl=False)
        click.secho("refused" if refused else "would run", fg="red" if refused else "green", bold=True)
        for line in [*([step["refused"]] if refused else []), *step.get("warnings", [])]:
            click.secho(f"   ! {line}", fg="red" if refused else "yellow")
        for change in step.get("would_change", []):
            values = f": {_value(change['from'])} -> {_value(change['to'])}" if "from" in change else ""
            click.echo(f"   {change['what']}{values}")
            click.secho(f"     by hand    {change['by_hand']}", dim=True)
            click.secho(f"     undone by  {change['undo_by_hand']}", dim=True)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _catalogue() -> list[dict[str, Any]]:
    import dataclasses
    import inspect

    from chaosgpu import actions
    from chaosgpu.faults.base import CATALOGUE

    told = []
    for name, fault in sorted(CATALOGUE.items()):
        action = getattr(actions, name.partition(".")[2])
        arguments = inspect.signature(action).parameters
        told.append(
            {
                "name": name,
                "action": f"chaosgpu.actions.{action.__name__}",
                "parameters": {
                    field.name: {
                        "type": str(getattr(arguments[field.name].annotation, "__name__", "any")),
                        "doc": field.metadata["doc"],
                        **({"default": field.default} if field.default is not dataclasses.MISSING else {}),
                    }
                    for field in dataclasses.fields(fault)
                },
                **dataclasses.asdict(fault.declaration),
            }
        )
    return told


def _show_catalogue(documents: list[dict[str, Any]]) -> None:
    if not sys.stdout.isatty():
        words = ("name", "summary", "reversible", "takes_effect", "danger", "needs", "certifies", "does_not_certify")
        _table(words, [[_words(document[word]) for word in words] for document in documents])
        return
    for document in documents:
        click.secho(document["name"], bold=True, nl=False)
        click.echo(f"  {document['summary']}")
        parameters = [
            f"[{name}]" if "default" in parameter else name for name, parameter in document["parameters"].items()
        ]
        facts = {
            "arguments": " ".join(parameters),
            "certifies": document["certifies"],
            "but not": document["does_not_certify"],
            "undone": f"{document['reversible']}; takes effect {document['takes_effect']}; danger {document['danger']}",
            "left behind": document["residue"] if document["residue"] != "none" else "",
            "needs": _words(document["needs"]),
            "opt-outs": _words(document["opt_outs"]),
            "shown by": _words(document["metrics"]),
            "seen on": _words(document["seen_on"]),
        }
        for word, fact in facts.items():
            if fact:
                _wrapped(word, fact)
        click.echo()


def _words(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(value)


def _wrapped(word: str, fact: str) -> None:
    width = max(40, min(120, shutil.get_terminal_size().columns))
    click.echo(click.wrap_text(fact, width, f"  {word:<12}", " " * 14))
