/* Line charts and histograms, as SVG of the width they have. */
/* What has no room inside: numbers, and words below. */
const EDGE = { left: 54, right: 14, top: 22, bottom: 40 };

function frame(width, height, x, y, words) {
  const image = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words.label });
  const right = width - EDGE.right, bottom = height - EDGE.bottom;
  const at = {
    x: (value) => EDGE.left + ((value - x.low) / (x.high - x.low || 1)) * (right - EDGE.left),
    y: (value) => bottom - ((value - y.low) / (y.high - y.low || 1)) * (bottom - EDGE.top),
  };
  for (const value of ticks(y.low, y.high, Math.max(3, height / 50), y.integer)) {
    image.append(svg("line", { class: "grid", x1: EDGE.left, x2: right, y1: at.y(value), y2: at.y(value) }));
    image.append(svg("text", { x: EDGE.left - 8, y: at.y(value) + 4, "text-anchor": "end" }, words.y(value)));
  }
  for (const value of ticks(x.low, x.high, Math.max(2, width / 110), x.integer)) {
    image.append(svg("text", { x: at.x(value), y: bottom + 18, "text-anchor": "middle" }, words.x(value)));
    image.append(svg("line", { class: "axis", x1: at.x(value), x2: at.x(value), y1: bottom, y2: bottom + 4 }));
  }
  image.append(svg("line", { class: "axis", x1: EDGE.left, x2: right, y1: bottom, y2: bottom }));
  image.append(svg("text", { x: (EDGE.left + right) / 2, y: height - 4, "text-anchor": "middle" }, words.below));
  if (words.left) image.append(svg("text", { x: EDGE.left - 8, y: 9, "text-anchor": "end" }, words.left));
  return { image, at, right, bottom };
}

/* Lines of several runs with what they are at, under the pointer.
   lines: [{run, points: [[x, y] …]}]; words: {x, y, below, label}, functions and text. */
function lineChart(holder, width, height, lines, y, words, integer) {
  const some = lines.filter((line) => line.points.length);
  const xs = some.flatMap((line) => line.points.map((point) => point[0]));
  const x = { low: 0, high: Math.max(...xs, 1e-9), integer };
  const { image, at, right, bottom } = frame(width, height, x, y, words);
  for (const { run, points } of some) {
    const path = points.map(([px, py], place) => `${place ? "L" : "M"}${at.x(px).toFixed(1)} ${at.y(py).toFixed(1)}`).join("");
    image.append(svg("path", { d: path, fill: "none", stroke: colour(run.place), "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": dashes(run.place) }));
    for (const [px, py] of words.marks && points.length <= 24 ? points : points.slice(-1)) {
      image.append(svg("circle", { cx: at.x(px), cy: at.y(py), r: 3, fill: colour(run.place) }));
    }
  }
  const line = svg("line", { class: "axis", y1: EDGE.top, y2: bottom, visibility: "hidden" });
  const tip = el("div", { class: "tip", hidden: "" });
  image.append(line);
  const show = (event) => {
    const box = image.getBoundingClientRect();
    const want = x.low + ((event.clientX - box.left - EDGE.left) / (right - EDGE.left)) * (x.high - x.low);
    const near = some.map(({ run, points }) => [run, points.reduce((a, b) => (Math.abs(b[0] - want) < Math.abs(a[0] - want) ? b : a))]);
    if (!near.length) return;
    const at0 = near.map(([, point]) => point[0]).reduce((a, b) => (Math.abs(b - want) < Math.abs(a - want) ? b : a));
    line.setAttribute("x1", at.x(at0)); line.setAttribute("x2", at.x(at0)); line.setAttribute("visibility", "visible");
    tip.replaceChildren(el("div", { class: "soft" }, `${words.below.split(",")[0]} ${words.x(at0)}`), ...near.map(([run, point]) =>
      el("div", {}, swatch(run.place), run.name, el("b", {}, words.exact(point[1])))));
    tip.hidden = false;
    const left = at.x(at0) + 14;
    tip.style.left = `${left + tip.offsetWidth > width ? Math.max(0, at.x(at0) - tip.offsetWidth - 14) : left}px`;
  };
  const hide = () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); };
  image.addEventListener("pointermove", show);
  image.addEventListener("pointerdown", show);
  image.addEventListener("pointerleave", hide);
  holder.replaceChildren(image, tip);
}

/* How many values lie in each of twenty parts of 0 … 1. */
function histogram(holder, width, values, most, run, words) {
  const bins = binned(values);
  const { image, at, bottom } = frame(width, 190, { low: 0, high: 1 }, { low: 0, high: most, integer: true }, words);
  bins.forEach((n, place) => {
    const left = at.x(place / bins.length) + 1, next = at.x((place + 1) / bins.length) - 1;
    if (n) image.append(svg("rect", { x: left, y: at.y(n), width: Math.max(1, next - left), height: bottom - at.y(n), fill: colour(run.place), rx: 1.5 }));
  });
  const mean = sum(values) / values.length;
  image.append(svg("line", { x1: at.x(mean), x2: at.x(mean), y1: EDGE.top - 4, y2: bottom, stroke: "var(--ink)", "stroke-width": 1.5, "stroke-dasharray": "4 3" }));
  holder.replaceChildren(image);
}
function binned(values, bins = 20) {
  const found = Array(bins).fill(0);
  for (const value of values) found[Math.min(bins - 1, Math.floor(value * bins))] += 1;
  return found;
}

/* A picture of cells, one pixel each; paint(cell) gives [red, green, blue] or null for nothing. */
function cells(canvas, columns, rows, at, paint) {
  canvas.width = columns; canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const found = paint(at(row, column));
      if (found) image.data.set([...found, 255], 4 * (row * columns + column));
    }
  }
  context.putImageData(image, 0, 0);
}
