/* The page, from top to bottom. */
runs.forEach((run, place) => { run.place = place; });

function summary() {
  const score = ["global_accuracy", "r2"].find((name) => runs.some((run) => run.curves[name])) || null;
  const more = ["local_accuracy", "rare_accuracy", "validation_accuracy"].filter((name) => runs.some((run) => run.curves[name]));
  const last = (run, name) => (run.curves[name] ? run.curves[name].at(-1)[1] : null);
  const columns = [score, ...more].filter(Boolean);
  const best = Object.fromEntries(columns.map((name) => [name, Math.max(...runs.map((run) => last(run, name) ?? -Infinity))]));
  const rows = runs.map((run) => [
    [runNamed(run), el("small", {}, [run.method, run.task, `seed ${run.seed}`].join(" · "))],
    [`${whole(run.rounds)} of ${whole(run.of)}`, el("small", {}, run.state)],
    ...columns.map((name) => ({ inside: measured(name, last(run, name)) || "–", best: runs.length > 1 && last(run, name) === best[name] })),
    bytes(run.bytes), run.costs.macs.every((n) => n !== null) && run.rounds ? macs(sum(run.costs.macs)) : "–",
    whole(sum(run.faults.dropped)),
  ]);
  return table(["run", "rounds", ...columns.map(named), "sent", "client compute", "dropped"], rows, "stack");
}

function curves() {
  const order = ["global_accuracy", "r2", "local_accuracy", "local_accuracy_masked", "rare_accuracy", "validation_accuracy", "loss", "train_loss"];
  const all = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  const names = [...order.filter((name) => all.includes(name)), ...all.filter((name) => !order.includes(name))];
  if (!names.length) return section("Curves", "", el("p", { class: "missing small" }, "Nothing has been measured yet."));
  const across = { rounds: ["rounds", "round"], sent: ["bytes sent", "sent", BYTES], compute: ["client compute", "computed by clients", MACS] };
  const total = { rounds: (run) => run.costs.macs.map((_, at) => at + 1), sent: (run) => running(run.costs.bytes_down.map((n, at) => n + run.costs.bytes_up[at])), compute: (run) => running(run.costs.macs) };
  const known = Object.keys(across).filter((key) => key !== "compute" || runs.some((run) => run.rounds && !run.costs.macs.includes(null)));
  let name = names[0], by = "rounds";
  const legend = el("div", { class: "legend" }), holder = el("div", { class: "chart", id: "curves" });
  const draw = (width) => {
    const lines = runs.map((run) => {
      const at = by === "compute" && run.costs.macs.includes(null) ? null : total[by](run);
      return { run, points: at ? (run.curves[name] || []).map(([round, value]) => [at[round - 1], value]) : [] };
    });
    const [, below, units] = across[by];
    const { unit, of } = units ? unitFor(Math.max(...lines.flatMap((line) => line.points.map((point) => point[0])), 1), units) : { unit: "", of: 1 };
    for (const line of lines) line.points = line.points.map(([x, y]) => [x / of, y]);
    const values = lines.flatMap((line) => line.points.map((point) => point[1]));
    const high = Math.max(...values, isShare(name) ? 0 : -Infinity), low = Math.min(...values, 0);
    const y = isShare(name) ? { low: 0, high: Math.min(1, Math.ceil(high * 10.5) / 10 || 1) } : { low, high: high + (high - low) * 0.05 };
    lineChart(holder, width, width < 600 ? 260 : 360, lines, y, {
      x: plain, y: (n) => (isShare(name) ? `${Math.round(100 * n)} %` : plain(n)), exact: (n) => measured(name, n),
      marks: true, below: unit ? `${below}, ${unit}` : below, label: `${named(name)} by ${across[by][0]}` }, by === "rounds");
    legend.replaceChildren(...lines.map(({ run, points }) => el("span", {}, swatch(run.place), run.name, el("b", {}, points.length ? measured(name, points.at(-1)[1]) : "–"))));
  };
  const again = () => draw(holder.clientWidth);
  drawn(holder, draw);
  return section("Curves", "Measured on examples that no client holds.",
    el("div", { class: "row" }, choice(names.map((each) => [each, named(each)]), name, (to) => { name = to; again(); }, "metric"),
      choice(known.map((each) => [each, `by ${across[each][0]}`]), by, (to) => { by = to; again(); }, "across")),
    legend, holder);
}
function running(list) { let all = 0; return list.map((n) => (all += n)); }

function local() {
  const some = runs.filter((run) => run.local && run.local.plain.length);
  const differ = some.some((run) => run.local.plain.some((n, at) => n !== run.local.masked[at]));
  const holder = el("div", { class: "pair", id: "local" });
  function show(kind) {
    const most = Math.max(1, ...some.flatMap((run) => binned(run.local[kind])));
    holder.replaceChildren(...some.map((run) => {
      const values = [...run.local[kind]].sort((a, b) => a - b), mean = sum(values) / values.length;
      const tenth = values[Math.floor(values.length / 10)];
      const chart = el("div", { class: "chart" });
      drawn(chart, (width) => histogram(chart, width, values, most, run, { x: (n) => `${Math.round(100 * n)} %`, y: whole, left: "clients", below: "local accuracy", label: `local accuracies of ${run.name}` }));
      return el("div", {}, el("div", {}, runNamed(run)), el("div", { class: "soft small" }, `${count(values.length, "client")}, mean ${percent(mean)}, a tenth at or below ${percent(tenth)}`), chart);
    }));
  }
  show("plain");
  return section("Local accuracy", "Clients by how well the model answers their own test examples; the dashed line is their mean.", ...missing("Local accuracies", "local"),
    differ ? el("div", { class: "row" }, choice([["plain", "all classes"], ["masked", "classes the client has"]], "plain", show, "classes")) : null, holder);
}

function costs() {
  const chart = (id, heading, units, total) => {
    const holder = el("div", { class: "chart", id });
    const high = Math.max(1, ...runs.map((run) => (total(run) || [0]).at(-1) || 0)), { unit, of } = unitFor(high, units);
    drawn(holder, (width) => {
      const lines = runs.map((run) => ({ run, points: (total(run) || []).map((n, at) => [at + 1, n / of]) }));
      lineChart(holder, width, 230, lines, { low: 0, high: (high / of) * 1.04 }, { x: whole, y: plain, exact: (n) => `${plain(n)} ${unit}`, below: "round", label: heading }, true);
    });
    return el("div", {}, el("h3", {}, `${heading}, ${unit}`), holder);
  };
  const rows = runs.map((run) => {
    const known = run.rounds && run.costs.macs.every((n) => n !== null);
    return [runNamed(run), bytes(sum(run.costs.bytes_down)), bytes(sum(run.costs.bytes_up)), bytes(run.bytes / Math.max(1, run.rounds)), known ? macs(sum(run.costs.macs)) : "–", time(run.seconds)];
  });
  return section("Costs", "What was sent, and what clients computed for answers that were used (forward and backward).",
    el("div", { class: "pair" }, chart("sent", "Sent so far", BYTES, (run) => running(run.costs.bytes_down.map((n, at) => n + run.costs.bytes_up[at]))),
      chart("computed", "Computed by clients so far", MACS, (run) => (run.costs.macs.includes(null) ? null : running(run.costs.macs)))),
    table(["run", "to clients", "from clients", "a round", "client compute", "training time here"], rows, "stack"));
}

function faults() {
  const troubled = runs.filter((run) => run.faults.reasons.length || run.faults.void.length);
  const fine = runs.filter((run) => !troubled.includes(run));
  const parts = troubled.map((run) => {
    const { dropped, reasons } = run.faults, gone = run.faults.void, chart = el("div", { class: "chart" });
    drawn(chart, (width) => {
      const high = Math.max(1, ...dropped);
      const { image, at, bottom } = frame(width, 130, { low: 0.5, high: dropped.length + 0.5, integer: true }, { low: 0, high, integer: true }, { x: whole, y: whole, left: "answers", below: "round", label: `dropped answers of ${run.name}` });
      const wide = Math.max(1.5, (at.x(2) - at.x(1)) * 0.7);
      dropped.forEach((n, place) => { if (n) image.append(svg("rect", { x: at.x(place + 1) - wide / 2, y: at.y(n), width: wide, height: bottom - at.y(n), fill: colour(run.place) })); });
      for (const round of gone) image.append(svg("text", { x: at.x(round), y: EDGE.top + 4, "text-anchor": "middle", style: "fill:var(--ink)" }, "×"));
      chart.replaceChildren(image);
    });
    const said = [count(sum(dropped), "answer") + " dropped", gone.length ? `${count(gone.length, "void round")} (×): ${gone.slice(0, 20).join(", ")}${gone.length > 20 ? " …" : ""}` : "no void round"];
    const rows = reasons.map((each) => [each.why, whole(each.answers), each.clients.join(", ") + (each.more ? ` and ${each.more} more` : ""), each.first === each.last ? each.first : `${each.first} – ${each.last}`]);
    return el("div", {}, el("h3", {}, runNamed(run)), el("p", { class: "soft small" }, said.join("; ")), chart, rows.length ? table(["why", "answers", "clients", "rounds"], rows, "words stack") : null);
  });
  if (fine.length) parts.push(el("p", { class: "soft", style: { marginTop: "14px" } }, `${fine.map((run) => run.name).join(", ")}: every answer was used, every round counted.`));
  return section("Faults", "Clients whose answers were not used, and why; rounds that did not count.", ...parts);
}

function recipes() {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const differing = keys.filter((key) => runs.some((run) => run.settings[key] !== runs[0].settings[key]));
  const rows = differing.map((key) => [key, ...runs.map((run) => run.settings[key] ?? "–")]);
  const made = (run) => Object.entries(run.environment).map(([key, value]) => `${key} ${value}`).join(" · ");
  return section("Recipe", runs.length > 1 ? "The settings in which the runs differ, then every setting of each." : "Every setting of the run.",
    rows.length ? table(["setting", ...runs.map((run) => run.name)], rows, "words") : null,
    el("div", { style: { height: "16px" } }),
    ...runs.map((run) => el("details", runs.length === 1 ? { open: "" } : {}, el("summary", {}, runNamed(run)), el("p", { class: "soft small", style: { marginTop: "6px" } }, `${run.run} · ${made(run)}`), el("pre", {}, run.recipe))));
}

document.getElementById("page").append(
  el("header", {}, el("h1", {}, data.title), el("p", { class: "soft" }, [...new Set(runs.map((run) => run.task))].join(", "))),
  el("div", { style: { marginTop: "22px" } }, summary()),
  curves(), windowsSection(), coverageSection(), local(), costs(), faults(), recipes(),
  el("footer", {}, `Made by fedrolex ${data.version} from the folders of the runs. Nothing on this page is loaded from elsewhere.`),
);
redraws.forEach((draw) => draw());
document.documentElement.dataset.ready = "yes";
