"""``chaosgpu-node``: the node's own command, for transports, for operators with a stuck node, and for sweeps.

Exit status: 0 done, 1 failed, 2 wrong usage, 3 something is stuck (always said in the first line).
"""

import argparse
import json
import os
import sys
from typing import Any, Dict, List, NoReturn, Optional

from chaosgpu import __version__
from chaosgpu.changes.errors import ChaosgpuError
from chaosgpu.node import bundle, client, ledger, places, standby, supervisor
from chaosgpu.node.lock import hold_lock

USAGE, STUCK = 2, 3


def main(argv: Optional[List[str]] = None) -> NoReturn:
    """Run one command and exit. No traceback leaves it: an expected error is one line on stderr."""
    arguments = _parser().parse_args(argv)
    client.warn_if_not_root()
    try:
        status = arguments.run(arguments)
    except ChaosgpuError as error:
        print(f"chaosgpu-node: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    except OSError as error:  # what it was to be written to: all else is told as a ChaosgpuError
        print(f"chaosgpu-node: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chaosgpu-node", description=__doc__.split("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        return command

    def add_json(command: argparse.ArgumentParser) -> None:
        command.add_argument("--json", action="store_true", help="print the answer as JSON")

    listed = add("list", _list, "open faults of this node, and with --recent the closed ones")
    listed.add_argument("--recent", action="store_true")
    add_json(listed)
    reverted = add("revert", _revert, "undo faults now; safe when there are none")
    reverted.add_argument("ids", nargs="*", metavar="ID")
    reverted.add_argument("--run", dest="of_run", metavar="RUN", help="every fault of one experiment run")
    reverted.add_argument("--all", action="store_true", help="every fault of this node")
    add_json(reverted)
    record = add("record", _record, "everything known of one injection, with the shell lines that undo it by hand")
    record.add_argument("id", metavar="ID")
    add_json(record)
    add_json(add("takeover", _takeover, "kill a sick keeper, start a fresh one and let it undo what is due"))
    abandoned = add("abandon", _abandon, "close a stuck injection on your word (break glass)")
    abandoned.add_argument("id", metavar="ID")
    abandoned.add_argument("--reason", required=True)
    add_json(add("sweep", _sweep, "start a keeper if a ledger has open records, for cron and boot; else do nothing"))
    add("request", _request, "one JSON request on stdin, its answer on stdout (what transports call)")
    add("keeper", _keeper, "run as the keeper (started for you)")
    return parser


def _show(arguments: argparse.Namespace, answer: Dict[str, Any], lines: List[str]) -> int:
    """Print an answer, stuck injections first; the exit status."""
    problem = answer.get("error")
    if problem:
        print(f"chaosgpu-node: {problem['message']}", file=sys.stderr)
        return STUCK if problem.get("stuck") else 1
    entries = [*answer.get("faults", []), *answer.get("reverted", [])]
    stuck = [entry for entry in entries if entry.get("state") == "stuck"]
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        for entry in stuck:
            print(f"STUCK {entry['injection']} {entry['fault']}: {'; '.join(entry['stuck'])}")
        for line in lines:
            print(line)
    return STUCK if stuck else 0


def _told(entry: Dict[str, Any]) -> str:
    left = f", {entry['seconds_left']:.0f} s left" if "seconds_left" in entry else ""
    cause = f" ({entry['cause']})" if entry.get("cause") else ""
    details = "; ".join(f"{verdict}: {detail}" for verdict, detail in entry.get("verdicts", {}).values() if detail)
    return f"{entry['injection']} {entry['fault']} {entry['state']}{left}{cause}{' - ' + details if details else ''}"


def _list(arguments: argparse.Namespace) -> int:
    request = {"op": "list", "recent": arguments.recent}
    answer = (client.call(request) if arguments.recent else client.call_if_kept(request)) or {"faults": []}
    return _show(arguments, answer, [_told(entry) for entry in answer.get("faults", [])] or ["no faults"])


def _revert(arguments: argparse.Namespace) -> int:
    if not (arguments.ids or arguments.of_run or arguments.all):
        print("chaosgpu-node: say what to revert: an ID, --run RUN or --all (list shows them)", file=sys.stderr)
        return USAGE
    request = {"op": "revert", "ids": arguments.ids, "run": arguments.of_run}
    answer = client.rescue(request) or {"reverted": []}
    return _show(arguments, answer, [_told(entry) for entry in answer.get("reverted", [])] or ["nothing to revert"])


def _record(arguments: argparse.Namespace) -> int:
    answer = client.call({"op": "record", "id": arguments.id})
    if "error" in answer or arguments.json:
        return _show(arguments, answer, [])
    lines = answer["record"]
    planned = lines[0]
    whole = planned.get("line") == "planned"
    if whole:
        print(f"{planned['id']} {planned['fault']} {json.dumps(planned['arguments'])}")
    else:
        print(f"record {arguments.id}: its first line is damaged; this is what is left of it")
    for line in lines[1 if whole else 0 :]:
        print(f"  {json.dumps(line)}")
    closed = lines[-1].get("line") == "closed"
    print("it is closed; it would have been undone by hand so:" if closed else "undo by hand, in this order:")
    for undo in ledger.undo_lines(lines) or ["# no line that tells how is left"]:
        print(f"  {undo}")
    return 0 if whole else 1


def _takeover(arguments: argparse.Namespace) -> int:
    answer = client.takeover()
    killed = f"killed keeper {answer['killed']}" if answer["killed"] else "no keeper was running"
    return _show(arguments, answer, [killed, *(_told(entry) for entry in answer["faults"])])


def _abandon(arguments: argparse.Namespace) -> int:
    arguments.json = False
    answer = client.call({"op": "abandon", "id": arguments.id, "reason": arguments.reason})
    return _show(arguments, answer, [f"abandoned {arguments.id}"])


def _sweep(arguments: argparse.Namespace) -> int:
    answer = client.call_if_kept({"op": "list"}) or {"faults": []}
    return _show(arguments, answer, [_told(entry) for entry in answer.get("faults", [])] or ["no faults"])


def _request(_: argparse.Namespace) -> int:
    print(json.dumps(client.call_text(sys.stdin.read())))
    return 0


def _running_bundle() -> str:
    path = os.path.abspath(sys.argv[0])
    return path if path.endswith(".pyz") else bundle.install()


def _keeper(_: argparse.Namespace) -> int:
    os.umask(0o077)
    places.private_dir(places.run_dir())
    if not hold_lock():
        return 0  # another was faster: there is a keeper
    os.chdir("/")
    supervisor.protect()
    standby.keep(_running_bundle())
    return 0


if __name__ == "__main__":
    main()
