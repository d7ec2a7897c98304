// Shows the page's JSON. Answers are only ever set as text, never as HTML.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;
const COLOURS = ["#2f6fdb", "#e07b1a", "#2a9d6f", "#b5447e", "#7a5cc7", "#0f9bb3", "#9a7b1f", "#d04545", "#5f8f2f", "#808893"];
const DASHES = ["solid", "dot", "dash", "dashdot"];
const main = document.querySelector("main");
const nav = document.querySelector("nav");

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// The largest absolute value, ignoring gaps; Math.max takes too few arguments.
const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value || 0)), 0);

function labelled(name, control) {
  control.setAttribute("aria-label", name);
  return make("label", {}, name, control);
}

function section(title, ...children) {
  const id = title.toLowerCase().replaceAll(" ", "-");
  nav.append(make("a", { href: `#${id}` }, title));
  const element = make("section", { id }, make("h2", {}, title), ...children);
  main.append(element);
  return element;
}

function table(header, rows) {
  const head = header ? [make("tr", {}, ...header.map((cell) => make("th", {}, cell)))] : [];
  const body = rows.map((row) =>
    make("tr", {}, ...row.map((cell, place) => make(place || header ? "td" : "th", {}, cell))));
  return make("div", { class: "scrolled" }, make("table", {}, ...head, ...body));
}

// A part of each run that has it, under the run's name if there are several.
function ofEachRun(title, part) {
  const parts = data.runs.map((run) => [run, part(run)]).filter(([, found]) => found && found.length);
  if (!parts.length) return;
  section(title, ...parts.flatMap(([run, found]) => (several ? [make("h3", {}, run.name), ...found] : found)));
}

// Plots

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function look() {
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", colorway: COLOURS,
    font: { family: "system-ui, sans-serif", size: 12, color: colour("--text") },
    margin: { l: 50, r: 10, t: 10, b: 40 }, hovermode: "x unified", dragmode: "zoom",
    hoverlabel: { namelength: -1, bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: colour("--text") } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    xaxis: axis, yaxis: axis,
  };
}

function layoutOf(figure) {
  const base = look();
  const layout = { ...base, ...figure.layout };
  for (const axis of ["xaxis", "yaxis"]) layout[axis] = { ...base[axis], ...figure.layout[axis] };
  const highest = largest(figure.data.flatMap((trace) => trace.y.filter((value) => typeof value === "number")));
  layout.yaxis.exponentformat = highest < 1000 ? "e" : "SI";
  layout.showlegend = figure.data.length > 1;
  return layout;
}

const drawn = [];

function plot(figure, kind) {
  const place = make("div", { class: kind ? `plot ${kind}` : "plot" });
  drawn.push([place, figure]);
  return place;
}

// Each of several runs has its colour, each metric its dashes.
function traces(figure) {
  const ofRun = new Map();
  return figure.data.map(({ run, ...trace }) => {
    if (!several || run === undefined) return trace;
    const metric = ofRun.get(run) || 0;
    ofRun.set(run, metric + 1);
    return { ...trace, line: { color: COLOURS[run % COLOURS.length], dash: DASHES[metric % DASHES.length] } };
  });
}

function draw(place, figure) {
  const options = { responsive: true, displaylogo: false, displayModeBar: false };
  Plotly.newPlot(place, traces(figure), layoutOf(figure), options);
}

// The parts of the page

function header() {
  document.querySelector("h1").textContent = data.runs.map((run) => run.name).join(" and ");
  const where = data.runs.map((run) => run.folder).join(", ");
  document.querySelector("footer").textContent = `nemo-rl-mcore ${data.version}, ${data.made}: ${where}`;
}

function finding({ text, panel }) {
  const target = Object.values(PANELS).flat().find(([, metrics]) => metrics.includes(panel));
  const place = target && document.getElementById(target[1].find((name) => document.getElementById(name)));
  const link = place ? [" ", make("a", { href: `#${place.id}` }, "see the curve")] : [];
  return make("div", { class: "finding warning" }, make("b", {}, "Look at this"), text, ...link);
}

function findings() {
  const element = document.getElementById("what-to-look-at");
  for (const run of data.runs) {
    if (several) element.append(make("h3", {}, run.name));
    element.append(...run.findings.map(finding));
    if (!run.findings.length) element.append(make("p", { class: "quiet" }, "This page's rules found nothing."));
  }
}

function recipes() {
  const texts = data.runs.filter((run) => run.recipe);
  if (!texts.length) return;
  const differing = data.differences.length
    ? [make("h3", {}, "Differences"), table(["key", ...data.runs.map((run) => run.name)], data.differences)]
    : several ? [make("p", { class: "quiet" }, "The recipes are the same.")] : [];
  section("Recipe", ...differing, ...texts.map((run) =>
    make("details", {}, make("summary", {}, several ? run.name : "all keys"), make("pre", {}, run.recipe))));
}
