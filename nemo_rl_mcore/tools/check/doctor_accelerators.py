"""The GPUs of this machine, its driver, and what torch makes of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_rl_mcore.tools.check.doctor_children import Answer
from nemo_rl_mcore.tools.check.doctor_findings import Finding, Status, ok
from nemo_rl_mcore.tools.check.doctor_packages import install, version_of

_RUNS = "runs on GPUs; without, all runs are on CPU with gloo (cluster.gpus_per_node: 0)"


@dataclass(frozen=True)
class GPU:
    """A GPU that torch sees; memory in bytes, capability such as (9, 0)."""

    name: str
    memory: int
    capability: tuple[int, int]

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name}, {self.memory / 2**30:.4g} GiB, compute capability {major}.{minor}"


@dataclass(frozen=True)
class Accelerators:
    """What the driver and torch have told; listed: how many GPUs nvidia-smi names."""

    driver: Answer
    torch: Answer

    @property
    def gpus(self) -> tuple[GPU, ...]:
        """Return those that torch sees."""
        seen = self.torch.facts.get("gpus", ())
        return tuple(GPU(one["name"], one["bytes"], tuple(one["capability"])) for one in seen)

    @property
    def listed(self) -> int:
        """Return how many nvidia-smi lists."""
        return len(self.driver.facts.get("listed") or ())

    def findings(self, *, on_cpu: bool) -> Iterator[Finding]:
        """Yield driver, GPUs, torch's build, the collectives and Triton; on_cpu: where the ranks are to be."""
        yield self._driver()
        yield self._gpus()
        if self.torch.facts:
            yield self._build()
            yield from self._collectives(on_cpu)
        yield _triton()

    def _driver(self) -> Finding:
        if self.driver.failure:
            mend = "run nvidia-smi by hand; where it hangs or fails, reload the driver or restart the machine"
            return Finding("driver", Status.WRONG, self.driver.failure, _RUNS, mend)
        cuda, listed = self.driver.facts["cuda"], self.driver.facts["listed"]
        if cuda is None and not listed:
            mend = "install NVIDIA's driver; start a container with --gpus all"
            return Finding("driver", Status.MISSING, "no libcuda.so.1, no nvidia-smi", _RUNS, mend)
        version = f"{listed[0][1]}, " if listed else ""
        built = self.torch.facts.get("cuda")
        if cuda and built and _major(cuda) < _major(built):
            what = f"{version}for CUDA up to {cuda}, and torch is built for {built}"
            return Finding("driver", Status.WRONG, what, _RUNS, "install a newer driver of NVIDIA")
        return ok("driver", f"{version}for CUDA up to {cuda}" if cuda else f"{version}and no libcuda.so.1")

    def _gpus(self) -> Finding:
        if not self.torch.facts:
            what = f"nvidia-smi lists {self.listed}; torch, which is to see them, is not there or does not import"
            return Finding("GPUs", Status.WRONG if self.listed else Status.MISSING, what, _RUNS)
        if self.listed > len(self.gpus):
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            what = f"nvidia-smi lists {self.listed}, torch sees {len(self.gpus)}"
            what += "" if shown is None else f"; CUDA_VISIBLE_DEVICES={shown}"
            mend = "" if shown is None else "unset CUDA_VISIBLE_DEVICES"
            return Finding("GPUs", Status.WRONG, what, _RUNS, mend)
        if not self.gpus:
            return Finding("GPUs", Status.MISSING, "none", _RUNS)
        kinds = "; ".join(f"{number} x {gpu}" for gpu, number in Counter(self.gpus).items())
        architectures = self.torch.facts["architectures"]
        strange = [gpu for gpu in self.gpus if not supported(gpu.capability, architectures)]
        if strange:
            what = f"{kinds}; this build of torch is for {', '.join(architectures)}"
            return Finding("GPUs", Status.WRONG, what, _RUNS, "install a build of torch for these GPUs")
        return ok("GPUs", kinds)

    def _build(self) -> Finding:
        cuda = self.torch.facts["cuda"]
        if cuda is not None:
            return ok("torch's build", f" for CUDA {cuda}")
        if not self.listed:
            return ok("torch's build", "for CPU alone")
        what = f"for CPU alone, and nvidia-smi lists {self.listed} GPUs"
        return Finding("torch's build", Status.WRONG, what, _RUNS, install(again="torch"))

    def _collectives(self, on_cpu: bool) -> Iterator[Finding]:
        again, nccl = install(again="torch"), self.torch.facts["nccl"]
        if nccl is None:
            yield Finding(
                "NCCL", Status.MISSING, "not in this build of torch", "ranks on GPUs", again, not on_cpu
            )
        else:
            yield ok("NCCL", nccl)
        if self.torch.facts["gloo"]:
            yield ok("gloo", "in this build of torch")
        else:
            yield Finding("gloo", Status.MISSING, "not in this build of torch", "ranks on CPU", again, True)


def supported(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether code for `architectures` (sm_90, compute_90) runs on a GPU: binaries within a major version."""
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        number = int(digits.rstrip("af"))
        built = divmod(number, 10)
        if kind == "compute" and built <= capability:
            return True
        if kind == "sm" and built[0] == capability[0] and built[1] <= capability[1]:
            return True
    return False


def _triton() -> Finding:
    version = version_of("triton")
    if version is not None:
        return ok("Triton", version)
    mend = install()  # which asks for it
    return Finding(
        "Triton", Status.MISSING, "not installed", "kernels of the fused log-probabilities on GPUs", mend
    )


def _major(version: str) -> int:
    return int(version.partition(".")[0])
