"""Print what came of a test run: each tier's counts, why something was skipped, the coverage, and one closing line.

``summary.py RUN COVERAGE``: RUN is the directory that tests/run filled: ``tiers`` with a line for each tier (name, exit
status, seconds, reason why it could not run), pytest's JUnit files ``TIER.xml`` and ``TIER-*.xml``, and the data files
of coverage. The table of covered lines goes to the file COVERAGE. The exit status is 1 when anything failed.
"""

import collections
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ALLOWED_SKIPS: tuple[str, ...] = ()  # regular expressions: reasons for which CI lets a test be skipped

NO_TESTS = 5  # pytest's exit status where it found none


@dataclass
class Tier:
    name: str
    seconds: int
    passed: int = 0
    failed: int = 0
    skipped: list[str] = field(default_factory=list)
    trouble: str = ""


def read(run: Path, line: str) -> Tier:
    name, status, seconds, reason = line.split("\t")
    tier = Tier(name, int(seconds), trouble=reason)
    for file in [run / f"{name}.xml", *run.glob(f"{name}-*.xml")]:
        for case in ElementTree.parse(file).iter("testcase") if file.exists() else ():
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                tier.failed += 1
            elif skip is not None:
                tier.skipped.append(skip.get("message", ""))
            else:
                tier.passed += 1
    if not reason and not tier.failed and int(status) == NO_TESTS:
        tier.trouble = "no test was found"
    elif not reason and not tier.failed and int(status) != 0:
        tier.trouble = f"it ended with exit status {status}" + (
            ", by its time limit" if status in ("124", "137") else ""
        )
        tier.failed += 1
    return tier


def coverage(run: Path, table: Path) -> str:
    def tool(command: str) -> str:
        argv = [sys.executable, "-m", "coverage", command, f"--rcfile={run}/coverage.toml"]
        done = subprocess.run(argv, cwd=Path(__file__).parents[2], check=False, capture_output=True, text=True)
        return done.stdout + done.stderr

    tool("combine")
    report = tool("report")
    total = re.search(r"^TOTAL.*\s(\d+%)$", report, re.MULTILINE)
    if not total:
        return f"coverage: not measured: {report.strip()[-200:]}"
    table.write_text(report)
    return f"coverage of chaosgpu, lines and branches, subprocesses included: {total[1]}; lines not covered: {table}"


def main() -> int:
    run, table = map(Path, sys.argv[1:])
    strict = os.environ.get("CI") == "true"
    tiers = [read(run, line) for line in (run / "tiers").read_text().splitlines()]
    print(f"\n{'tier':<10}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}")
    for tier in tiers:
        print(f"{tier.name:<10}{tier.passed:>8}{tier.failed:>8}{len(tier.skipped):>8}{tier.seconds:>9}  {tier.trouble}")
    for tier in tiers:
        for reason, count in collections.Counter(tier.skipped).items():
            print(f"{tier.name}: {count} skipped: {reason}")
    print(coverage(run, table))
    passed = sum(tier.passed for tier in tiers)
    failed = sum(tier.failed for tier in tiers)
    if strict:
        failed += sum(1 for tier in tiers if tier.trouble and not tier.failed)
        failed += sum(
            1
            for tier in tiers
            for reason in tier.skipped
            if not any(re.search(allowed, reason) for allowed in ALLOWED_SKIPS)
        )
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
