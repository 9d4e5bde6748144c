// The curves of a run, and of others over it. Only what is new is asked for, and appended.

import { Asker, ask } from "./api.js";
import { button, choices, debounced, make, quiet, select, setText } from "./dom.js";
import { capital, compact, duration, number, short, spelled } from "./format.js";
import { Chart, Group, UNSEEN, X_KINDS, color, runColor, smoothed } from "./chart.js";
import { adjust, current, listed } from "./route.js";
import { SPANS } from "./terms.js";
import { Clock, Timeline } from "./timeline.js";

const POINTS = 1000; // of a line; more than a chart has pixels would not be seen
const MAX_RUNS = 50;
const MAX_LOGGED = 12; // charts of a program's numbers, before one asks for more
const SMOOTH = 0.6;
const KINDS = ["train", "valid", "test"];
const LEAST_PAUSE = 1500; // milliseconds between two questions for new points ...
const MOST_PAUSE = 6000; // ... of a run that is so long that a second of it is less than a pixel
const READING_PAUSE = 100; // ... and while the server is still reading a long history
const SLOW_PAUSE = 8000; // ... and for what can only be had as a whole: bands and clock

// A chart for each number of a program, losses first and wide.
function logged(names) {
  const own = names.filter((name) => name.startsWith("log.") && name !== "log.epoch");
  const isLoss = (name) => /loss$/i.test(name);
  own.sort((one, other) => isLoss(other) - isLoss(one));
  return own.slice(0, MAX_LOGGED).map((name) => ({ title: spelled(name), names: [name], log: isLoss(name), wide: isLoss(name) }));
}

// What is drawn in which chart. The score that counts comes first.
function plan(names, measure) {
  const has = (name) => names.includes(name);
  const scores = names.filter((name) => /^valid\./.test(name) && name !== "valid.loss" && !/_seconds$/.test(name));
  scores.sort((one, other) => (other === `valid.${measure}`) - (one === `valid.${measure}`));
  const [first, ...rest] = scores;
  const score = (name) => ({ title: capital(spelled(name)), names: [name, name.replace("valid", "test")].filter(has) });
  const charts = [
    { title: "Loss", names: ["train.loss", "valid.loss"].filter(has), log: true, wide: true, alone: !first },
    ...(first ? [{ ...score(first), wide: true }] : []),
    { title: "Throughput", names: ["train.throughput"].filter(has), show: compact, zero: true },
    { title: "Learning rate", names: ["train.rate"].filter(has), zero: true, plain: true },
    { title: "Gradient norm", names: ["train.gradient_norm"].filter(has), log: true },
    ...rest.slice(0, 3).map(score),
    ...logged(names),
  ].filter((chart) => chart.names.length);
  const drawn = new Set(charts.flatMap((chart) => chart.names));
  const more = names.filter((name) => !drawn.has(name) && !/\.(epoch|elapsed_seconds)$/.test(name));
  return { charts, more };
}

// Three in a row; one or two that are left over fill theirs.
function breadth(place, amount) {
  const left = amount % 3;
  if (!left || place < amount - left) return "third";
  return left === 1 ? "full" : "wide";
}

export class Curves {
  #asker = new Asker();
  #cursor = null;
  #busy = false;
  #stale = false;
  #asked = 0;
  #pause = LEAST_PAUSE;
  #reading = false; // the server has not read all of the history yet
  #reach = null; // how far the curves went, and when
  #lines = new Map(); // [x, y] by run and name
  #charts = [];
  #origins = new Map();
  #slow = 0;

  constructor(place, view) {
    Object.assign(this, { place, view, app: view.app });
    this.#read();
    this.zoomed = debounced(120, () => {
      const { range } = this.group;
      adjust({ from: range && Number(range[0].toPrecision(8)), to: range && Number(range[1].toPrecision(8)) });
      this.#load();
    });
    this.group = new Group(() => {
      this.reset.disabled = !this.group.range;
      this.zoomed();
    });
    this.group.kind = this.x;
    this.group.range = this.range;
    this.clock = new Clock();
    this.#build();
  }

  #read() {
    const { query } = current();
    this.x = query.get("x") in X_KINDS ? query.get("x") : "step";
    this.smooth = query.has("smooth") ? Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0)) : SMOOTH;
    this.log = query.get("log") === "1";
    this.more = listed(query, "more");
    this.others = listed(query, "with").filter((name) => name !== this.view.name).slice(0, MAX_RUNS - 1);
    const [from, to] = ["from", "to"].map((key) => (query.has(key) ? Number(query.get(key)) : NaN));
    this.range = from < to ? [from, to] : null;
  }

  get runs() {
    return [this.view.name, ...this.others];
  }

  #build() {
    this.axis = choices("Horizontal axis", Object.entries(X_KINDS).map(([key, { label }]) => [key, label]), this.x, (x) => {
      adjust({ x: x === "step" ? null : x, from: null, to: null });
      this.routed();
    });
    const range = Object.assign(make("input"), { type: "range", min: 0, max: 0.98, step: 0.01, value: this.smooth });
    range.setAttribute("aria-label", "Smoothing");
    this.amount = make("output", "", this.smooth.toFixed(2));
    range.addEventListener("input", () => {
      this.smooth = Number(range.value);
      setText(this.amount, this.smooth.toFixed(2));
      adjust({ smooth: this.smooth === SMOOTH ? null : String(this.smooth) });
      this.#draw();
    });
    const log = Object.assign(make("input"), { type: "checkbox", checked: this.log });
    log.addEventListener("change", () => {
      adjust({ log: log.checked ? 1 : null });
      this.routed();
    });
    this.reset = button("plain", "Reset zoom", () => this.group.zoom(null), "Show everything (0)");
    this.reset.disabled = !this.range;
    this.extra = select("Add a chart", [["", "Add a chart…"]], "", (name) => {
      adjust({ more: [...new Set([...this.more, name])].join(",") });
      this.routed();
    });
    this.legend = make("div", "legend");
    this.adding = make("div", "adding");
    const zoom = make("div", "choices", button("", "−", () => this.group.magnify(2), "Zoom out (−)"), button("", "+", () => this.group.magnify(0.5), "Zoom in (+)"));
    const tools = make("div", "tools", this.axis, make("label", "slider", "Smoothing", range, this.amount), make("label", "check", log, "Log scale"), zoom, this.reset, this.extra, this.adding);
    this.grid = make("div", "grid");
    this.grid.append(...Array.from({ length: 2 }, () => make("div", "skeleton tall wide")));
    this.place.append(tools, this.legend, this.grid);
    this.#showLegend();
  }

  #showLegend() {
    const chips = this.runs.map((name, place) => {
      const swatch = make("i", "swatch");
      swatch.style.background = color(runColor(place));
      const chip = make("span", "run-chip", swatch);
      if (place === 0) chip.append(make("b", "", short(name, 60)));
      else {
        chip.append(make("span", "", short(name, 60)));
        chip.append(button("remove", "×", () => this.#overlay(this.others.filter((one) => one !== name)), `Remove ${short(name, 60)}`));
      }
      return chip;
    });
    this.adder = Object.assign(make("input", "adder"), { type: "text", placeholder: "Overlay a run…", spellcheck: false, autocomplete: "off" });
    this.adder.setAttribute("aria-label", "Overlay a run");
    this.adder.setAttribute("list", "overlay-names");
    const list = make("datalist");
    list.id = "overlay-names";
    const fill = () => {
      const wanted = this.adder.value.toLowerCase();
      const found = [...this.app.rows.keys()].filter((name) => !this.runs.includes(name) && name.toLowerCase().includes(wanted));
      list.replaceChildren(...found.slice(0, 50).map((name) => Object.assign(make("option"), { value: name })));
    };
    this.adder.addEventListener("focus", fill);
    const add = () => {
      const name = this.adder.value.trim();
      if (this.app.rows.has(name) && !this.runs.includes(name)) this.#overlay([...this.others, name]);
    };
    this.adder.addEventListener("input", (event) => {
      fill();
      if (event.inputType === "insertReplacementText" || event.inputType === undefined) add(); // chosen from the list
    });
    this.adder.addEventListener("keydown", (event) => {
      if (event.key === "Enter") add();
    });
    this.legend.replaceChildren(...(this.others.length ? chips : []));
    this.adding.replaceChildren(this.adder, list);
  }

  #overlay(others) {
    adjust({ with: others.join(",") });
    this.view.adjusted();
    this.routed();
    this.adder.focus();
  }

  routed() {
    const before = JSON.stringify([this.x, this.others, this.more, this.log]);
    this.#read();
    this.axis.choose(this.x);
    this.group.kind = this.x;
    this.group.range = this.range;
    this.reset.disabled = !this.range;
    if (JSON.stringify([this.x, this.others, this.more, this.log]) !== before) {
      this.#showLegend();
      this.#arrange();
    }
    this.#load();
  }

  #none() {
    const { result, recipe } = this.view.detail ?? {};
    if (!result) return quiet("No measurements yet.", "Curves appear with the first steps.");
    return quiet("No measurements.", recipe ? "The run ended before its first step." : "The program logged no numbers.");
  }

  detailed(detail) {
    this.clock.learn(detail, this.#origins.get(detail.name));
    const names = JSON.stringify(detail.names.length ? detail.names : Boolean(detail.result)); // what is said instead of curves
    if (names !== this.names) {
      this.names = names;
      this.#arrange();
      this.#load();
      this.#loadWhole();
    }
    this.timeline?.learn(detail);
    this.#mark();
  }

  // Makes the charts that the run's measurements ask for.
  #arrange() {
    if (!this.view.detail) return;
    const { names } = this.view.detail;
    const { charts, more } = plan(names, this.view.detail.measure);
    for (const name of this.more) charts.push({ title: capital(spelled(name)), names: [name], removable: name });
    this.extra.fill([["", "Add a chart…"], ...more.filter((name) => !this.more.includes(name)).map((name) => [name, short(name, 60)])], "");
    this.extra.hidden = !more.length;
    for (const { chart } of this.#charts) chart.close();
    this.bands?.close();
    this.timeline?.close();
    const small = charts.filter((one) => !one.wide);
    this.#charts = charts.map((one) => {
      const seconds = one.names[0].endsWith("_seconds");
      const chart = new Chart(this.group, { title: one.title, height: one.wide ? 240 : 170, show: one.show ?? (seconds ? duration : number), zero: one.zero, log: this.log && one.log });
      chart.element.classList.add("card", one.alone ? "full" : one.wide ? "wide" : breadth(small.indexOf(one), small.length));
      if (one.removable) chart.heading.after(button("remove", "×", () => {
        adjust({ more: this.more.filter((name) => name !== one.removable).join(",") });
        this.routed();
      }, `Remove ${one.title}`));
      return { ...one, chart };
    });
    this.bands = new Chart(this.group, { title: "Where each step’s time goes", height: 190, show: duration, zero: true, stacked: true });
    this.bands.element.classList.add("card", "full");
    this.bandKey = make("ul", "key");
    this.bands.element.append(this.bandKey);
    this.timeline = new Timeline(this.group, this.clock, this.app);
    const parts = [...this.#charts.map(({ chart }) => chart.element), this.bands.element, this.timeline.element];
    this.grid.replaceChildren(...(names.length ? parts : [this.#none(), this.timeline.element]));
    this.timeline.learn(this.view.detail);
    this.#drawBands();
    this.#mark();
    this.#draw();
  }

  // Where generations started, as lines through all charts.
  #mark() {
    const generations = this.view.detail?.generations ?? [];
    const marks = generations.slice(1).map(({ time, after_fault: bad }) => ({ x: this.clock.x(time, this.x), bad }));
    if (JSON.stringify(marks) === JSON.stringify(this.group.marks)) return;
    this.group.marks = marks;
    this.group.refresh();
  }

  // Points.

  #origin(run) {
    return this.x === "time" ? (this.#origins.get(run) ?? 0) : 0;
  }

  // Over time, every run starts at its own first step.
  async #learnOrigins() {
    const unknown = this.runs.filter((run) => !this.#origins.has(run));
    if (this.x !== "time" || !unknown.length) return;
    const { series } = await ask("api/series", { run: unknown, name: ["train.step", "log.step"], x: "time", points: 2 });
    for (const { run, x } of series) if (x.length) this.#origins.set(run, x[0]);
    this.clock.created = this.#origins.get(this.view.name) ?? this.clock.created;
  }

  get #names() {
    return [...new Set(this.#charts.flatMap(({ names }) => names))];
  }

  // All of what is shown anew: after a change of axis, zoom or runs.
  async #load() {
    if (!this.#charts.length) return;
    this.#busy = true;
    const { range, runs, x } = { range: this.group.range, runs: this.runs, x: this.x };
    const points = Math.max(150, Math.round(Math.min(POINTS, (4 * POINTS) / runs.length)));
    const margin = range ? (range[1] - range[0]) * 0.02 : 0;
    try {
      await this.#learnOrigins();
      // Times are those of clocks: runs that are drawn from the same start need different ranges of them.
      const parts = range && x === "time" && runs.length > 1 ? runs.map((run) => [run]) : [runs];
      const answers = await Promise.all(parts.map((part, at) => {
        const origin = this.#origin(part[0]);
        const parameters = { run: part, name: this.#names, x, points, from: range ? range[0] - margin + origin : null, to: range ? range[1] + margin + origin : null };
        return at === 0 ? this.#asker.ask("api/series", parameters) : ask("api/series", parameters);
      }));
      if (answers[0] === null || this.closed) return;
      if (!range) this.#lines.clear();
      const whole = range ? new Map() : this.#lines;
      this.closeUp = range ? whole : null;
      for (const { series } of answers) for (const one of series) whole.set(`${one.run}\n${one.name}`, this.#moved(one));
      this.#cursor = range ? this.#cursor : answers[0].cursor;
      this.#draw();
      this.#learnReading(answers);
    } catch (error) {
      this.#refuse(error);
    } finally {
      this.#busy = false;
      this.#asked = performance.now();
    }
    this.#follow(LEAST_PAUSE);
    if (range && !this.#lines.size) this.#loadExtent();
  }

  // A link to a part of the curves must know the whole, too, to zoom out.
  async #loadExtent() {
    try {
      const answer = await ask("api/series", { run: this.runs, name: this.#names, x: this.x, points: 300 });
      for (const one of answer.series) this.#lines.set(`${one.run}\n${one.name}`, this.#moved(one));
      this.#draw();
    } catch (error) {
      this.#refuse(error);
    }
  }

  #refuse(error) {
    if (!this.closed) this.app.trouble(error);
  }

  #moved({ run, x, y }) {
    const origin = this.#origin(run);
    return { x: origin ? x.map((one) => one - origin) : x, y };
  }

  #again(milliseconds) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#append(), milliseconds);
  }

  changed(what) {
    if (!what.has("points") && !what.has("events")) return;
    this.#stale = true;
    const pause = this.#pause - (performance.now() - this.#asked);
    if (pause > 0) this.#again(pause);
    else this.#append();
    if (performance.now() - this.#slow > SLOW_PAUSE) this.#loadWhole();
  }

  async #append() {
    if (this.#busy || this.closed || !this.#charts.length || this.group.range) return;
    if (this.#cursor === null) return void this.#load();
    // What has grown long is asked for anew, as few points again.
    if ([...this.#lines.values()].some(({ x }) => x.length > 4 * POINTS)) return void this.#load();
    this.#busy = true;
    this.#stale = false;
    try {
      const points = Math.max(150, Math.round(Math.min(POINTS, (4 * POINTS) / this.runs.length)));
      const answer = await this.#asker.ask("api/series", { run: this.runs, name: this.#names, x: this.x, points, since: this.#cursor });
      if (answer === null || this.closed) return;
      if (answer.reset) {
        this.#busy = false;
        return void this.#load();
      }
      this.#cursor = answer.cursor;
      for (const one of answer.series) {
        const known = this.#lines.get(`${one.run}\n${one.name}`);
        const { x, y } = this.#moved(one);
        if (!known) this.#lines.set(`${one.run}\n${one.name}`, { x, y });
        else {
          // An answer may overlap what came before.
          const last = known.x.length ? known.x[known.x.length - 1] : -Infinity;
          x.forEach((value, at) => {
            if (value > last) {
              known.x.push(value);
              known.y.push(y[at]);
            }
          });
        }
      }
      this.#draw(!this.#reading);
      this.#pace();
      this.#learnReading([answer]);
    } catch (error) {
      this.#refuse(error);
    } finally {
      this.#busy = false;
      this.#asked = performance.now();
      this.#follow(this.#pause);
    }
  }

  #learnReading(answers) {
    this.#reading = answers.some(({ series }) => series.some((one) => one.complete === false));
    this.grid.setAttribute("aria-busy", String(this.#reading));
  }

  #follow(pause) {
    if (this.#reading) this.#again(READING_PAUSE);
    else if (this.#stale) this.#again(pause);
  }

  // As often as a pixel changes.
  #pace() {
    const [[low, high], now] = [this.group.extent, performance.now()];
    const rate = this.#reach ? (high - this.#reach.high) / (now - this.#reach.time) : 0;
    this.#pause = rate > 0 ? Math.max(LEAST_PAUSE, Math.min(MOST_PAUSE, (UNSEEN * (high - low)) / rate)) : LEAST_PAUSE;
    this.#reach = { high, time: now };
  }

  #draw(grown = false) {
    const single = this.runs.length === 1;
    for (const { chart, names, plain } of this.#charts) {
      chart.lines = [];
      this.runs.forEach((run, place) => names.forEach((name) => {
        const whole = this.#lines.get(`${run}\n${name}`);
        const line = this.group.range && this.closeUp?.get(`${run}\n${name}`) ? this.closeUp.get(`${run}\n${name}`) : whole;
        if (!line) return;
        const kind = name.split(".")[0];
        const isStep = kind === "train" || kind === "log";
        const shown = { label: single ? (kind === "log" ? spelled(name) : kind) : names.length > 1 ? `${short(run, 40)} ${kind}` : short(run, 40), color: runColor(single ? Math.max(0, KINDS.indexOf(kind)) : place), x: line.x, y: line.y };
        if (!isStep || (kind === "log" && line.x.length < 20)) Object.assign(shown, { dots: true, dash: !single && kind === "valid" && names[0].startsWith("train"), width: 1.8 });
        else if (this.smooth && !plain) {
          chart.lines.push({ ...shown, alpha: 0.22, silent: true, width: 1.2 });
          shown.y = smoothed(line.y, this.smooth);
        } else shown.width = single ? 1.5 : 1.3;
        chart.lines.push(shown);
      }));
    }
    if (grown) this.group.grow();
    else this.group.refresh();
  }

  // Bands and clock.

  async #loadWhole() {
    this.#slow = performance.now();
    try {
      const [bands, clock] = await Promise.all([
        ask("api/bands", { run: this.view.name, points: 300 }),
        ask("api/series", { run: this.view.name, name: ["train.step", "train.epoch", "log.step", "log.epoch"], x: "time", points: 400 }).catch(() => ({ series: [] })),
      ]);
      if (this.closed) return;
      this.bandData = bands;
      this.clock.measure(clock.series);
      this.#drawBands();
      this.timeline?.refresh();
      this.#mark();
    } catch (error) {
      this.#refuse(error);
    }
  }

  #drawBands() {
    if (!this.bandData || !this.bands) return;
    const { step, spans } = this.bandData;
    const x = this.x === "step" ? step : step.map((one) => this.clock.ofStep(one, this.x));
    const shown = SPANS.filter(({ name }) => spans[name]?.some((one) => one > 0));
    let top = new Array(step.length).fill(0);
    this.bands.lines = shown.map(({ name, label, color: filled }) => {
      top = top.map((height, at) => height + (spans[name][at] ?? 0));
      return { label: capital(label), color: filled, x, y: top, read: spans[name] };
    });
    this.bands.element.hidden = !shown.length;
    const shares = shown.map(({ name }) => spans[name].reduce((sum, one) => sum + (one ?? 0), 0));
    const total = shares.reduce((sum, one) => sum + one, 0) || 1;
    this.bandKey.replaceChildren(...shown.map(({ label, color: filled }, at) => {
      const swatch = make("i", "swatch");
      swatch.style.background = filled;
      return make("li", "", swatch, make("span", "", capital(label)), make("b", "", `${(100 * shares[at] / total).toFixed(shares[at] / total < 0.1 ? 1 : 0)}%`));
    }));
    this.bands.refresh();
  }

  themed() {
    this.#showLegend();
    for (const { chart } of this.#charts) chart.remake();
    this.bands?.remake();
    this.#drawBands();
    this.timeline?.refresh();
  }

  key(event) {
    if (event.key === "/") {
      this.adder.focus();
      return true;
    }
    // Digits choose a tab, except the one that shows everything.
    return !/^[1-9]$|^Home$|^End$/.test(event.key) && this.group.key(event);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    this.#asker.close();
    for (const { chart } of this.#charts) chart.close();
    this.bands?.close();
    this.timeline?.close();
  }
}
