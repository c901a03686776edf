/* What was trained so far: how often every node and every weight. */
const OUTSIDE = 0, NEVER = 1;

function coverageSection() {
  const some = runs.filter((run) => run.coverage && run.coverage.length);
  const parts = some.flatMap((run) => run.coverage.map((part) => ({ run, ...part })));
  const several = (run) => run.coverage.length > 1;
  const rows = parts.map((part) => [
    [runNamed(part.run), several(part.run) ? el("small", {}, part.section) : ""],
    share(part.nodes), share(part.weights), whole(part.never),
  ]);
  const holder = el("div", { id: "coverage" });

  function show(run, place = 0) {
    const part = run.coverage[place];
    const sections = several(run) ? choice(run.coverage.map((each, at) => [at, each.section]), place, (at) => show(run, at), "section") : null;
    const strips = el("div", { class: "strips" }, ...part.by_node.flatMap((each) => [
      el("span", { title: each.axis }, each.axis), picture(run, each, "16px"),
      el("span", {}, each.range[0] === each.range[1] ? whole(each.range[1]) : `${whole(each.range[0])} – ${whole(each.range[1])}`)]));
    const maps = el("div", { class: "maps" }, ...part.by_weight.map((each) => el("figure", {},
      el("div", { class: "label", title: [each.tensor, ...each.others].join("\n") }, el("span", {}, each.tensor.replace(/\.weight$/, "")), el("span", {}, each.others.length ? `+${each.others.length}` : "")),
      picture(run, each, null), el("div", { class: "soft small" }, share(each.share)))));
    holder.replaceChildren(...[
      el("div", { class: "row" }, runChoice(some, run, (other) => show(other)), sections), key(run),
      el("h3", {}, "By node"), el("p", { class: "soft small" }, "Every axis from its first node to its last; on the right, updates of the least and the most trained node."),
      el("div", { style: { height: "8px" } }), strips,
      part.by_weight.length ? el("h3", {}, "By weight") : null,
      part.by_weight.length ? el("p", { class: "soft small" }, "Matrices, outputs down and inputs across, with the share that was ever trained; +n are cut alike. A weight is trained only when both its ends are in the window.") : null,
      el("div", { style: { height: "10px" } }), maps,
      part.left_out ? el("p", { class: "soft small" }, `${count(part.left_out, "more matrix", "more matrices")} not drawn.`) : null,
    ].filter(Boolean));
  }

  function picture(run, each, height) {
    const canvas = el("canvas", { role: "img", "aria-label": each.axis || each.tensor, style: height ? { height } : { aspectRatio: "1" } });
    const bytes = atob(each.cells);
    const paint = () => {
      const ramp = heat(run), never = rgb("--never");
      cells(canvas, each.columns, each.rows, (row, column) => bytes.charCodeAt(row * each.columns + column),
        (cell) => (cell === OUTSIDE ? null : cell === NEVER ? never : ramp((cell - 2) / 253 || 0.001)));
    };
    paint();
    dark.addEventListener("change", paint);
    return canvas;
  }

  function key(run) {
    const ramp = heat(run), to = (part) => `rgb(${ramp(part).join(" ")})`;
    const item = (background, words) => el("span", {}, el("i", { style: { background } }), words);
    return el("div", { class: "key" }, item("var(--never)", "never trained"), item(to(0.001), "few updates"), item(to(1), "most updates of the picture"));
  }

  if (some.length) show(some[0]);
  return section("Coverage", "Which part of the server's model the answers so far have trained.", ...missing("Coverage", "coverage"),
    rows.length ? table(["", "nodes reached", "weights reached", "never trained"], rows, "stack") : null, holder);
}
