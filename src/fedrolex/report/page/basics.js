/* Elements, numbers, colours. All text of runs goes through textContent: it is never read as markup. */
const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const redraws = [];

function el(tag, given = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(given)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...inside.filter((each) => each !== null && each !== undefined));
  return made;
}

function svg(tag, given = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(given)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

/* Draw now, when the width changes, and when light becomes dark. */
function drawn(holder, draw) {
  let width = 0;
  const again = () => { width = holder.clientWidth; if (width > 0) draw(width); };
  redraws.push(again);
  new ResizeObserver(() => { if (holder.clientWidth !== width) again(); }).observe(holder);
  return holder;
}
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => redraws.forEach((draw) => draw()));

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (place) => `var(--c${place % 8})`;
const dashes = (place) => ["", "7 4", "2 3"][Math.floor(place / 8) % 3];
function rgb(name) {
  const hex = css(name).slice(1);
  return [0, 2, 4].map((from) => parseInt(hex.slice(from, from + 2), 16));
}
const mixed = (from, to, share) => from.map((each, place) => Math.round(each + (to[place] - each) * share));

/* --- numbers in words --- */
const whole = (n) => Math.round(n).toLocaleString("en");
function scaled(n, units, step) {
  let place = 0;
  while (Math.abs(n) >= step && place < units.length - 1) { n /= step; place += 1; }
  return `${n >= 100 || Number.isInteger(n) ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2)} ${units[place]}`.trim();
}
const BYTES = [["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024];
const MACS = [["MAC", "kMAC", "MMAC", "GMAC", "TMAC", "PMAC", "EMAC"], 1000];
const bytes = (n) => scaled(n, ...BYTES);
const macs = (n) => scaled(n, ...MACS);
/* The unit for numbers up to this one: its name, and how many there are of the smallest. */
function unitFor(high, [units, step]) {
  const place = Math.max(0, Math.min(units.length - 1, Math.floor(Math.log(Math.max(1, high)) / Math.log(step))));
  return { unit: units[place], of: step ** place };
}
const percent = (n, digits = 1) => `${(100 * n).toFixed(digits)}\u202f%`;
/* A share that only says 100 % when it is all, and 0 % when it is nothing. */
const share = (n) => (n === 1 ? "100\u202f%" : n === 0 ? "0\u202f%" : percent(Math.min(Math.max(n, 0.0001), 0.9999), 2));
function time(seconds) {
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = seconds / 60;
  return minutes < 90 ? `${minutes.toFixed(0)} min` : `${(minutes / 60).toFixed(1)} h`;
}
const plain = (n) => (Math.abs(n) >= 1000 ? whole(n) : String(Number(n.toPrecision(4))));
const isShare = (name) => name.includes("accuracy") || name === "top5" || name === "worst_class";
const measured = (name, n) => (n === null || n === undefined ? "" : isShare(name) ? percent(n) : plain(n));
const named = (name) => ({ train_loss: "training loss", local_accuracy_masked: "local accuracy, masked", r2: "R²" })[name] || name.replaceAll("_", " ");
const sum = (list) => list.reduce((all, each) => all + each, 0);
const count = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;

/* Round numbers that divide a stretch into about so many parts. */
function ticks(low, high, about, integer = false) {
  const raw = (high - low) / Math.max(1, about) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
  if (integer) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step + 0 || 0);
  return found;
}

/* --- parts of the page --- */
function section(heading, about, ...inside) {
  return el("section", {}, el("h2", {}, heading), about ? el("p", { class: "soft" }, about) : null, ...inside);
}
const swatch = (place) => el("i", { class: "swatch", style: { background: colour(place) } });
const runNamed = (run) => el("span", { style: { display: "inline-flex", alignItems: "baseline" } }, swatch(run.place), run.name);

/* Buttons of which one is pressed; words by value. */
function choice(options, chosen, change, label) {
  const holder = el("span", { class: "choice", role: "group", "aria-label": label });
  for (const [value, words] of options) {
    holder.append(el("button", {
      type: "button", "aria-pressed": String(value === chosen),
      onclick: (event) => {
        for (const each of holder.children) each.setAttribute("aria-pressed", String(each === event.currentTarget));
        change(value);
      },
    }, words));
  }
  return holder;
}
const runChoice = (some, chosen, change) =>
  some.length > 1 ? choice(some.map((run) => [run, runNamed(run)]), chosen, change, "run") : null;

/* What is not there, and why; once for runs of the same reason. */
function missing(what, key) {
  const reasons = new Map();
  for (const run of runs) {
    const why = run.missing[key];
    if (why) reasons.set(why, [...(reasons.get(why) || []), run.name]);
  }
  return [...reasons].map(([why, names]) => el("p", { class: "missing small" }, `${what} of ${names.join(", ")} missing: ${why}`));
}

function table(headings, rows, kind = "") {
  const head = el("tr", {}, ...headings.map((each) => el("th", { scope: "col" }, each)));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, place) => {
    const [inside, best] = cell && cell.best !== undefined ? [cell.inside, cell.best] : [cell, false];
    return el("td", { "data-is": (place && headings[place]) || null, class: best ? "best" : "" }, ...[].concat(inside));
  })));
  return el("div", { class: "scroll" }, el("table", { class: kind }, el("thead", {}, head), el("tbody", {}, ...body)));
}
