"""The attack itself: it runs, finds nothing wrong, and would notice."""

import re
import subprocess
import sys
from pathlib import Path

import attack
import pytest

TOOL = Path(attack.__file__)


def test_a_few_seconds_of_attack_find_nothing():
    command = [sys.executable, str(TOOL), "--minutes", "0.1", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"seed 5.*launches \d+\nkinds .*\nwrong headlines 0\nleaks 0\nlongest", done.stdout, re.DOTALL)


@pytest.mark.parametrize(
    ("error", "right"),
    [
        (attack.RankError("rank 1 was killed by SIGTERM"), True),
        (attack.RankError("rank 0 was killed by SIGTERM"), False),
        (attack.RankError("rank 1 was killed by SIGTERM and more"), False),
        (KeyboardInterrupt(), False),
        (None, False),
    ],
)
def test_a_wrong_headline_is_noticed(error, right):
    assert attack._is_right(error, "SIGTERM", attack.KINDS["SIGTERM"][1], 1) is right
