"""The digest of a tensor: what its words add up to, in blocks of any cut, and which faults it finds."""

import inspect
import math
import threading
from dataclasses import replace
from datetime import timedelta

import msgpack
import pytest
import torch
from refusals import assert_holds
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from nemo_rl_mcore.engine.receivers import Receiver
from nemo_rl_mcore.rank.refit import digests as digests_module
from nemo_rl_mcore.rank.refit.digests import (
    HeldBlock,
    IncompleteRefitError,
    block_sum,
    digests,
    joined,
    require_as_sent,
    sealed,
)
from nemo_rl_mcore.rank.refit.transports import (
    Bucket,
    IpcHandle,
    Packer,
    SendingEnd,
    broadcast_from_first,
    join_broadcast_group,
)
from nemo_rl_mcore.rank.rendezvous import listen_at


def digest(tensor, dtype=None):
    """Of one tensor, cast to a dtype first."""
    return sealed(int(block_sum(tensor, dtype=dtype)), dtype or tensor.dtype, tensor.shape)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
SHAPES = [(), (1,), (7,), (5, 3), (3, 5), (2, 3, 4), (0, 4), (4, 0), (1, 300)]


def sample(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


def by_definition(tensor):
    """In Python's integers, word by word."""
    columns = tensor.shape[-1] if tensor.ndim > 1 else 1
    entry = tensor.element_size()
    octets = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    size = min(entry, 4)
    words = [int.from_bytes(octets[i : i + size], "little", signed=True) for i in range(0, len(octets), size)]
    per_row = columns * entry // size
    total = sum(
        weight(digests_module._ROWS, i // per_row) * weight(digests_module._COLUMNS, i % per_row) * word
        for i, word in enumerate(words)
    )
    return sealed(total, tensor.dtype, tensor.shape)


def weight(seed, position):
    """SplitMix64."""
    mask = (1 << 64) - 1
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31) | 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_digest_is_what_its_definition_says_however_it_is_computed(dtype, monkeypatch):
    for shape in SHAPES:
        tensor = sample(shape, dtype)
        expected = by_definition(tensor)
        assert digest(tensor) == expected
        if tensor.ndim == 2:
            assert digest(tensor.t().contiguous().t()) == expected, "the strides do not matter"
        with monkeypatch.context() as chunks:
            chunks.setitem(digests_module._WORDS_AT_A_TIME, "cpu", 4)
            assert digest(tensor) == expected


def test_bits_count_and_not_values():
    for one, other in [(0.0, -0.0), (1.0, math.nextafter(1.0, 2.0))]:
        assert digest(torch.tensor([one], dtype=torch.float64)) != digest(
            torch.tensor([other], dtype=torch.float64)
        )
    nan = torch.tensor([float("nan")])
    assert digest(nan) == digest(nan.clone())
    assert digest(nan) != digest((nan.view(torch.int32) + 1).view(torch.float32))


def test_dtype_and_shape_count():
    zeros = [torch.zeros(shape, dtype=dtype) for shape in SHAPES for dtype in DTYPES]
    assert len({digest(tensor) for tensor in zeros}) == len(zeros)


def test_a_digest_of_another_dtype_is_that_of_the_tensor_cast():
    tensor = sample((40, 30), torch.float32)
    assert digest(tensor, torch.bfloat16) == digest(tensor.to(torch.bfloat16)) != digest(tensor)
    assert digest(tensor.bfloat16(), torch.float32) == digest(tensor.bfloat16().float())


def faults(tensor):
    """Names and what becomes of a matrix of at least 8 x 8."""
    flat = tensor.reshape(-1)
    for bit in range(8 * tensor.element_size()):
        octets = flat.clone().view(torch.uint8)
        octets[5 * tensor.element_size() + bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", octets.view(tensor.dtype).view(tensor.shape)
    rows, columns = tensor.shape
    yield "rows swapped", tensor[[1, 0, *range(2, rows)]]
    yield "columns swapped", tensor[:, [1, 0, *range(2, columns)]]
    yield "halves swapped", torch.cat([tensor[rows // 2 :], tensor[: rows // 2]])
    yield "shifted by a row", tensor.roll(1, 0)
    yield "shifted by an entry", flat.roll(1).view(tensor.shape)
    yield "all signs", -tensor
    yield "the signs of two rows", torch.cat([-tensor[:2], tensor[2:]])
    yield "half written", torch.cat([tensor[: rows // 2], torch.zeros_like(tensor[rows // 2 :])])
    yield "transposed", tensor[:8, :8].t() if rows == columns == 8 else tensor.t().reshape(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (64, 24)])
def test_whatever_befalls_a_tensor_has_a_digest_of_its_own(dtype, shape):
    tensor = sample(shape, dtype)
    found = {"none": digest(tensor)} | {name: digest(wrong) for name, wrong in faults(tensor)}
    assert len({*found.values()}) == len(found)


def block(tensor, rows, columns, name="weight"):
    """Of a matrix: what a process holds of it."""
    part = tensor[rows, columns]
    corner = rows.start, columns.start
    total = int(block_sum(part, first_row=corner[0], first_column=corner[1]))
    return HeldBlock(
        name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), corner, tuple(part.shape), total
    )


ALL = slice(0, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_blocks_of_any_cut_add_up_to_the_tensor_and_copies_count_once(dtype):
    tensor = sample((12, 12), dtype)
    cuts = {
        "rows": [block(tensor, slice(0, 5), ALL), block(tensor, slice(5, 12), ALL)],
        "columns": [block(tensor, ALL, slice(i, i + 3)) for i in range(0, 12, 3)],
        "both": [block(tensor, slice(i, i + 6), slice(j, j + 4)) for i in (0, 6) for j in (0, 4, 8)],
        "copies": [block(tensor, ALL, ALL)] * 3,
        "copies of shards": [block(tensor, slice(i, i + 6), ALL) for i in (0, 0, 6, 6)],
    }
    for cut in cuts.values():
        assert joined([[held] for held in cut]) == {"weight": digest(tensor)}


def test_copies_that_differ_and_parts_that_are_nowhere_are_no_tensor():
    tensor, other = sample((12, 12), torch.float32), sample((12, 12), torch.float32, seed=1)
    upper, lower = block(tensor, slice(0, 6), ALL), block(tensor, slice(6, 12), ALL)
    wrong = [
        [upper, upper],
        [upper, lower, block(other, slice(6, 12), ALL)],
        [block(tensor, ALL, ALL), block(tensor.double(), ALL, ALL)],
        [upper, block(other[:, :6], slice(6, 12), slice(0, 6))],
    ]
    for blocks in wrong:
        with pytest.raises(IncompleteRefitError, match=r"1 .* 1 .*: weight"):
            require_as_sent({"weight": digest(tensor)}, joined([blocks]))


def test_what_is_wrong_is_said_by_name():
    sent = digests((f"weight.{i}", sample((3,), torch.float32, i)) for i in range(30))
    require_as_sent(sent, dict(reversed(sent.items())))
    require_as_sent(sent, dict.fromkeys(sent))
    held = {name: number for name, number in sent.items() if name != "weight.7"} | {
        "weight.3": 0, "weight.4": 0, "bias": 0,
    }  # fmt: skip
    with pytest.raises(IncompleteRefitError) as caught:
        require_as_sent(sent, held, unwritten=["lm_head"], unreadable=["experts (fused)"])
    tensors = [part.partition(": ")[2] for part in str(caught.value).split("; ")]
    tensors[-1] = tensors[-1].rpartition(": ")[2]
    assert tensors == ["weight.3, weight.4", "weight.7", "bias", "lm_head", "experts (fused)"]
    assert_holds(str(caught.value), 30, 2, "(policy.generation.verify_refit: false")
    with pytest.raises(IncompleteRefitError, match=r"30 .*weight.0, .* 10 more$"):
        require_as_sent(sent, {})


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
