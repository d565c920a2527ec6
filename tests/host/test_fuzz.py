"""A sample of tests/tools/fuzz.py, with a seed of the day so that the sample wanders."""

import datetime
import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parents[1] / "tools" / "fuzz.py"


def test_any_argument_is_refused_in_one_line_or_planned():
    seed = datetime.date.today().strftime("%Y%m%d")
    done = subprocess.run(
        [sys.executable, str(FUZZ), "--cases", "2000", "--seed", seed], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-2000:]}"
    assert "nothing touched" in done.stdout
