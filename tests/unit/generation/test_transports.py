"""The broadcast of weights, over gloo; NCCL differs in its backend alone. CUDA IPC runs in tests/gpu/."""

import inspect
import socket
import threading
from datetime import timedelta

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from nemo_rl_mcore.generation.vllm.buckets import Bucket, Packer
from nemo_rl_mcore.generation.vllm.transports import (
    BroadcastReceiver,
    BroadcastSender,
    CudaIpcReceiver,
    CudaIpcSender,
    join_broadcast_group,
)

CPU = torch.device("cpu")


def test_engines_outside_the_trainers_group_get_what_its_first_rank_broadcasts():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    groups, received = {}, {}

    def join(rank):
        groups[rank] = join_broadcast_group("127.0.0.1", port, rank, 3, timedelta(seconds=60), "cpu")

    in_threads(join, range(3))
    sender = BroadcastSender(1 << 10, CPU, groups[0])
    tensor = torch.randn(7, 5)
    packers = [Packer(slot) for slot in sender.slots]
    for slot, shift in ((0, 0.0), (1, 1.0), (0, 2.0)):
        packers[slot].clear()
        packers[slot].add("weight", tensor + shift)
        used = packers[slot].used
        message = Bucket(sender.locate(slot, used), tuple(packers[slot].tensors)).to_message()

        def take_part(rank, slot=slot, used=used, message=message):
            if rank == 0:
                sender.transmit(slot, used)
            else:
                bucket = Bucket.from_message(message)
                received[rank] = dict(bucket.read(BroadcastReceiver(CPU, groups[rank]).open(bucket.location)))

        in_threads(take_part, range(3))
        assert [torch.equal(received[rank]["weight"], tensor + shift) for rank in (1, 2)] == [True, True]
    sender.close()


def in_threads(function, ranks):
    threads = [threading.Thread(target=function, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_torch_names_device_and_counter_of_a_shared_tensor_where_we_read_them():
    names = [*inspect.signature(rebuild_cuda_tensor).parameters]
    assert names[CudaIpcReceiver._DEVICE_INDEX] == "storage_device"
    assert names[CudaIpcSender._COUNTER] == ["ref_counter_handle", "ref_counter_offset"]
