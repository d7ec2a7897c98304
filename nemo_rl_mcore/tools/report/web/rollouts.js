// Browses answers, one step of one run at a time, with coloured tokens where these are saved.
const number = (value) => (typeof value === "number" ? Number(value.toPrecision(4)).toString() : "none");
const at = (column, place) => (column ? column[place] : null);
const RED = "214,69,65", GREEN = "42,157,111", BLUE = "47,111,219";

// Each has a token's value, the value at which the colour is strongest, and the colours of low and high values.
const COLOURINGS = {
  "log-probability": {
    value: (tokens, i) => at(tokens.generation_logprobs, i), scale: () => 6, low: RED, high: RED,
    legend: "unlikely when sampled (-6 nats and below) … certain",
  },
  "training minus engine": {
    value: (tokens, i) => {
      const [engine, training] = [at(tokens.generation_logprobs, i), at(tokens.prev_logprobs, i)];
      return engine === null || training === null ? null : training - engine;
    },
    scale: () => 0.5, low: RED, high: BLUE, legend: "log-probability in training: below … above the engine's, by 0.5 or more",
  },
  advantage: {
    value: (tokens, i) => at(tokens.advantages, i),
    scale: (tokens) => largest([1e-9, ...(tokens.advantages || [])]),
    low: RED, high: GREEN, legend: "lowest … highest of this answer",
  },
  mask: { value: () => null, scale: () => 1, low: RED, high: RED, legend: "dotted: not trained on" },
};

function shade(colouring, tokens, place, scale) {
  const value = colouring.value(tokens, place);
  if (value === null || value === undefined) return null;
  const strength = Math.min(1, Math.abs(value) / scale);
  return `background: rgba(${value < 0 ? colouring.low : colouring.high}, ${(0.75 * strength).toFixed(3)})`;
}

function token(tokens, place, colouring, scale) {
  const text = tokens.text[place];
  const masked = at(tokens.mask, place);
  const told = [
    `token ${place + 1}: ${JSON.stringify(text)}`,
    `log-probability, engine: ${number(at(tokens.generation_logprobs, place))}`,
    `log-probability, training: ${number(at(tokens.prev_logprobs, place))}`,
    `advantage: ${number(at(tokens.advantages, place))}`,
    masked === null ? "" : masked ? "trained on" : "not trained on",
  ].filter(Boolean);
  const tell = () => { document.querySelector(".told").textContent = told.join(" · "); };
  return make("span", {
    class: masked === 0 ? "token unmasked" : "token", style: shade(colouring, tokens, place, scale),
    title: told.join("\n"), onclick: tell,
  }, text.replaceAll("\n", "⏎\n"));
}

// Consecutive tokens of one turn: an answer, or an observation between two.
function turnsOfTokens(answer, colouring) {
  const { tokens } = answer;
  const rewards = (answer.turns || []).filter((turn) => turn.role === "assistant").map((turn) => turn.reward);
  // A row of a longer episode has only the turns of its own tokens.
  const first = tokens.turn.find((turn) => turn > 0);
  const blocks = [], scale = colouring.scale(tokens);
  tokens.text.forEach((_, place) => {
    const turn = tokens.turn[place];
    if (!blocks.length || blocks.at(-1).turn !== turn) blocks.push({ turn, spans: [] });
    blocks.at(-1).spans.push(token(tokens, place, colouring, scale));
  });
  const shown = blocks.map(({ turn, spans }) => {
    const reward = rewards[turn - first];
    const name = turn ? `answer ${turn}${reward === undefined || reward === null ? "" : `, reward ${number(reward)}`}` : "observation";
    return block(turn ? name : "observation", !turn, ...spans);
  });
  return tokens.more ? [...shown, block(`${tokens.more} more tokens`, true, "…")] : shown;
}

const block = (title, observed, ...content) =>
  make("div", { class: observed ? "turn observed" : "turn" }, make("b", {}, title), make("pre", {}, ...content));

function turnsOfTexts(answer) {
  if (!answer.turns) return [block("answer", false, answer.response)];
  return answer.turns.map((turn) => {
    const reward = turn.reward === undefined || turn.reward === null ? "" : `, reward ${number(turn.reward)}`;
    return block(turn.role + reward, turn.role !== "assistant", turn.content);
  });
}

function facts(answer) {
  const byName = Object.entries(answer.rewards || {}).map(([name, value]) => [`reward ${name}`, value]);
  const known = {
    reward: answer.reward, ...Object.fromEntries(byName), "shaped reward": answer.shaped_reward, advantage: answer.advantage,
    "prompt tokens": answer.prompt_tokens, "answer tokens": answer.response_tokens,
  };
  const told = Object.entries(known).filter(([, value]) => typeof value === "number").map(([name, value]) => `${name} ${number(value)}`);
  if (answer.truncated) told.push("cut off");
  if (answer.sample_mask === 0) told.push("not trained on");
  const [oldest, newest] = [answer.weight_version_min, answer.weight_version_max];
  told.push(oldest === newest ? `weights of step ${oldest}` : `weights of steps ${oldest} to ${newest}`);
  if (answer.source) told.push(`source ${answer.source}`);
  return told.join(" · ");
}

const ORDERS = {
  "as drawn": null,
  "lowest reward first": (one, other) => one.reward - other.reward,
  "highest reward first": (one, other) => other.reward - one.reward,
  "lowest advantage first": (one, other) => (one.advantage || 0) - (other.advantage || 0),
  "longest first": (one, other) => other.response_tokens - one.response_tokens,
};

const options = (names) => names.map((name, place) => make("option", { value: place }, name));

function rolloutBrowser(runs) {
  const list = make("div", { class: "list" }), shown = make("div", { class: "answer" });
  const run = make("select", { onchange: chooseRun }, ...options(runs.map((one) => one.name)));
  const step = make("select", { onchange: chooseStep });
  const order = make("select", { onchange: fill }, ...options(Object.keys(ORDERS)));
  const colouring = make("select", { onchange: show }, ...options(Object.keys(COLOURINGS)));
  const sought = make("input", { type: "search", oninput: fill, placeholder: "in prompt or answer" });
  const told = make("p", { class: "quiet" });
  let answer = null;

  const current = () => runs[run.value].steps[step.value];

  function chooseRun() {
    step.replaceChildren(...options(runs[run.value].steps.map((one) => `${one.kind}, step ${one.step}`)));
    step.value = Math.max(0, runs[run.value].steps.findLastIndex((one) => one.kind === "training"));
    chooseStep();
  }

  function chooseStep() {
    const { total, answers } = current();
    told.textContent = answers.length < total
      ? `${answers.length} of ${total} answers of this step: the first ones, and those with the lowest and highest rewards; rollouts/ has all of them.`
      : `All ${total} answers of this step.`;
    fill();
  }

  function fill() {
    const text = sought.value.toLowerCase();
    const found = current().answers.filter((one) => (one.prompt + one.response).toLowerCase().includes(text));
    const compare = Object.values(ORDERS)[order.value];
    if (compare) found.sort(compare);
    answer = found[0] || null;
    list.replaceChildren(...found.map(entry));
    show();
  }

  function entry(one) {
    const choose = () => { answer = one; show(); };
    const button = make("button", { type: "button", onclick: choose },
      make("span", {}, `${number(one.reward)} · ${one.prompt.trim()}`), make("span", { class: "quiet" }, one.response.trim() || "(nothing)"));
    button.answer = one;
    return button;
  }

  function show() {
    for (const button of list.children) button.setAttribute("aria-current", button.answer === answer);
    if (!answer) return shown.replaceChildren("No answer contains this text.");
    const name = Object.keys(COLOURINGS)[colouring.value], chosen = COLOURINGS[name];
    const blocks = answer.tokens ? turnsOfTokens(answer, chosen) : turnsOfTexts(answer);
    shown.replaceChildren(
      make("p", { class: "quiet" }, facts(answer)), block("prompt", true, answer.prompt), ...blocks,
      make("p", { class: "quiet told" }), ...(answer.answer ? [block("right answer", true, answer.answer)] : []),
      legend(answer, name, chosen));
  }

  function legend(answer, name, { low, high, legend: words }) {
    if (!answer.tokens) return make("p", { class: "quiet" }, "This answer's tokens are not saved (logger.rollouts.answers_with_tokens).");
    const middle = low === high ? "" : "transparent, ";
    const bar = `background: linear-gradient(90deg, rgba(${low},.75), ${middle}${low === high ? "transparent" : `rgba(${high},.75)`})`;
    const drawnBar = name === "mask" ? [] : [make("span", { class: "legend", style: bar })];
    return make("p", { class: "quiet" }, `${name}: `, ...drawnBar, `${words}. Point at or tap a token for its numbers.`);
  }

  chooseRun();
  return [
    make("div", { class: "controls" }, ...(runs.length > 1 ? [labelled("run", run)] : []), labelled("step", step),
      labelled("order", order), labelled("token colour", colouring), labelled("text", sought)),
    told, make("div", { class: "browser" }, list, shown),
  ];
}
