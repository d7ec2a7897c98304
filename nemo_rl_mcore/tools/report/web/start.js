// The order of the page; plots are drawn last, since they take the width that they find.
header();
section("What to look at");
ofEachRun("Summary", (run) => (run.summary.length ? [table(null, run.summary)] : []));
ofEachRun("Evaluations", evaluations);
curves();
ofEachRun("Time", time);
const withAnswers = data.runs.filter((run) => run.steps.length);
if (withAnswers.length) section("Rollouts", ...rolloutBrowser(withAnswers));
ofEachRun("Faults survived", (run) => (run.faults.length ? [table(["where", "what"], run.faults)] : []));
recipes();
findings();
for (const [place, figure] of drawn) draw(place, figure);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [place, figure] of drawn) draw(place, figure);
});
