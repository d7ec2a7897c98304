"""Where ranks meet: on one interface, however late one of them is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.rank.rendezvous import listen_at

ROOT = Path(__file__).parents[3]
LATE_S = 2.0
MEET = f"""
import os, sys, time
import torch, torch.distributed as dist
from nemo_rl_mcore.rank import rendezvous
from listening import listening_addresses

rank = int(os.environ["RANK"])
time.sleep({LATE_S} * rank)
rendezvous.join()
rendezvous.join()  # nothing more to do
group = dist.new_group()
everyone = torch.tensor([rank + 1])
dist.all_reduce(everyone, group=group)
dist.barrier(rendezvous.patient_group)
print(int(everyone), *listening_addresses())
dist.barrier()
rendezvous.leave()
assert not dist.is_initialized()
"""


def met(*, brings_a_socket):
    """What two ranks print; the first has the socket from its parent, or binds it itself."""
    listening = listen_at("127.0.0.1")
    port = listening.getsockname()[1]
    if not brings_a_socket:
        listening.close()
    named = {"MASTER_LISTEN_FD": str(listening.fileno())} if brings_a_socket else {}
    environment = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET],
            env=environment | {"RANK": str(rank)} | ({} if rank else named),
            pass_fds=[] if rank or not brings_a_socket else [listening.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    listening.close()
    try:
        return [rank.communicate(timeout=90)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("brings_a_socket", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.stage("processes")
def test_ranks_meet_on_the_loopback_interface_alone_also_when_one_is_late(brings_a_socket):
    for total, *addresses in met(brings_a_socket=brings_a_socket):
        assert total == "3"
        assert addresses, "gloo listens"
        assert set(addresses) == {"127.0.0.1"}


def test_an_address_of_another_machine_is_named():
    with pytest.raises(RunStoppedError, match=r"cannot listen at MASTER_ADDR=192\.0\.2\.7, port 4711"):
        listen_at("192.0.2.7", 4711)
