// Sweeps: what was tried, and how the settings of the better runs differ from those of the worse ones.

import { ask } from "./api.js";
import { color } from "./chart.js";
import { card, draw, make, quiet, table } from "./dom.js";
import { count, number, sampled, short, spelled, titled } from "./format.js";
import { address } from "./route.js";
import { stateBadge } from "./runs.js";

const HEIGHT = 300;
const [TOP, BOTTOM, SIDE] = [34, 24, 60];

class Sweeps {
  constructor(place, route, app) {
    Object.assign(this, { place, app, sweep: route.page === "sweep" ? route.name : "" });
    app.title(this.sweep ? short(this.sweep) : "Sweeps");
    place.append(make("div", "skeleton tall"));
    this.#load();
  }

  rowsChanged(rows) {
    if (!rows || !this.known || rows.some((row) => row.sweep || this.known.has(row.name))) {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.#load(), 2000);
    }
  }

  async #load() {
    try {
      const answer = await ask(this.sweep ? `api/sweeps/${encodeURIComponent(this.sweep)}` : "api/sweeps");
      const key = JSON.stringify(answer);
      if (this.closed || key === this.answer) return;
      this.answer = key;
      if (this.sweep) this.#showOne(answer);
      else this.#showAll(answer.sweeps);
    } catch (error) {
      if (this.closed) return;
      if (error.status === 404) this.place.replaceChildren(quiet(`There is no sweep ${short(this.sweep)} in this store.`));
      else this.app.trouble(error);
    }
  }

  #showAll(sweeps) {
    const head = make("div", "page-head", make("h1", "", "Sweeps"), make("p", "dim", sweeps.length ? count(sweeps.length) : ""));
    if (!sweeps.length) {
      this.place.replaceChildren(head, quiet("There are no sweeps in this store yet.", "`packtrain sweep job.yaml --grid train.schedule.noam.peak=0.001,0.003` starts one."));
      return;
    }
    const rows = sweeps.map((one) => {
      const link = Object.assign(make("a", "open", short(one.name, 80)), { href: address({ page: "sweep", name: one.name }) });
      const best = one.best ? Object.assign(make("a", "", short(one.best, 60)), { href: address({ page: "run", name: String(one.best) }) }) : "–";
      return [link, short(one.job, 60), count(one.runs), count(one.finished), best];
    });
    const box = table("listing", ["Sweep", "Job", ">Runs", ">Finished", "Best"], rows);
    box.setAttribute("aria-label", "Sweeps");
    this.place.replaceChildren(head, make("section", "card", box));
  }

  #showOne(sweep) {
    this.data = sweep;
    this.known = new Set(sweep.rows.map((row) => row.run));
    const scored = sweep.rows.filter((row) => row.score !== null);
    const back = Object.assign(make("a", "back", "Sweeps"), { href: "#/sweeps" });
    const done = sweep.rows.filter((row) => row.state === "finished").length;
    const head = make("div", "run-head", back, make("div", "title", make("h1", "", short(sweep.name, 120))), make("p", "dim", `${count(sweep.rows.length)} runs, ${count(done)} finished${sweep.measure ? `, judged by ${spelled(sweep.measure)}` : ""}`));
    this.lines = new Map();
    const plot = scored.length ? this.#parallel(sweep, scored) : quiet("No run has a score yet.");
    const counts = new Set(scored.map((row) => row.samples));
    const of = (samples) => (sampled(samples) ? ` (${sampled(samples)})` : "");
    const rows = sweep.rows.map((row) => {
      const link = Object.assign(make("a", "open", short(row.run, 60)), { href: address({ page: "run", name: row.run }) });
      link.dataset.run = row.run;
      const state = make("span", "", stateBadge(row.state), row.stopped_early ? make("small", "dim", " stopped early") : null);
      return [link, state, ...sweep.parameters.map((name) => show(row.values[name])), number(row.score) + (counts.size > 1 && row.score !== null ? of(row.samples) : ""), count(row.step)];
    });
    const box = table("listing sweep", ["Run", "State", ...sweep.parameters.map((name) => `>${short(name.split(".").slice(-2).join("."), 40)}`), `>${sweep.measure ? titled({ name: `valid.${sweep.measure}` }) : "Score"}${counts.size === 1 ? of(...counts) : ""}`, ">Step"], rows);
    box.setAttribute("aria-label", "Runs of the sweep");
    const light = (event) => {
      const run = event.target.closest("tr")?.querySelector("[data-run]")?.dataset.run;
      this.#light(event.type === "pointerleave" || event.type === "focusout" ? null : run);
    };
    for (const type of ["pointerover", "pointerleave", "focusin", "focusout"]) box.addEventListener(type, light);
    const all = Object.assign(make("a", "plain-link", "Overlay all curves"), { href: address({ page: "run", name: sweep.rows[0]?.run ?? "", query: { with: sweep.rows.slice(1, 50).map((row) => row.run).join(",") } }) });
    const chart = card("Settings and scores", make("div", "scroll", plot));
    chart.querySelector(".scroll").tabIndex = 0;
    chart.querySelector(".scroll").setAttribute("role", "region");
    chart.querySelector(".scroll").setAttribute("aria-label", "Parallel coordinates of settings and scores; the table below has the same values");
    if (sweep.rows.length > 1) chart.head.append(all);
    this.place.replaceChildren(head, chart, make("section", "card", box));
  }

  #light(run) {
    for (const [name, line] of this.lines) {
      line.classList.toggle("lit", name === run);
      line.classList.toggle("dimmed", Boolean(run) && name !== run);
    }
    if (run && this.lines.has(run)) this.lines.get(run).parentNode.append(this.lines.get(run)); // above the others
  }

  // One axis for each setting and one for the score; a line for each run, the stronger the better its score.
  #parallel(sweep, scored) {
    const names = [...sweep.parameters, null];
    const width = Math.max(640, names.length * 190);
    const X = (at) => SIDE + (at / (names.length - 1)) * (width - 2 * SIDE);
    const axes = names.map((name) => axisOf(scored.map((row) => (name === null ? row.score : row.values[name]))));
    const Y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
    const svg = draw("svg", { class: "parallel", viewBox: `0 0 ${width} ${HEIGHT}`, width: "100%", role: "img", "aria-label": "Parallel coordinates" });
    const lines = draw("g", {});
    const by = [...scored].sort((one, other) => (sweep.lower ? other.score - one.score : one.score - other.score));
    by.forEach((row, place) => {
      const points = names.map((name, at) => `${X(at)},${Y(axes[at].place(name === null ? row.score : row.values[name])).toFixed(1)}`);
      const line = draw("path", { d: curve(points.map((one) => one.split(",").map(Number))), class: "tried" });
      const rank = by.length > 1 ? place / (by.length - 1) : 1;
      line.style.strokeOpacity = String(0.18 + 0.82 * rank ** 2);
      line.style.stroke = color("--accent");
      line.append(draw("title", {}, `${short(row.run)}: ${number(row.score)}`));
      this.lines.set(row.run, line);
      lines.append(line);
    });
    svg.append(lines);
    names.forEach((name, at) => {
      const label = name === null ? (sweep.measure ? spelled(sweep.measure) : "score") : name.split(".").slice(-2).join(".");
      svg.append(draw("line", { x1: X(at), x2: X(at), y1: TOP, y2: HEIGHT - BOTTOM, class: "axis" }));
      svg.append(draw("text", { x: X(at), y: 16, class: "name" }, short(label, 28)));
      for (const { share, text } of axes[at].ticks) svg.append(draw("text", { x: X(at) + 7, y: Y(share) + 4, class: "tick" }, short(text, 16)));
    });
    return svg;
  }

  themed() {
    if (this.data && this.sweep) this.#showOne(this.data);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }
}

const show = (value) => (typeof value === "number" ? number(value) : value === null || value === undefined ? "–" : short(value, 60));

// Numbers lie by their size, by their logarithm if they span more than a factor of 30; other values in order.
function axisOf(values) {
  const known = values.filter((one) => one !== null && one !== undefined);
  if (known.length && known.every((one) => typeof one === "number")) {
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const measure = low > 0 && high / low > 30 ? Math.log : (one) => one;
    const span = measure(high) - measure(low);
    const place = (one) => (typeof one !== "number" || !span ? 0.5 : (measure(one) - measure(low)) / span);
    const few = [...new Set(known)].sort((one, other) => one - other);
    const ticked = few.length <= 6 ? few : [low, high];
    return { place, ticks: ticked.map((one) => ({ share: place(one), text: number(one) })) };
  }
  const words = [...new Set(known.map(String))].sort();
  const place = (one) => (words.length > 1 ? Math.max(0, words.indexOf(String(one))) / (words.length - 1) : 0.5);
  return { place, ticks: words.slice(0, 12).map((one) => ({ share: place(one), text: one })) };
}

function curve(points) {
  return points.map(([x, y], at) => {
    if (!at) return `M${x} ${y}`;
    const [before, height] = points[at - 1];
    const middle = (before + x) / 2;
    return `C${middle} ${height} ${middle} ${y} ${x} ${y}`;
  }).join("");
}

export const showSweeps = (place, route, app) => new Sweeps(place, route, app);
