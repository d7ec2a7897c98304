"""Weights on their way from a rank to engines, over the real transports; the engines are actors that keep them."""

import os
import time

import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError
from refusals import refused

from nemo_rl_mcore.driver.actors.actor import RayEngines
from nemo_rl_mcore.engine.receivers import MessageRelay, Receiver
from nemo_rl_mcore.rank.refit.digests import digests
from nemo_rl_mcore.rank.refit.sender import EngineLostError, RefitSettings, open_sender
from nemo_rl_mcore.rank.refit.transports import Bucket, Packer, SharedMemorySender

pytestmark = pytest.mark.stage("processes")

CPU = torch.device("cpu")

BUCKET = 4096


class Engine:
    """Keeps what the buckets hold; `misbehave` says what it does instead at the n-th."""

    def behave(self, slowness_s=0.0, misbehave=None):
        self.relay, self.receiver = MessageRelay(), Receiver(CPU)
        self.tensors, self.sizes = {}, []
        self.slowness_s, self.misbehave = slowness_s, misbehave or {}

    def load_bucket(self, message):
        self.sizes.append(len(message["tensors"]))
        match self.misbehave.get(len(self.sizes)):
            case "die":
                os._exit(1)
            case "hang":
                time.sleep(600)
            case "raise":
                raise ValueError("no such weight")
        time.sleep(self.slowness_s)
        bucket = Bucket.from_message(self.relay.relay(message))
        for name, tensor in bucket.read(self.receiver.open(bucket.location)):
            self.tensors[name] = tensor.clone()

    def received(self):
        found = {
            name: (str(tensor.dtype), tuple(tensor.shape), tensor.float().tolist())
            for name, tensor in self.tensors.items()
        }
        return found, self.sizes


@pytest.fixture(scope="module")
def actors(cluster):
    started = {}
    yield started
    for actor in started.values():
        ray.kill(actor)


@pytest.fixture
def engine(actors):
    """`engine(place, **behaviour)`: the actor of that place, restarted if a test lost it."""

    def at(place=0, **behaviour):
        if place not in actors:
            actors[place] = ray.remote(Engine).options(num_cpus=0.1, max_restarts=0).remote()
        ray.get(actors[place].behave.remote(**behaviour), timeout=120)
        return actors[place]

    yield at
    lost = [place for place, actor in actors.items() if not answers(actor)]
    for place in lost:
        ray.kill(actors.pop(place))


def answers(actor):
    try:
        ray.get(actor.received.remote(), timeout=2)
    except (RayActorError, GetTimeoutError):
        return False
    return True


TENSORS = 27


def tensors(count=TENSORS):
    generator = torch.Generator().manual_seed(0)
    shapes = [(17, 11), (3,), (1,), (5, 60), (13, 13), (), (30, 30), (2, 2), (700,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32]
    for i in range(count):
        yield f"weight.{i}", torch.randn(shapes[i % 9], generator=generator).to(dtypes[i % 3])


def sender(engines, transport="shared_memory", timeout_s=60.0, **settings):
    settings = RefitSettings(transport, BUCKET, timeout_s, **settings)
    return open_sender(settings, RayEngines(engines, "vLLM engine"), torch.device("cpu"))


def as_received(exported):
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), tensor.float().tolist()) for name, tensor in exported
    }


@pytest.mark.parametrize("transport", ["shared_memory", "ray"])
def test_every_engine_gets_every_tensor_bit_for_bit_also_when_it_is_slow(engine, transport):
    engines = [engine(0), engine(1, slowness_s=0.05)]
    sending = sender(engines, transport)
    for _ in range(2):
        assert sending.send(tensors()) == digests(tensors())
    for actor in engines:
        received, sizes = ray.get(actor.received.remote())
        assert received == as_received(tensors())
        assert sum(sizes) == 2 * TENSORS
        assert len(sizes) >= 12, "many more buckets than slots"
        assert max(sizes) > 1, "small tensors share a bucket"
    sending.close()


def test_digests_are_of_what_engines_hold_or_are_not_taken(engine):
    cast = [(name, tensor.to(torch.bfloat16)) for name, tensor in tensors()]
    assert sender([engine()], held_as="bfloat16").send(tensors()) == digests(cast)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias", torch.rand(5)  # an engine has it in fp32
    assert sender([engine()], held_as="bfloat16").send([bias]) == digests([bias])
    assert sender([engine()], verify=False).send(tensors()) == dict.fromkeys(digests(cast))


class Rank:
    """A training rank, which is handed the engines by the driver."""

    def send(self, engines, exported):
        settings = RefitSettings("shared_memory", BUCKET, 60.0)
        return open_sender(settings, engines, torch.device("cpu")).send(exported)


def test_engines_that_the_driver_hands_to_a_rank_are_reached_from_there(engine):
    actor = engine()
    rank = ray.remote(Rank).options(num_cpus=0.1).remote()
    assert ray.get(rank.send.remote(RayEngines([actor]), [*tensors()]), timeout=120) == digests(tensors())
    received, _ = ray.get(actor.received.remote())
    ray.kill(rank)
    assert received == as_received(tensors())


@pytest.mark.parametrize(
    ("bucket", "misbehaviour", "error", "message"),
    [
        (1, "raise", ValueError, "no such weight"),
        (2, "raise", ValueError, "no such weight"),
        (4, "raise", ValueError, "no such weight"),
        (2, "die", EngineLostError, "vLLM engine 1 died during a refit"),
        (3, "hang", EngineLostError, "vLLM engine 1 did not acknowledge a bucket of weights within 5 s"),
    ],
)
def test_a_failing_engine_ends_the_refit(engine, bucket, misbehaviour, error, message):
    sending = sender([engine(0), engine(1, misbehave={bucket: misbehaviour})], timeout_s=5.0)
    with pytest.raises(error, match=message):
        sending.send(tensors())


def test_a_sender_goes_on_after_a_failed_refit(engine):
    actor = engine(0, misbehave={2: "raise"})
    sending = sender([actor])
    with pytest.raises(ValueError, match="no such weight"):
        sending.send(tensors())
    sending.send(tensors())
    received, _ = ray.get(actor.received.remote())
    assert received == as_received(tensors())


def test_a_tensor_that_no_bucket_has_room_for_is_refused_with_the_key(engine):
    large = [("small", torch.ones(3)), ("large", torch.ones(BUCKET)), ("after", torch.ones(3))]
    with refused("bucket-size", "a bucket of 4096 bytes", 16384, "large"):
        sender([engine()]).send(large)


def test_an_error_of_the_export_itself_comes_through(engine):
    def export():
        yield from tensors(3)
        raise RuntimeError("export")

    with pytest.raises(RuntimeError, match="export"):
        sender([engine()]).send(export())


def test_packed_tensors_are_aligned_and_read_back_in_place():
    buffer = torch.zeros(1024, dtype=torch.uint8)
    packer = Packer(buffer)
    assert packer.add("odd", torch.arange(3, dtype=torch.int8))
    assert packer.add("wide", torch.arange(4, dtype=torch.float64))
    assert not packer.add("too large", torch.zeros(1024))
    assert [tensor.offset % 64 for tensor in packer.tensors] == [0, 0]
    bucket = Bucket.from_message(Bucket({"kind": "here"}, tuple(packer.tensors)).to_message())
    read = dict(bucket.read(buffer))
    assert read["odd"].tolist() == [0, 1, 2]
    assert read["wide"].tolist() == [0, 1, 2, 3]
    assert read["wide"].dtype == torch.float64


def test_shared_memory_is_gone_with_its_sender():
    sending, receiving = SharedMemorySender(BUCKET), Receiver(CPU)
    sending.slots[1][:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    location = sending.locate(1, 3)
    assert receiving.open(location).tolist() == [1, 2, 3]
    receiving.close()
    sending.close()
    with pytest.raises(FileNotFoundError):
        Receiver(CPU).open(location)


def test_a_relay_that_needs_more_room_does_not_show_its_old_memory():
    relay, receiver = MessageRelay(), Receiver(CPU)
    for size in (10, 1000):
        data = torch.full((size,), size % 251, dtype=torch.uint8)
        message = {"location": {"kind": "message", "data": data.numpy()}, "tensors": []}
        assert receiver.open(relay.relay(message)["location"]).tolist() == data.tolist()
    relay.close()
