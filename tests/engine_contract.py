"""What every engine keeps to, see `generation.engine.Engine`; asserted of whichever is given."""

import asyncio
import inspect
from dataclasses import replace

import numpy as np
import pytest

from nemo_rl_mcore.data.batched_data_dict import digest_of_ids
from nemo_rl_mcore.engine.engine import GenerationCancelledError, Sampling, WrongWeightsError
from nemo_rl_mcore.rank.refit.digests import IncompleteRefitError, digests
from nemo_rl_mcore.rank.refit.transports import Bucket, MessageSender, Packer, SharedMemorySender

TOKENS = 8


async def told(answer):
    return await answer if inspect.isawaitable(answer) else answer


def messages(tensors, sender):
    """The tensors in buckets, one after the other in the same slot: the engine has loaded one before the next comes."""
    packer = Packer(sender.slots[0])
    for name, tensor in tensors:
        if not packer.add(name, tensor):
            yield Bucket(sender.locate(0, packer.used), packer.tensors).to_message()
            packer = Packer(sender.slots[0])
            assert packer.add(name, tensor)
    yield Bucket(sender.locate(0, packer.used), packer.tensors).to_message()


async def load(engine, tensors, version, *, sender=SharedMemorySender, sent=None, bucket_bytes=40_000):
    """sent: what the engine is told at the end, if it is not these tensors."""
    sending = sender(bucket_bytes)
    await told(engine.begin_refit(version))
    for message in messages(tensors, sending):
        await told(engine.load_bucket(message))
    acknowledged = await told(engine.finish_refit(version, sent or digests(tensors)))
    sending.close()
    assert acknowledged == version


async def refused(engine, requests, version, held):
    with pytest.raises(WrongWeightsError, match=f"the engine's are of {held}"):
        await told(engine.generate(requests, Sampling(TOKENS), version))


async def keeps_to_the_contract(engine, old, new, requests, *, overlaps, sleeps):
    """old, new: named tensors of two models. overlaps: calls do. sleeps: the engine can give its memory back."""
    sampling = Sampling(TOKENS)

    async def answers(asked, version, sampling=sampling):
        return await told(engine.generate(asked, sampling, version))

    await told(engine.health())
    await refused(engine, requests, 0, "no version")
    prompts = [list(request.prompt) for request in requests]
    with pytest.raises(WrongWeightsError):
        await told(engine.next_logprobs(prompts, 1.0))

    await load(engine, old, 0)
    first = await answers(requests, 0)
    assert [len(answer.tokens) for answer in first] == [TOKENS] * len(requests)
    for answer in first:
        assert len(answer.logprobs) == TOKENS
        assert max(answer.logprobs) <= 0
        assert (answer.versions, answer.finished) == ([0] * TOKENS, False)
        assert answer.digest == digest_of_ids(answer.tokens)
    alone = [(await answers([request], 0))[0].tokens for request in requests]
    assert alone == [answer.tokens for answer in first], "who else asks does not matter"
    reseeded = [replace(request, seed=request.seed + 1000) for request in requests]
    assert [answer.tokens for answer in await answers(reseeded, 0)] != alone

    _are_distributions(
        await told(engine.next_logprobs(prompts, 1.0)), await told(engine.next_logprobs(prompts, 2.0)), first
    )
    again = await answers(requests, 0)
    assert [answer.tokens for answer in again] == alone, "it changes nothing"

    stop = first[0].tokens[2]
    [stopped] = await answers(requests[:1], 0, replace(sampling, stop_ids=(stop,)))
    assert stopped.finished
    assert stopped.tokens == first[0].tokens[: first[0].tokens.index(stop) + 1], (
        "the stop token belongs to it"
    )

    await refused(engine, requests, 1, "0")
    with pytest.raises(WrongWeightsError, match="not newer"):
        await told(engine.begin_refit(0))
    assert [answer.tokens for answer in await answers(requests, None)] == alone, "a refusal changes nothing"

    half = SharedMemorySender(40_000)
    await told(engine.begin_refit(1))
    await told(engine.load_bucket(next(iter(messages(new, half)))))
    for version in (0, 1):
        await refused(engine, requests, version, "no version")
    half.close()
    of_both = digests(old), digests(new)
    name = next(name for name in of_both[1] if of_both[0][name] != of_both[1][name])
    for told_of, complaint in (
        (of_both[1] | {"one.more": 1}, "sent and not found: one.more"),
        (dict.fromkeys([*of_both[1], "one.more"]), "sent and not found: one.more"),
        ({key: of_both[1][key] for key in of_both[1] if key != name}, f"there and not sent: {name}"),
        (of_both[1] | {name: of_both[0][name]}, f"1 not as they were sent: {name}"),
    ):
        with pytest.raises(IncompleteRefitError, match=complaint):
            await load(engine, new, 1, sent=told_of)
        await refused(engine, requests, 1, "no version")

    await load(engine, new, 1, sent=dict.fromkeys(of_both[1]))
    await load(engine, new, 2, sender=MessageSender)
    second = await answers(requests, 2)
    assert [answer.versions for answer in second] == [[2] * TOKENS] * len(requests)
    assert [answer.logprobs for answer in second] != [answer.logprobs for answer in first]

    await told(engine.cancel("nobody asked for this"))
    if overlaps:
        await _is_overtaken_and_cancelled(engine, old, requests)
    if sleeps:
        await told(engine.sleep())
        await refused(engine, requests, 2, "no version")
        for _ in range(2):  # what a sleep gave up comes again under its own number, where nothing was trained
            await told(engine.wake_up(["weights"]))
            await load(engine, old, 4)
            await told(engine.wake_up(["kv_cache"]))
            assert [answer.logprobs for answer in await answers(requests, 4)] == [
                answer.logprobs for answer in first
            ]
            await told(engine.sleep())
    await told(engine.shutdown())


def _are_distributions(logprobs, at_two, answered):
    for row, flatter, answer in zip(logprobs, at_two, answered, strict=True):
        assert row.dtype == flatter.dtype == np.float32
        assert np.exp(row.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
        halved = row.astype(np.float64) / 2
        np.testing.assert_allclose(flatter, halved - np.log(np.exp(halved).sum()), atol=1e-4)
        assert row[answer.tokens[0]] == pytest.approx(answer.logprobs[0], abs=1e-4), "what was drawn is of it"


async def _is_overtaken_and_cancelled(engine, tensors, requests):
    long = Sampling(200)
    overtaken = asyncio.create_task(engine.generate(requests, long, None, "kept"))
    dropped = asyncio.create_task(engine.generate(requests, long, None, "dropped"))
    await asyncio.sleep(0.1)
    assert not overtaken.done()
    await told(engine.cancel("dropped"))
    await load(engine, tensors, 3)
    with pytest.raises(GenerationCancelledError):
        await dropped
    for answer in await overtaken:
        assert len(answer.tokens) == len(answer.versions) == 200
        assert answer.versions == sorted(answer.versions)
        assert set(answer.versions) == {2, 3}
