/* Which nodes clients trained: round after round, axis by axis. */

/* Number of answers that trained each node of an axis in a round, by level: a list of counts for every level. */
function held(pictures, place, jobs, section) {
  const size = pictures.axes[place].size;
  const found = pictures.levels.map(() => null);
  for (const [of, level, window, taken] of jobs) {
    if (of !== section || !taken) continue;
    const counts = (found[level] = found[level] || new Uint16Array(size));
    const pairs = pictures.spans[pictures.windows[window][place]];
    for (let at = 0; at < pairs.length; at += 2) {
      for (let step = 0; step < pairs[at + 1]; step += 1) counts[(pairs[at] + step) % size] += 1;
    }
  }
  return found;
}

/* The same for all rounds and all levels together: one list of counts a round. */
function heldByRound(pictures, place, section) {
  return pictures.rounds.map(([, jobs]) => {
    const total = new Uint16Array(pictures.axes[place].size);
    for (const counts of held(pictures, place, jobs, section)) if (counts) counts.forEach((n, node) => { total[node] += n; });
    return total;
  });
}

function heat(run) {
  const paper = mixed(rgb("--panel"), rgb("--line"), 0.7), strong = rgb(`--c${run.place % 8}`);
  return (part) => mixed(paper, strong, part <= 0 ? 0 : 0.25 + 0.75 * Math.min(1, part));
}

function windowsSection() {
  const some = runs.filter((run) => run.windows && run.windows.axes.length && run.windows.rounds.length);
  const holder = el("div", { id: "windows" });
  let state = null, timer = null;
  const stop = () => { clearInterval(timer); timer = null; };

  function pick(run) {
    stop();
    state = { run, pictures: run.windows, section: 0, axis: widest(run.windows), at: 0, maps: new Map() };
    build();
  }
  const widest = (pictures) => pictures.axes.reduce((best, axis, place) => (axis.size > pictures.axes[best].size ? place : best), 0);

  function build() {
    const { run, pictures } = state;
    const slider = el("input", { type: "range", min: 0, max: pictures.rounds.length - 1, value: state.at, "aria-label": "round", oninput: () => { stop(); go(Number(slider.value)); } });
    const now = el("span", { class: "now", id: "now", "aria-live": "polite" });
    const play = el("button", { type: "button", class: "plain", "aria-label": "play", onclick: () => {
      if (timer) { stop(); play.textContent = "▶"; return; }
      play.textContent = "❚❚";
      timer = setInterval(() => go((state.at + 1) % pictures.rounds.length), 140);
    } }, "▶");
    const step = (by, words, sign) => el("button", { type: "button", class: "plain", "aria-label": words, id: words.replace(" ", "-"), onclick: () => { stop(); go(state.at + by); } }, sign);
    const cards = el("div", { class: "cards" });
    const map = el("div", { class: "chart", id: "over-rounds" });
    const about = el("p", { class: "soft small" }), heading = el("h3");

    function go(at) {
      state.at = Math.max(0, Math.min(pictures.rounds.length - 1, at));
      if (!timer) play.textContent = "▶";
      const [round, jobs] = pictures.rounds[state.at];
      slider.value = state.at;
      const own = jobs.filter((job) => job[0] === state.section);
      now.textContent = `round ${round} of ${run.rounds}`;
      const lost = own.filter((job) => !job[3]).length;
      about.textContent = `${count(own.length, "job")} in this round${lost ? `, ${lost} of them without a usable answer (not drawn)` : ""}. Rows are capacities; the last row is all rounds so far, red where nobody has trained a node.`;
      cards.replaceChildren(...pictures.axes.map((axis, place) => card(axis, place, jobs)));
      heading.textContent = `${pictures.axes[state.axis].name} in every round`;
      drawMap();
    }

    function card(axis, place, jobs) {
      const found = held(pictures, place, jobs, state.section), paint = heat(run);
      const shown = pictures.levels.map((_, level) => level);
      const canvas = el("canvas", { "aria-hidden": "true", style: { height: `${shown.length * 9}px` } });
      cells(canvas, axis.size, shown.length, (row, node) => {
        const counts = found[shown[row]];
        return counts ? counts[node] / Math.max(1, ...[Math.max(...counts)]) : 0;
      }, paint);
      const sofar = soFar(place)[state.at], top = Math.max(1, ...sofar), never = rgb("--never");
      const below = el("canvas", { "aria-hidden": "true", style: { height: "9px", marginTop: "4px" } });
      cells(below, axis.size, 1, (_, node) => sofar[node], (n) => (n ? paint(n / top) : never));
      const labels = el("span", { style: { display: "grid", gridAutoRows: "9px", font: "8px/9px system-ui, sans-serif", textAlign: "right", color: "var(--soft)" } },
        ...shown.map((level) => el("span", {}, pictures.levels[level])), el("span", { style: { marginTop: "4px" } }, "all"));
      return el("button", { type: "button", class: "card", "aria-pressed": String(place === state.axis), onclick: () => { state.axis = place; go(state.at); } },
        el("span", { class: "label" }, el("span", { title: axis.name }, axis.name), el("span", {}, count(axis.size, "node"))),
        el("span", { style: { display: "grid", gridTemplateColumns: "24px 1fr", gap: "6px" } }, labels, el("span", {}, canvas, below)));
    }

    /* Updates of every node of an axis up to each round. */
    function soFar(place) {
      const key = `${state.section}/${place}`;
      if (!state.maps.has(key)) {
        const byRound = heldByRound(pictures, place, state.section);
        let before = new Uint32Array(pictures.axes[place].size);
        const sums = byRound.map((counts) => { before = before.map((n, node) => n + counts[node]); return before; });
        state.maps.set(key, { byRound, sums });
      }
      return state.maps.get(key).sums;
    }

    function drawMap() {
      const width = map.clientWidth;
      if (!width) return;
      soFar(state.axis);
      const { byRound } = state.maps.get(`${state.section}/${state.axis}`);
      const axis = pictures.axes[state.axis], height = 230, rounds = pictures.rounds.map(([round]) => round);
      const half = pictures.every / 2, x = { low: rounds[0] - half, high: rounds.at(-1) + half, integer: true };
      const { image, at, right, bottom } = frame(width, height, x, { low: 0, high: axis.size, integer: true },
        { x: whole, y: whole, left: "node", below: "round", label: `nodes of ${axis.name} trained in every round` });
      const canvas = el("canvas", { "aria-hidden": "true", style: { position: "absolute", left: `${EDGE.left}px`, top: `${EDGE.top}px`, width: `${right - EDGE.left}px`, height: `${bottom - EDGE.top}px`, cursor: "pointer" } });
      const most = Math.max(1, ...byRound.map((counts) => Math.max(...counts)));
      cells(canvas, rounds.length, axis.size, (row, column) => byRound[column][axis.size - 1 - row] / most, heat(run));
      canvas.addEventListener("pointerdown", (event) => {
        const box = canvas.getBoundingClientRect();
        stop(); go(Math.floor(((event.clientX - box.left) / box.width) * rounds.length));
      });
      const here = at.x(rounds[state.at]);
      const mark = svg("svg", { width, height, style: "position:absolute;left:0;top:0;pointer-events:none" });
      mark.append(svg("line", { x1: here, x2: here, y1: EDGE.top - 6, y2: bottom, stroke: "var(--ink)", "stroke-width": 1.5 }));
      map.replaceChildren(image, canvas, mark);
    }
    drawn(map, () => go(state.at));

    const sections = pictures.sections.length > 1
      ? choice(pictures.sections.map((name, place) => [place, name]), state.section, (place) => { state.section = place; go(state.at); }, "section")
      : null;
        const most = pictures.every > 1 ? el("p", { class: "soft small" }, `One of every ${pictures.every} rounds is drawn.`) : null;
    holder.replaceChildren(
      ...[el("div", { class: "row" }, runChoice(some, run, pick), sections),
        el("div", { class: "row" }, play, step(-1, "round before", "‹"), step(1, "next round", "›"), slider, now),
        about, cards, heading, el("p", { class: "soft small" }, "The stronger the colour, the more answers trained a node. Click on a round to go there, on an axis above to see it here."), map, most].filter(Boolean));
    go(state.at);
  }
  if (some.length) pick(some[0]);
  return section("Windows", "Which nodes of every axis clients trained, round by round.", ...missing("Windows", "windows"), holder,
    some.length || runs.some((run) => run.missing.windows) ? null : el("p", { class: "missing small" }, "These runs train whole models, or have no round yet: there are no windows."));
}
