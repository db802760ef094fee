"""Ranks meet and end on unusual machines, and whatever the parent's environment says."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_helpers import RankError, launch

STALE = {
    "RANK": "7",
    "LOCAL_RANK": "7",
    "WORLD_SIZE": "9",
    "MASTER_ADDR": "bogus.invalid",
    "MASTER_PORT": "1",
    "GLOO_SOCKET_IFNAME": "nope0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "3",
}


def sum_of_ones(rank, fails):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    assert not fails
    return total.item()


def test_a_stale_environment_changes_nothing_and_stays(monkeypatch):
    for name, value in STALE.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert launch(sum_of_ones, (False,)) == [2.0, 2.0]
    assert dict(os.environ) == before
    with pytest.raises(RankError, match="rank 0 raised AssertionError"):
        launch(sum_of_ones, (True,))
    assert dict(os.environ) == before


def test_an_occupied_default_port_does_not_matter_and_an_occupied_own_port_is_named(live):
    live.execute("os.environ.pop('own', None)")
    with contextlib.closing(socket.socket()) as taken, contextlib.closing(socket.socket()) as default:
        with contextlib.suppress(OSError):
            default.bind(("127.0.0.1", 29500))
            default.listen()
        live.execute("dist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()")
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RankError, match=r"^rank 0 raised DistNetworkError in cell 2, line \d+: .*EADDRINUSE"):
            live.execute(
                f"if rank == 0:\n    dist.init_process_group('gloo', init_method='{url}', rank=rank, world_size=2)",
                "cell 2",
            )


PROGRAM = """
import os, sys
from ddp_helpers import launch
def work(rank):
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader
    dist.init_process_group("gloo")
    total = sum(batch.sum() for batch in DataLoader(torch.arange(8.0), num_workers=int(sys.argv[1]))).reshape(1)
    dist.all_reduce(total)
    return total.item(), os.environ["HOME"]
if __name__ == "__main__":
    print(launch(work, nprocs=3))
"""

MACHINES = {
    "a home with a space": [],
    "a host name that does not resolve": ["--uts", "hostname nowhere.invalid"],
    "little shared memory": ["--mount", "mount -t tmpfs -o size=64k tmpfs /dev/shm"],
    "no network": ["--net", "ip link set lo up || ifconfig lo up"],
    "no IPv6": ["--net", "(ip link set lo up || ifconfig lo up) && echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"],
}


@pytest.mark.parametrize("machine", MACHINES)
def test_ranks_work_on_a_machine_with(machine, tmp_path):
    home = tmp_path / "a home"
    home.mkdir()
    program = home / "program.py"
    program.write_text(PROGRAM)
    workers = "0" if machine == "little shared memory" else "1"
    command = [sys.executable, str(program), workers]
    if MACHINES[machine]:
        kind, prepare = MACHINES[machine]
        start = ["unshare", kind, "sh", "-c", f'({prepare}) && exec "$@"', "sh"]
        if not shutil.which("unshare") or subprocess.run([*start, "true"], capture_output=True).returncode:
            pytest.skip(f"needs root and unshare {kind}")
        command = start + command
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": root}
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=200)
    about_names = "[c10d] The hostname of the client socket cannot be retrieved"  # torch's own, harmless
    assert [line for line in done.stderr.splitlines() if about_names not in line] == []
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == str([(84.0, str(home))] * 3)
