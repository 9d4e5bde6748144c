// All runs. Only the rows that can be seen are in the document, and a row that changes is changed in place.

import { button, debounced, draw, eachFrame, make, quiet, setText } from "./dom.js";
import { ago, compact, count, duration, money, number, percent, sampled, short, spelled, titled } from "./format.js";
import { address, adjust, listed } from "./route.js";

const COLUMNS = [
  // key, head, how a row is ordered by it, whether the largest is the first
  ["name", "Run", (row) => row.name, false],
  ["state", "State", (row) => STATES.indexOf(row.state), false],
  ["progress", "Progress", (row) => row.progress ?? row.step, true],
  ["loss", "Loss", (row) => row.loss, false],
  ["score", "Score", (row) => row.score?.value, true],
  ["speed", "Speed", (row) => row.units_per_second, true],
  ["left", "Time", (row) => row.seconds_left ?? row.seconds, true],
  ["cost", "Cost", (row) => row.dollars, true],
  ["created", "Started", (row) => row.created, true],
];
export const STATES = ["running", "waiting", "interrupted", "failed", "stopped", "finished", "damaged"];
const AHEAD = 8; // rows above and below what is seen
const MAX_TAGS = 10;

export function stateBadge(state) {
  const made = make("span", `badge ${STATES.includes(state) ? state : ""}`, short(state, 30));
  return made;
}

export function sparkline(values, width = 76, height = 22) {
  const known = values.filter((one) => Number.isFinite(one));
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "spark", "aria-hidden": "true" });
  if (known.length < 2) return svg;
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const points = known.map((one, at) => {
    const x = (at / (known.length - 1)) * (width - 2) + 1;
    const y = height - 2 - ((one - least) / (most - least || 1)) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  svg.append(draw("polyline", { points: points.join(" ") }));
  return svg;
}

// True if every word of the filter is in what people know the run by; `tag:x` and `state:x` ask for these alone.
function matches(row, words) {
  return words.every((word) => {
    if (word.startsWith("tag:")) return row.tags.some((tag) => tag.toLowerCase() === word.slice(4));
    if (word.startsWith("state:")) return row.state === word.slice(6);
    if (word.startsWith("sweep:")) return (row.sweep ?? "").toLowerCase() === word.slice(6);
    const known = [row.name, row.state, row.recipe, row.description, row.note, row.sweep, ...row.tags];
    return known.some((text) => text && text.toLowerCase().includes(word));
  });
}

class Runs {
  #rows = new Map(); // elements by the name of the run
  #order = [];
  #chosen = new Set();
  #from = 0;
  #to = 0;

  constructor(place, route, app) {
    Object.assign(this, { app, place });
    app.title("Runs");
    this.read(route);
    this.#build();
    this.refresh = eachFrame(() => this.#refresh());
    this.render = eachFrame(() => this.#render());
    addEventListener("scroll", this.render, { passive: true });
    addEventListener("resize", this.render);
    this.timer = setInterval(this.render, 30_000); // "3 min ago" ages
    this.refresh();
  }

  read({ query }) {
    this.text = query.get("q") ?? "";
    this.sort = query.get("sort") ?? "-created";
    this.#chosen = new Set(listed(query, "select"));
  }

  routed(route) {
    this.read(route);
    this.filter.value = this.text;
    this.refresh();
  }

  #build() {
    this.filter = Object.assign(make("input", "search"), {
      type: "search", value: this.text, placeholder: "Filter by name, tag, state or words", spellcheck: false,
    });
    this.filter.setAttribute("aria-label", "Filter runs");
    const type = debounced(80, () => this.#narrow(this.filter.value));
    this.filter.addEventListener("input", type);
    this.states = make("div", "chips");
    this.tags = make("div", "chips");
    this.tally = make("p", "dim");
    this.tally.setAttribute("role", "status");
    this.head = make("div", "row heads");
    this.head.setAttribute("role", "row");
    const all = make("span", "cell pick");
    all.setAttribute("role", "columnheader");
    all.append(make("span", "hidden", "Selected"));
    this.head.append(all);
    for (const [key, text] of COLUMNS) {
      const cell = make("span", `cell ${key}`, button("", text, () => this.#sortBy(key)));
      cell.setAttribute("role", "columnheader");
      cell.dataset.key = key;
      this.head.append(cell);
    }
    this.body = make("div", "rows");
    this.body.setAttribute("role", "rowgroup");
    const heads = make("div", "", this.head);
    heads.setAttribute("role", "rowgroup");
    this.table = make("div", "runs", heads, this.body);
    this.table.setAttribute("role", "table");
    this.table.setAttribute("aria-label", "Runs");
    this.sorter = make("label", "sorter", "Sort by ");
    const choice = make("select", "", ...COLUMNS.map(([key, text]) => Object.assign(make("option", "", text), { value: key })));
    choice.addEventListener("change", () => this.#sortBy(choice.value, true));
    this.sorter.append(choice);
    this.choice = choice;
    this.message = make("div");
    this.picked = make("div", "picked");
    this.picked.hidden = true;
    this.picked.setAttribute("role", "region");
    this.picked.setAttribute("aria-label", "Selected runs");
    const title = make("div", "page-head", make("h1", "", "Runs"), this.tally);
    this.place.append(title, make("div", "tools", this.filter, this.states, this.sorter), this.tags, this.table, this.message, this.picked);
  }

  #narrow(text) {
    this.text = text;
    adjust({ q: text });
    this.refresh();
  }

  #toggleWord(word) {
    const words = this.text.split(/\s+/).filter(Boolean);
    const kept = words.filter((one) => one.toLowerCase() !== word);
    if (kept.length === words.length) kept.push(word);
    this.filter.value = kept.join(" ");
    this.#narrow(this.filter.value);
  }

  #sortBy(key, keep = false) {
    const [, , , descending] = COLUMNS.find(([one]) => one === key);
    const first = descending ? `-${key}` : key;
    const second = descending ? key : `-${key}`;
    this.sort = this.sort === first && !keep ? second : first;
    adjust({ sort: this.sort === "-created" ? null : this.sort });
    this.refresh();
  }

  rowsChanged() {
    this.refresh();
  }

  failed() {
    this.refresh();
  }

  #refresh() {
    const all = [...this.app.rows.values()];
    const words = this.text.toLowerCase().split(/\s+/).filter(Boolean);
    const [key, down] = [this.sort.replace(/^-/, ""), this.sort.startsWith("-")];
    const by = (COLUMNS.find(([one]) => one === key) ?? COLUMNS.at(-1))[2];
    this.#order = all.filter((row) => matches(row, words)).sort((one, other) => {
      const [a, b] = [by(one), by(other)];
      // What is unknown comes last in both directions.
      if (a === null || b === null || a === undefined || b === undefined) return (a ?? null) === (b ?? null) ? 0 : a === null || a === undefined ? 1 : -1;
      const order = a < b ? -1 : a > b ? 1 : one.name < other.name ? -1 : 1;
      return down ? -order : order;
    });
    this.#chips(all);
    const running = all.filter((row) => row.state === "running").length;
    const part = this.#order.length === all.length ? `${count(all.length)} ${all.length === 1 ? "run" : "runs"}` : `${count(this.#order.length)} of ${count(all.length)} runs`;
    setText(this.tally, this.app.loaded ? `${part}${running ? `, ${running} running` : ""}` : "");
    for (const cell of this.head.querySelectorAll("[data-key]")) {
      const sorted = cell.dataset.key === key;
      if (sorted) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    this.choice.value = key;
    this.table.setAttribute("aria-rowcount", String(this.#order.length + 1));
    this.#say(all);
    this.#from = this.#to = -1; // draw, even if the same places are seen
    this.#render();
    this.#bar();
  }

  #say(all) {
    this.table.hidden = !this.#order.length;
    this.sorter.hidden = !this.#order.length;
    if (this.#order.length) this.message.replaceChildren();
    else if (!this.app.loaded) {
      if (!this.message.querySelector(".skeleton")) this.message.replaceChildren(...Array.from({ length: 6 }, () => make("div", "skeleton")));
    } else if (all.length) this.message.replaceChildren(quiet("No run matches this filter.", "Press Escape and / to change it."));
    else this.message.replaceChildren(quiet("There are no runs in this store yet.", "`packtrain run job.yaml` starts one; it appears here by itself."));
  }

  #chips(all) {
    const words = this.text.toLowerCase().split(/\s+/);
    const chip = (word, text, amount) => {
      const made = button("chip", text, () => this.#toggleWord(word));
      made.append(make("span", "amount", String(amount)));
      made.setAttribute("aria-pressed", String(words.includes(word)));
      return made;
    };
    const amounts = (values) => values.reduce((known, one) => known.set(one, (known.get(one) ?? 0) + 1), new Map());
    const states = amounts(all.map((row) => row.state));
    const tags = [...amounts(all.flatMap((row) => row.tags))].sort((one, other) => other[1] - one[1]).slice(0, MAX_TAGS);
    const key = JSON.stringify([[...states], tags, words]);
    if (key === this.chipKey) return; // rebuilding would take the focus away
    this.chipKey = key;
    const focused = document.activeElement?.dataset?.chip;
    this.states.replaceChildren(...STATES.filter((state) => states.has(state)).map((state) => {
      const made = chip(`state:${state}`, stateBadge(state), states.get(state));
      made.dataset.chip = state;
      return made;
    }));
    this.tags.replaceChildren(...tags.map(([tag, amount]) => {
      const made = chip(`tag:${tag.toLowerCase()}`, `# ${short(tag, 40)}`, amount);
      made.dataset.chip = `#${tag}`;
      return made;
    }));
    if (focused) [...this.place.querySelectorAll("[data-chip]")].find((one) => one.dataset.chip === focused)?.focus();
  }

  // Rows.

  get #height() {
    return matchMedia("(max-width: 760px)").matches ? 124 : 60;
  }

  #render() {
    if (!this.#order.length) {
      this.body.replaceChildren();
      this.#rows.clear();
      return;
    }
    const height = this.#height;
    const top = this.body.getBoundingClientRect().top;
    const from = Math.max(0, Math.floor(-top / height) - AHEAD);
    const to = Math.min(this.#order.length, Math.ceil((innerHeight - top) / height) + AHEAD);
    if (from !== this.#from || to !== this.#to) {
      this.body.style.height = `${this.#order.length * height}px`;
      [this.#from, this.#to] = [from, to];
    }
    const seen = this.#order.slice(from, to);
    const wanted = new Set(seen.map((row) => row.name));
    for (const [name, element] of this.#rows) {
      // Removing the row that has the focus would lose the place of those who use the keyboard.
      if (!wanted.has(name) && !element.contains(document.activeElement)) {
        element.remove();
        this.#rows.delete(name);
      }
    }
    seen.forEach((row, at) => {
      let element = this.#rows.get(row.name);
      if (!element) {
        element = this.#makeRow(row);
        this.#rows.set(row.name, element);
        this.body.append(element);
      }
      element.style.transform = `translateY(${(from + at) * height}px)`;
      element.setAttribute("aria-rowindex", String(from + at + 2));
      this.#fill(element, row);
    });
  }

  #makeRow(row) {
    const element = make("div", "row");
    element.setAttribute("role", "row");
    const cells = {};
    for (const key of ["pick", ...COLUMNS.map(([one]) => one)]) {
      cells[key] = make("span", `cell ${key}`);
      cells[key].setAttribute("role", "cell");
      element.append(cells[key]);
    }
    const box = Object.assign(make("input"), { type: "checkbox" });
    box.setAttribute("aria-label", `Select ${short(row.name)}`);
    box.addEventListener("change", () => this.#pick(row.name, box.checked));
    cells.pick.append(box);
    const link = make("a", "open", short(row.name, 120));
    link.href = address({ page: "run", name: row.name });
    link.dataset.run = row.name;
    const bar = make("span", "bar", make("i"));
    Object.assign(cells, { link, box, bar, detail: make("span", "detail") });
    cells.name.append(link, cells.detail);
    cells.progress.append(bar, make("span", "detail"));
    element.addEventListener("click", (event) => {
      if (!event.target.closest("a, input, button") && !getSelection().toString()) link.click();
    });
    element.cells = cells;
    return element;
  }

  #fill(element, row) {
    const { cells } = element;
    cells.box.checked = this.#chosen.has(row.name);
    element.classList.toggle("chosen", cells.box.checked);
    if (element.row === row) {
      setText(cells.created.firstChild, ago(row.created, this.app.now()));
      return;
    }
    element.row = row;
    const tags = row.tags.slice(0, 4).map((tag) => make("span", "tag", short(tag, 30)));
    cells.detail.replaceChildren(...tags, short(row.note || row.description, 120));
    cells.detail.title = short(row.description, 500);
    cells.state.replaceChildren(stateBadge(row.state));
    cells.state.title = short(row.reason, 300);
    const share = row.progress ?? (row.state === "finished" ? 1 : 0);
    cells.bar.className = `bar ${STATES.includes(row.state) ? row.state : ""}`;
    cells.bar.firstChild.style.transform = `scaleX(${Math.max(0, Math.min(1, share))})`;
    setText(cells.progress.lastChild, row.goal ? `${compact(row.step)} / ${compact(row.goal)}` : row.unit ? `step ${compact(row.step)}` : `${compact(row.step)} commits`);
    cells.progress.title = row.progress === null ? "" : percent(row.progress);
    pair(cells.loss, number(row.loss), "");
    cells.loss.prepend(sparkline(row.sparkline ?? []));
    const samples = sampled(row.score?.samples);
    const isLong = samples && row.score.name.startsWith("valid."); // which nearly all are
    pair(cells.score, number(row.score?.value), row.score ? [isLong ? spelled(row.score.name) : titled(row.score), samples].filter(Boolean).join(", ") : "");
    cells.score.title = row.score ? `${titled(row.score)} ${samples && `of ${samples}`}` : "";
    cells.loss.title = row.loss === null ? "" : `mean of the last ${row.loss_steps} steps`;
    pair(cells.speed, compact(row.units_per_second), row.units_per_second === null ? "" : `${row.unit || "units"}/s`);
    pair(cells.left, row.seconds ? duration(row.seconds) : "–", row.seconds_left === null ? "" : `${duration(row.seconds_left)} left`);
    pair(cells.cost, money(row.dollars), row.dollars_left === null || row.dollars === null ? "" : `${money(row.dollars_left)} left`);
    pair(cells.created, ago(row.created, this.app.now()), row.machines ? `${row.machines} ${row.machines === 1 ? "machine" : "machines"}` : "");
  }

  // Selection.

  #pick(name, chosen) {
    if (chosen) this.#chosen.add(name);
    else this.#chosen.delete(name);
    adjust({ select: [...this.#chosen].join(",") });
    this.#rows.get(name)?.classList.toggle("chosen", chosen);
    this.#bar();
  }

  #bar() {
    const chosen = [...this.#chosen].filter((name) => this.app.rows.has(name));
    this.picked.hidden = !chosen.length;
    if (!chosen.length) return;
    const text = `${chosen.length} selected`;
    this.picked.replaceChildren(
      make("span", "", text),
      button("primary", chosen.length > 1 ? "Overlay" : "Open", () => this.#overlay()),
      button("plain", "Clear", () => {
        this.#chosen.clear();
        adjust({ select: null });
        this.refresh();
      }),
    );
  }

  #overlay() {
    const [name, ...others] = [...this.#chosen].filter((one) => this.app.rows.has(one));
    if (name) this.app.go({ page: "run", name, query: { with: others.join(",") } });
  }

  key(event) {
    const focused = document.activeElement?.closest?.(".row")?.cells ? document.activeElement.closest(".row").row.name : null;
    const place = this.#order.findIndex((row) => row.name === focused);
    const actions = {
      "/": () => this.filter.focus(),
      j: () => this.#focus(place + 1),
      ArrowDown: focused && (() => this.#focus(place + 1)),
      k: () => this.#focus(Math.max(0, place - 1)),
      ArrowUp: focused && (() => this.#focus(Math.max(0, place - 1))),
      x: focused && (() => this.#pickFocused(focused)),
      o: () => this.#overlay(),
    };
    if (!actions[event.key]) return false;
    actions[event.key]();
    return true;
  }

  #pickFocused(name) {
    const { box } = this.#rows.get(name).cells;
    box.checked = !box.checked;
    this.#pick(name, box.checked);
  }

  #focus(place) {
    const row = this.#order[place];
    if (!row) return;
    const height = this.#height;
    const top = this.body.getBoundingClientRect().top + place * height;
    if (top < 120) scrollBy(0, top - 120);
    else if (top + height > innerHeight - 60) scrollBy(0, top + height - innerHeight + 60);
    this.#render();
    this.#rows.get(row.name)?.cells.link.focus({ preventScroll: true });
  }

  close() {
    removeEventListener("scroll", this.render);
    removeEventListener("resize", this.render);
    clearInterval(this.timer);
  }
}

function pair(cell, main, detail) {
  cell.replaceChildren(make("span", "figure", main), make("span", "detail", detail));
}

export const showRuns = (place, route, app) => new Runs(place, route, app);
