"""The way of a policy's weights to engines of any kind, of which some may be lost on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_fleet import EngineFleet, StartedEngine
from nemo_rl_mcore.driver.actors.engine_placement import transport_of
from nemo_rl_mcore.driver.actors.failures import Call, WorkerError
from nemo_rl_mcore.driver.actors.placement import Placement
from nemo_rl_mcore.driver.actors.ray_engines import RayEngines
from nemo_rl_mcore.engine.engine import EngineKind
from nemo_rl_mcore.rank.refit.sender import BroadcastRendezvous, EngineLostError, Engines, RefitSettings
from nemo_rl_mcore.rank.refit.verification import Digests, of_all


class WeightSource(Protocol):
    """Has the weights; `workers.policy.Policy` does."""

    @property
    def placement(self) -> Placement:
        """Return where its ranks run."""
        ...

    @property
    def incarnation(self) -> int:
        """Say how often its ranks have restarted; new ones are connected to no engines."""
        ...

    def gpus(self) -> Sequence[str]:
        """Return the GPU of each rank; empty on CPU."""
        ...

    def connect_engines(self, engines: Engines, settings: RefitSettings) -> BroadcastRendezvous | None:
        """Get ready to send to these engines, and to no others any more; says where to meet for a broadcast."""
        ...

    def prepare_for_lp_inference(self) -> None:
        """Take from the devices what policy.offload names besides the weights."""
        ...

    def send_weights(self) -> Digests:
        """Stream all weights to the engines; returns the tensors by name, with digests where they are verified."""
        ...


class EngineRefits:
    """Sends the weights of a source to engines of a fleet; only the thread that calls the source's ranks calls it."""

    def __init__(
        self,
        fleet: EngineFleet,
        kind: EngineKind,
        config: PolicyConfig,
        cluster: RayCluster,
        source: WeightSource,
    ) -> None:
        self.digest = ""
        """Of what was sent last, where refits are verified; see `refit.verification.of_all`."""
        self._fleet, self._kind, self._source = fleet, kind, source
        self._makes_room = config.offload != "none" and config.generation.takes_turns
        self._transport, self._verify = (
            transport_of(cluster, config.generation),
            config.generation.verify_refit,
        )
        self._connected: tuple[int, list[StartedEngine]] | None = None
        self._succeeded = False

    def make_room(self) -> None:
        """Have ranks that share the engines' devices keep there what a refit needs, and no more, if they are to."""
        if self._makes_room:
            self._source.prepare_for_lp_inference()

    def send(self, engines: Sequence[StartedEngine], version: int) -> None:
        """Try once to give these engines the source's weights; those that hold them afterwards have the version.

        What is lost meanwhile is for the fleet to restart, and for the caller to go on without: the engines that
        are left take the same version once more. Raises what fails while all engines are well, such as ranks.
        """
        context = f"weights of version {version}"
        for engine in engines:
            engine.version = None
        ready = self._wake(engines, "weights", context)
        if not self._connect(ready):
            return
        begun = self._fleet.run(ready, "begin_refit", version, context=context)
        if len(begun) < len(ready):
            return  # the ranks would send to the dead
        try:
            sent = self._source.send_weights()
        except (WorkerError, EngineLostError) as error:
            if not self._lose_whom_it_names(ready, error, context):
                self._connected = None  # who is to meet for the next refit is not sure any more
                raise
            return
        # What fails in the first refit of a run would fail in another process, too.
        again = self._succeeded and self._fleet.budget.left() > 0
        finished = self._fleet.run(ready, "finish_refit", version, sent, or_lose=again, context=context)
        for engine in self._wake(finished, "kv_cache", context):
            engine.version, engine.joined, engine.asleep = version, True, False
            self._succeeded = True
        self.digest = of_all(sent)

    def _wake(self, engines: Iterable[StartedEngine], tag: str, context: str) -> list[StartedEngine]:
        """Return those that live, after what slept has taken memory for the weights or the cache."""
        asleep = [engine for engine in engines if engine.asleep]
        woken = self._fleet.run(asleep, "wake_up", [tag], context=context) if asleep else {}
        return [engine for engine in engines if not engine.asleep or engine in woken]

    def _lose_whom_it_names(
        self, engines: Sequence[StartedEngine], error: WorkerError | EngineLostError, context: str
    ) -> bool:
        """Lose the engines that a refit has failed for; says whether there are any."""
        cause = error.cause if isinstance(error, WorkerError) else error
        if isinstance(error, WorkerError) and not error.usable:
            return False  # ranks are gone
        lost = False
        for engine in engines:
            ill = self._fleet.illness(engine, "send_weights")
            if ill is None and isinstance(cause, EngineLostError) and cause.engine == engine.number:
                ill = WorkerError(str(cause), Call("load_bucket", context, group=self._kind.name))
            if ill is not None:
                self._fleet.lose(engine, ill)
                lost = True
        return lost

    def _connect(self, engines: Sequence[StartedEngine]) -> bool:
        """Tell the ranks whom to send to, unless they know; false when one was lost meanwhile, or none is left."""
        wanted = (self._source.incarnation, [*engines])
        if not engines or self._connected == wanted:
            return bool(engines)
        self._connected = None
        kind, key = self._kind, f"{self._kind.section}.call_timeout_s"
        settings = RefitSettings(
            self._transport,
            kind.bucket_bytes,
            kind.call_timeout_s,
            receivers=len(engines) * kind.processes,
            verify=self._verify,
            held_as=kind.precision,
        )
        numbers = [engine.number for engine in engines]
        reached = RayEngines([engine.process.handle for engine in engines], kind.noun, key, numbers)
        rendezvous = self._source.connect_engines(reached, settings)
        if rendezvous is not None:
            joined = self._fleet.run(
                engines,
                "join_broadcast",
                own={engine: {"first_rank": 1 + at * kind.processes} for at, engine in enumerate(engines)},
                address=rendezvous.address,
                port=rendezvous.port,
                world_size=rendezvous.world_size,
                timeout_s=settings.timeout_s,
            )
            if len(joined) < len(engines):
                return False
        self._connected = wanted
        return True
