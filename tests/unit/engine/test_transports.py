"""The broadcast of weights, over gloo; NCCL differs in its backend alone. CUDA IPC runs in tests/gpu/."""

import inspect
import threading
from dataclasses import replace
from datetime import timedelta

import msgpack
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from nemo_rl_mcore.engine.receivers import Receiver
from nemo_rl_mcore.rank.refit.transports import (
    Bucket,
    IpcHandle,
    Packer,
    SendingEnd,
    broadcast_from_first,
    join_broadcast_group,
)
from nemo_rl_mcore.rank.rendezvous import listen_at

CPU = torch.device("cpu")


def test_engines_outside_the_trainers_group_get_what_its_first_rank_broadcasts():
    listening = listen_at("127.0.0.1")
    port = listening.getsockname()[1]
    groups, received = {}, {}

    def join(rank):
        groups[rank] = join_broadcast_group(
            "127.0.0.1", port, rank, 3, timedelta(seconds=60), "cpu", None if rank else listening
        )

    in_threads(join, range(3))
    sender = SendingEnd(1 << 10, CPU, groups[0])
    tensor = torch.randn(7, 5)
    packers = [Packer(slot) for slot in sender.slots]
    for slot, shift in ((0, 0.0), (1, 1.0), (0, 2.0)):
        packers[slot] = Packer(sender.slots[slot])
        packers[slot].add("weight", tensor + shift)
        used = packers[slot].used
        message = Bucket(sender.locate(slot, used), tuple(packers[slot].tensors)).to_message()

        def take_part(rank, slot=slot, used=used, message=message):
            if rank == 0:
                broadcast_from_first(sender.slots[slot][:used], sender.group)
            else:
                bucket = Bucket.from_message(message)
                received[rank] = dict(bucket.read(Receiver(CPU, groups[rank]).open(bucket.location)))

        in_threads(take_part, range(3))
        assert [torch.equal(received[rank]["weight"], tensor + shift) for rank in (1, 2)] == [True, True]
    sender.close()


def in_threads(function, ranks):
    threads = [threading.Thread(target=function, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


HANDLE = IpcHandle(
    tensor_size=64, tensor_offset=0, storage_handle=b"h" * 66, storage_size_bytes=64, storage_offset_bytes=512,
    ref_counter_handle=b"/torch_1_2_3", ref_counter_offset=4, event_handle=b"", event_sync_required=False,
)  # fmt: skip


def test_a_handle_of_gpu_memory_is_what_torch_opens_a_tensor_by():
    """Every argument of torch's is a field, or given where the handle is opened."""
    given = {"tensor_cls", "tensor_stride", "storage_cls", "dtype", "storage_device", "requires_grad"}
    assert {*HANDLE.to_message()} | given == {*inspect.signature(rebuild_cuda_tensor).parameters}


def test_a_handle_of_gpu_memory_travels_in_plain_types():
    message = msgpack.unpackb(msgpack.packb(HANDLE.to_message()))
    # Receivers are not counted: torch's counter is unsigned, and below zero it would keep the memory for ever.
    assert IpcHandle(**message) == replace(HANDLE, ref_counter_handle=b"/uncounted")
