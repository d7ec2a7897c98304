// Plots of the metrics over the steps of all runs, in groups, and of the time per phase.
const PANELS = {
  "Learning": [
    ["reward", ["train/reward", "validation/reward"]],
    ["accuracy", ["validation/accuracy"], "Share of held-out answers that are fully correct."],
    ["preference accuracy", ["train/preference_accuracy", "validation/preference_accuracy"]],
    ["rewards of pairs", ["train/rewards_chosen_mean", "train/rewards_rejected_mean", "train/rewards_margin_mean", "validation/rewards_margin_mean"],
      "The margin should grow; a chosen reward that falls with the rejected one is a warning."],
    ["loss", ["train/loss", "validation/loss"], "In GRPO and PPO it need not fall: watch the reward."],
    ["gradient norm", ["train/grad_norm"], "Before clipping."],
    ["learning rate", ["train/lr"]],
  ],
  "Stability": [
    ["entropy", ["train/entropy"], "Nats per token. Near 0 the policy no longer explores."],
    ["divergence from the reference", ["train/kl_penalty"], "Nats per token."],
    ["engine and training", ["train/token_mult_prob_error"],
      "Factor between the engine's and training's probability of a token: 1 is perfect, above 1.05 is wrong."],
    ["clipped ratios", ["train/probs_ratio_clipfrac"]],
  ],
  "Responses": [
    ["spread of rewards", ["train/reward_std", "train/reward_std_within_groups"], "GRPO learns nothing from a group with equal rewards."],
    ["response length", ["train/mean_gen_tokens_per_sample", "train/max_gen_tokens_per_sample"]],
    ["truncated responses", ["train/truncation_rate"]],
  ],
  "Asynchronous rollouts": [
    ["age of the tokens", ["async/age_mean", "async/age_max"], "Training steps since their weights."],
    ["groups in flight", ["async/buffer_ready", "async/inflight"]],
    ["idle, share of a step", ["async/trainer_idle", "async/engine_idle"]],
    ["importance weights, responses", ["async/ess", "async/mixed_versions"],
      "Effective sample size as a share of the tokens; share of responses sampled by several versions."],
  ],
  "Speed": [
    ["tokens/s", ["performance/tokens_per_sec"]],
    ["seconds per step", ["timing/total"]],
    ["memory, GiB", ["performance/peak_memory_gib", "performance/value_peak_memory_gib"]],
  ],
};
const ZERO_WHERE_UNUSED = ["train/kl_penalty", "train/probs_ratio_clipfrac"];
const UNKNOWN = 6; // metrics drawn if none of the known ones is there

// The phases in the order of a step, with their titles.
const PHASES = {
  generation: "generation", logprobs: "log-probabilities", reference: "reference log-probabilities",
  teacher: "teacher log-probabilities", values: "values", train: "training", weight_sync: "refit",
  validation: "validation", checkpoint: "checkpoint", recovery: "recovery",
};
const SHOWN_SHARE = 0.002; // of all steps' time; smaller phases are added to the rest

const isShown = (name) => data.runs.some(({ columns }) =>
  (columns[name] || []).some((value) => value !== null && (value !== 0 || !ZERO_WHERE_UNUSED.includes(name))));

// Steps and values of a metric; null, which Plotly draws as a gap, for a value that is not finite.
function points({ columns }, name) {
  const places = (columns[name] || []).flatMap((value, place) => (value === null ? [] : [place]));
  return {
    x: places.map((place) => columns.step[place]),
    y: places.map((place) => (columns[name][place] === "" ? null : columns[name][place])),
  };
}

function overSteps(metrics) {
  const lines = data.runs.flatMap((run, number) => metrics.flatMap((name) => {
    const { x, y } = points(run, name);
    if (!x.length) return [];
    const dense = x.length >= 20 && !name.startsWith("validation/") && 2 * x.length >= run.columns.step.length;
    return [{ type: "scatter", mode: dense ? "lines" : "lines+markers", run: number, name: several ? `${run.name}: ${name}` : name, x, y }];
  }));
  // Plots side by side share an axis.
  const layout = { xaxis: { title: { text: "step" }, range: [0, Math.max(...data.runs.map((run) => run.lastStep))] } };
  const values = new Set(lines.flatMap(({ y }) => y.filter((value) => value !== null)));
  if (values.size === 1) { // Plotly's default range is the value +-1, which makes a learning rate look like 0
    const [value] = values, half = Math.abs(value) / 2 || 0.1;
    layout.yaxis = { range: [value - half, value + half] };
  }
  return { data: lines, layout };
}

function curves() {
  const known = Object.entries(PANELS).map(([title, panels]) =>
    [title, panels.map(([heading, metrics, note]) => [heading, metrics.filter(isShown), note]).filter(([, metrics]) => metrics.length)]);
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.columns)))].filter((name) => name !== "step");
  const shown = known.filter(([, panels]) => panels.length);
  if (!shown.length && names.length) shown.push(["Metrics", names.filter(isShown).slice(0, UNKNOWN).map((name) => [name, [name]])]);
  for (const [title, panels] of shown) {
    section(title, make("div", { class: "panels" }, ...panels.map(([heading, metrics, note]) =>
      make("div", { class: "panel", id: metrics[0] },
        make("h4", {}, metrics.length > 1 ? heading : metrics[0]), make("p", { class: "note" }, note || ""), plot(overSteps(metrics))))));
  }
  const inPanels = Object.values(PANELS).flat().flatMap(([, metrics]) => metrics);
  const others = names.filter((name) => !inPanels.includes(name)).sort();
  if (!others.length) return;
  const place = make("div", { class: "plot" });
  const choice = make("select", { onchange: () => draw(place, overSteps([choice.value])) },
    ...others.map((name) => make("option", { value: name }, name)));
  drawn.push([place, overSteps([others[0]])]);
  section("Other metrics", make("div", { class: "controls" }, labelled("metric", choice)), place);
}

const sum = (values) => values.reduce((whole, value) => whole + value, 0);

function median(values) {
  const sorted = [...values].sort((one, other) => one - other), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// The seconds of each phase in each step whose time is known, and the rest of the step.
function phasesOf({ columns }) {
  const timed = (columns["timing/total"] || []).flatMap((value, place) => (typeof value === "number" ? [place] : []));
  const seconds = (name) => timed.map((place) => (columns[name] && columns[name][place]) || 0);
  const total = seconds("timing/total"), least = SHOWN_SHARE * sum(total);
  // Asynchronous rollouts run beside the steps: a step's generation time is only waiting.
  const named = "async/trainer_idle" in columns ? { ...PHASES, generation: "waiting for answers" } : PHASES;
  const spans = Object.entries(named).map(([key, name]) => [name, seconds(`timing/${key}`)]).filter(([, values]) => sum(values) > least);
  const rest = total.map((whole, place) => Math.max(0, whole - sum(spans.map(([, values]) => values[place]))));
  return { steps: timed.map((place) => columns.step[place]), spans: timed.length ? [...spans, ["the rest", rest]] : [] };
}

// The median step: its phases one after another.
function waterfall({ spans }) {
  const typical = spans.map(([name, values]) => [name, median(values)]).filter(([, seconds]) => seconds > 0);
  const x = typical.map(([, seconds]) => seconds), base = x.map((_, place) => sum(x.slice(0, place)));
  const bar = {
    type: "bar", orientation: "h", y: typical.map(([name]) => name), x, base, text: x.map((seconds) => `${Number(seconds.toPrecision(3))} s`),
    hovertemplate: "%{y}: %{text}<extra></extra>", cliponaxis: false,
  };
  // Room for the number after the last bar.
  return { data: [bar], layout: { xaxis: { title: { text: "seconds" }, range: [0, 1.15 * sum(x)] }, yaxis: { autorange: "reversed" } } };
}

function time(run) {
  const { steps, spans } = phasesOf(run);
  if (!spans.some(([, values]) => median(values) > 0)) return [];
  const areas = spans.filter(([, values]) => largest(values)).map(([name, y]) =>
    ({ type: "scatter", mode: "lines", stackgroup: "phases", name, line: { width: 0.5 }, x: steps, y }));
  const stacked = { data: areas, layout: { xaxis: { title: { text: "step" } }, yaxis: { title: { text: "seconds" } } } };
  return [
    make("div", { class: "pair" },
      make("div", { class: "panel" }, make("h4", {}, "the median step"), plot(waterfall({ spans }), "tall")),
      make("div", { class: "panel" }, make("h4", {}, "seconds per phase"), plot(stacked, "tall"))),
  ];
}

// A table per folder with results of `eval`: values with standard errors.
function evaluations({ evaluations: found }) {
  const shown = ({ mean, stderr }) => `${number(mean)}${typeof stderr === "number" ? ` ± ${Number(stderr.toPrecision(2))}` : ""}`;
  return Object.entries(found).flatMap(([folder, results]) => {
    const names = [...new Set(Object.values(results).flatMap((one) => Object.keys(one.metrics || {})))];
    const rows = Object.entries(results).map(([set, one]) =>
      [set, one.prompts ?? "", one.samples ?? "", ...names.map((name) => (one.metrics[name] ? shown(one.metrics[name]) : ""))]);
    return rows.length ? [make("h3", {}, folder), table(["set", "prompts", "samples", ...names], rows)] : [];
  });
}
