"""The plan of a run as lines for the terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group
from rich.text import Text

from nemo_rl_mcore.models.memory import MemoryEstimate
from nemo_rl_mcore.tools.check.asynchronous import AsyncPlan
from nemo_rl_mcore.tools.check.device_memory import DeviceMemory
from nemo_rl_mcore.tools.check.engines import EngineMemory
from nemo_rl_mcore.tools.check.plan import Plan

Row = tuple[str, str]
_NAME_WIDTH = 22


def render(plan: Plan, in_full: Sequence[Row] = ()) -> Group:
    """Lay out a plan: what is trained, parallel layout, batch arithmetic, guardrails, memory; print it with soft_wrap.

    A line longer than the terminal runs over instead of being broken inside a key.
    in_full: what `check --full` has found besides.
    """
    sections = (
        ("What is trained", plan.subject),
        ("Parallel layout", _layout_rows(plan)),
        ("Batch arithmetic of a step", _batch_rows(plan)),
        *_async_sections(plan),
        ("Run", _run_rows(plan)),
        ("Fused log-probabilities", _guardrail_rows(plan)),
        *_memory_sections(plan),
        *([("Data, in full", in_full)] if in_full else []),
        *((("Warnings", _warning_rows(plan)),) if plan.warnings else ()),
    )
    return Group(*(line for title, rows in sections for line in (Text(title, style="bold"), *_lines(rows))))


def _lines(rows: Iterable[Row]) -> Iterator[Text]:
    table = [*rows]
    width = max(_NAME_WIDTH, *(len(name) for name, _ in table))
    for name, value in table:
        yield Text(f"  {name:<{width}}  {value}")


def _warning_rows(plan: Plan) -> Iterator[Row]:
    for number, warning in enumerate(plan.warnings, start=1):
        yield f"{number}.", str(warning)


def _layout_rows(plan: Plan) -> Iterator[Row]:
    layout = plan.layout
    yield "device", f"{layout.device}, {layout.transformer_impl} layers"
    yield "ranks", f"{layout.num_nodes} node(s) x {layout.workers_per_node} = {layout.world_size}"
    sequence = " with sequence parallelism" if layout.sequence_parallel else ""
    yield "tensor parallel", f"{layout.tensor}{sequence}"
    yield "pipeline parallel", str(layout.pipeline)
    slice_pair = 2 * layout.context
    # Of lengths that are as likely as each other.
    padding = (
        f"rows padded to multiples of {slice_pair} tokens, {(slice_pair - 1) / 2:g} more a row on average"
    )
    slices = f", {padding}" if layout.context > 1 else ""
    yield "context parallel", f"{layout.context}{slices}"
    yield "expert parallel", str(layout.expert)
    model_ranks = layout.tensor * layout.pipeline * layout.context
    yield "data parallel", f"{layout.world_size} / {model_ranks} = {layout.data}"
    yield "generation", plan.engines.where


def _batch_rows(plan: Plan) -> Iterator[Row]:
    batch = plan.batch
    yield "samples", f"{batch.prompts} prompts x {batch.generations_per_prompt} answers = {batch.samples}"
    yield "samples per copy", f"{batch.samples} / {plan.layout.data} = {batch.samples_per_rank}"
    yield "optimizer steps", str(batch.optimizer_steps)
    budgets = batch.token_budgets
    if budgets is None:
        yield "microbatches", f"{batch.microbatches_per_optimizer_step} per rank and optimizer step"
        yield "log-probability passes", f"{batch.logprob_passes} per rank"
    else:
        kind = "packed" if budgets.packed else "of like length"
        yield "microbatches", f"up to {budgets.of_training(batch.rows_per_sample)} tokens, samples {kind}"
        yield "log-probability passes", f"up to {budgets.logprob} tokens, samples {kind}"
    if batch.prev_logprobs is not None:
        yield "prev_logprobs", batch.prev_logprobs
    if batch.longest_prompt + batch.max_new_tokens <= batch.max_sequence:
        yield (
            "tokens",
            f"{batch.longest_prompt} prompt + {batch.max_new_tokens} new <= {batch.max_sequence}",
        )
    else:
        left = f"{batch.max_new_tokens} new, as the prompt leaves them of {batch.max_sequence}"
        yield "tokens", f"up to {batch.longest_prompt} prompt, and up to {left}"


def _async_sections(plan: Plan) -> Iterator[tuple[str, Iterable[Row]]]:
    if plan.asynchronous is not None:
        yield "Asynchronous rollouts, in groups of answers to one prompt", _async_rows(plan.asynchronous)


def _async_rows(plan: AsyncPlan) -> Iterator[Row]:
    yield "age", f"{plan.max_age} training step(s) at most"
    under_way = f"{plan.max_age + 1} x {plan.groups_per_step} = {plan.max_live_groups}"
    yield "groups under way", f"{under_way}, of which {plan.max_inflight_groups} are being answered at most"
    whole = plan.min_groups_per_chunk == plan.groups_per_step
    least = (
        "the whole step"
        if whole
        else f"at least {plan.min_groups_per_chunk} of {plan.groups_per_step} groups"
    )
    yield "chunks of a step", least
    yield "new weights", "in the midst of answers" if plan.in_flight_weight_updates else "between answers"
    kept = f"{plan.kept_groups} since a checkpoint + " if plan.kept_groups else ""
    yield (
        "groups in the driver",
        f"{kept}{plan.max_live_groups} under way, {_bytes(plan.driver_bytes)} at most",
    )
    sizes = f"{_bytes(plan.step_bytes)} a step, {_bytes(plan.disk_bytes)} at most"
    yield "groups on disk", f"for a replay: {sizes}" if plan.step_bytes else "none"
    for remark in plan.remarks:
        yield "note", remark


def _run_rows(plan: Plan) -> Iterator[Row]:
    if (data := plan.data) is not None:
        yield "rows", f"{data.rows} to train on, {data.held_out} held out"
        yield "a pass over the rows", f"{data.rows} / {data.rows_per_step} = {data.steps_per_epoch:g} steps"
    if plan.fetched:
        yield "rows", f"{', '.join(plan.fetched)}: fetched and read when the run starts"
    yield "steps", str(plan.steps) if not plan.fetched else f"{plan.steps} at most"
    yield "reference policy", plan.reference_policy or "no (its KL penalty is 0)"
    yield "log_dir", plan.log_dir
    yield "checkpoints", plan.checkpoints
    for problem in plan.missing:
        yield "not on this machine", str(problem)


def _guardrail_rows(plan: Plan) -> Iterator[Row]:
    if not plan.fused_logprobs:
        yield "use_fused_linear_logprobs", "off"
    for guardrail in plan.guardrails:
        verdict = "ok" if guardrail.ok else "refused"
        yield verdict, f"policy.{guardrail.other}: {guardrail.value}"


def _memory_sections(plan: Plan) -> Iterator[tuple[str, Iterable[Row]]]:
    """Yield one for each model, and one for all where there are several."""
    models = plan.memory.models
    for name, memory in models.items():
        of_which = f" of the {name}" if len(models) > 1 else ""
        yield f"Memory per rank{of_which}, without activations and key-value cache", _memory_rows(memory)
    if len(models) > 1:
        yield "Memory per rank of all models", [("total", _bytes(plan.memory.total))]
    if plan.device_memory is not None:
        yield (
            "Memory of a GPU, without CUDA's own and the key-value cache of ranks",
            _device_rows(plan.device_memory),
        )
    if (engine := plan.engines.memory) is not None:
        yield "Memory per embedded engine, without key-value cache", _engine_rows(engine)
    if (share := plan.engines.share) is not None:
        rows = [
            ("model", f"{share.parameters:,} weights on the fullest process"),
            ("weights", _bytes(share.weights)),
        ]
        yield "Memory per process of a vLLM engine, without key-value cache", rows


def _memory_rows(memory: MemoryEstimate) -> Iterator[Row]:
    yield "model", f"{memory.parameters:,} weights, {memory.rank_parameters:,} on the fullest rank"
    for name in ("weights", "gradients", "optimizer", "reference", "logits", "total"):
        yield name, _bytes(getattr(memory, name))


def _device_rows(memory: DeviceMemory) -> Iterator[Row]:
    yield "activations", f"{_bytes(memory.activations)} of {memory.tokens} tokens"
    yield "while ranks train", _bytes(memory.training)
    if memory.during_generation is not None:
        share = f"at gpu_memory_utilization: {memory.engine_share:g}"
        yield "while engines answer", f"{_bytes(memory.during_generation)}, and the engines' share {share}"
    yield "a GPU needs", f"{_bytes(memory.smallest)} at least"


def _engine_rows(memory: EngineMemory) -> Iterator[Row]:
    yield "model", f"{memory.parameters:,} weights, the whole model"
    for name in ("weights", "buckets", "total"):
        yield name, _bytes(getattr(memory, name))


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"
