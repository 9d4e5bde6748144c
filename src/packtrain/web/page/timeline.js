// What happened to a run, on the x axis of its curves: generations, faults, checkpoints, evaluations.

import { button, draw, make, setText } from "./dom.js";
import { clock as clockTime, short } from "./format.js";
import { PADDING, X_KINDS, nearest } from "./chart.js";

const ROUTINE = ["checkpoint", "evaluation", "superseded", "machine"];
const MAX_LISTED = 200;

// Which step (or epoch) a run was at, at a time; and the other way around.
export class Clock {
  #times = [];
  #steps = [];
  #epochs = [];
  #known = [];
  created = 0;

  // Roughly, from what the records of generations and checkpoints say.
  learn(detail, created) {
    this.created = created ?? detail.generations[0]?.time ?? detail.created ?? 0;
    if (this.#times.length) return;
    const places = [...detail.generations, ...detail.checkpoints].filter(({ time }) => time).map(({ time, step }) => [time, step]);
    this.#known = places.sort((one, other) => one[0] - other[0]);
  }

  // Exactly, from points of the run.
  measure(series) {
    const steps = series.find(({ name, x }) => /^(train|log)\.step$/.test(name) && x.length);
    const epochs = series.find(({ name }) => /^(train|log)\.epoch$/.test(name));
    if (!steps?.x.length) return;
    [this.#times, this.#steps] = [steps.x, steps.y];
    this.#epochs = epochs?.x.length ? steps.x.map((time) => between(epochs.x, epochs.y, time)) : [];
  }

  get #table() {
    return this.#times.length ? [this.#times, this.#steps] : [this.#known.map(([time]) => time), this.#known.map(([, step]) => step)];
  }

  x(time, kind) {
    if (kind === "time") return time - this.created;
    const [times, steps] = this.#table;
    if (!times.length) return 0;
    return between(times, kind === "epoch" ? (this.#epochs.length ? this.#epochs : steps) : steps, time);
  }

  ofStep(step, kind) {
    const [times, steps] = this.#table;
    if (!steps.length) return 0;
    if (kind === "time") return between(steps, times, step) - this.created;
    return this.#epochs.length ? between(steps, this.#epochs, step) : step;
  }
}

function between(xs, ys, x) {
  const at = nearest(xs, x);
  const other = xs[at] <= x ? at + 1 : at - 1;
  if (other < 0 || other >= xs.length || xs[other] === xs[at]) return ys[at];
  const share = (x - xs[at]) / (xs[other] - xs[at]);
  return share < 0 || share > 1 ? ys[at] : ys[at] + share * (ys[other] - ys[at]);
}

export class Timeline {
  #width = 0;

  constructor(group, clock, app) {
    Object.assign(this, { group, clock, app, generations: [], events: [] });
    this.svg = draw("svg", { class: "timeline", height: 58, "aria-hidden": "true" });
    this.line = draw("line", { class: "cursor", y1: 0, y2: 58, visibility: "hidden" });
    this.box = make("div", "lane", this.svg);
    this.list = make("ol", "events");
    this.tally = make("p", "readout");
    this.all = false;
    this.toggle = button("plain", "Show all", () => {
      this.all = !this.all;
      setText(this.toggle, this.all ? "Show fewer" : "Show all");
      this.#showList();
    });
    const head = make("div", "card-head", make("h2", "", "Timeline"), this.tally, this.toggle);
    this.element = make("section", "card full", head, this.box, this.list);
    this.observer = new ResizeObserver(() => {
      const width = this.box.clientWidth;
      if (width === this.#width) return;
      this.#width = width;
      this.refresh();
    });
    this.observer.observe(this.box);
    group.members.add(this);
  }

  close() {
    this.observer.disconnect();
    this.group.members.delete(this);
  }

  learn({ generations, events, result }) {
    const key = `${generations.length} ${events.length} ${Boolean(result)}`;
    if (key === this.known) return;
    Object.assign(this, { known: key, generations, events, ended: Boolean(result) });
    this.faults = events.filter(isFault).length;
    const plural = (amount, word) => `${amount} ${word}${amount === 1 ? "" : "s"}`;
    setText(this.tally, `${plural(generations.length, "generation")}, ${this.faults ? plural(this.faults, "warning") : "no warnings"}`);
    this.element.hidden = !generations.length && !events.length;
    this.refresh();
    this.#showList();
  }

  refresh() {
    if (!this.#width) return;
    const [from, to] = this.group.shown;
    const room = this.#width - PADDING.left - PADDING.right;
    const place = (x) => PADDING.left + ((x - from) / (to - from)) * room;
    this.place = place;
    const clip = (x) => Math.max(PADDING.left, Math.min(PADDING.left + room, x));
    const parts = [];
    const { kind } = this.group;
    this.generations.forEach((one, at) => {
      const next = this.generations[at + 1];
      const left = clip(place(this.clock.x(one.time, kind)));
      const right = next ? clip(place(this.clock.x(next.time, kind))) : clip(place(Math.max(this.group.extent[1], from)));
      if (right - left < 0.5) return;
      const fault = at > 0 && one.after_fault;
      const bar = draw("rect", { x: left, y: 6, width: Math.max(1, right - left - 2), height: 20, rx: 3, class: fault ? "generation after-fault" : "generation" });
      bar.append(draw("title", {}, `Generation ${one.number}: ${one.members.length} machines. ${short(one.reason, 200)}`));
      parts.push(bar);
      const label = right - left > 120 ? `${one.number} · ${one.members.length} ${one.members.length === 1 ? "machine" : "machines"}` : right - left > 18 ? String(one.number) : "";
      if (label) parts.push(draw("text", { x: left + 7, y: 20 }, label));
    });
    let last = {};
    for (const event of this.events) {
      const x = place(this.clock.x(event.time, kind));
      if (x < PADDING.left - 1 || x > PADDING.left + room + 1) continue;
      const type = isFault(event) ? "fault" : event.kind === "checkpoint" ? "saved" : event.kind === "evaluation" ? "evaluated" : "other";
      if (type !== "fault" && Math.abs(x - (last[type] ?? -99)) < 3) continue; // marks upon marks tell nothing
      last = { ...last, [type]: x };
      parts.push(mark(type, x, event));
    }
    this.svg.setAttribute("width", this.#width);
    this.svg.replaceChildren(...parts, this.line);
    this.showPoint(this.group.point);
  }

  showPoint(point) {
    if (point === null || !this.place) return void this.line.setAttribute("visibility", "hidden");
    const x = this.place(point);
    this.line.setAttribute("visibility", x >= PADDING.left ? "visible" : "hidden");
    this.line.setAttribute("x1", x);
    this.line.setAttribute("x2", x);
  }

  #showList() {
    const chosen = this.all ? this.events : this.events.filter((event) => isFault(event) || !ROUTINE.includes(event.kind));
    this.toggle.hidden = this.events.length === chosen.length && !this.all;
    const seen = chosen.slice(-(this.all ? MAX_LISTED : 8)).reverse();
    this.list.replaceChildren(...seen.map((event) => {
      const go = button("event", make("time", "", clockTime(event.time)), () => this.group.show(this.clock.x(event.time, this.group.kind)));
      go.append(make("span", `kind ${isFault(event) ? "bad" : ""}`, event.kind), make("span", "words", short(event.text, 400)));
      go.title = X_KINDS[this.group.kind].read(this.clock.x(event.time, this.group.kind));
      return make("li", "", go);
    }));
  }
}

// The end of a run is told by its summary, not among its warnings.
const isFault = ({ kind, display }) => display === "warning" || kind === "failed";

function mark(type, x, event) {
  const shapes = {
    fault: () => draw("path", { d: `M${x} 33l5.5 9.5h-11z` }),
    saved: () => draw("rect", { x: x - 1, y: 34, width: 2, height: 8, rx: 1 }),
    evaluated: () => draw("circle", { cx: x, cy: 48, r: 2 }),
    other: () => draw("circle", { cx: x, cy: 38, r: 3 }),
  };
  const made = shapes[type]();
  made.setAttribute("class", type);
  made.append(draw("title", {}, `${clockTime(event.time)} ${event.kind}: ${short(event.text, 200)}`));
  return made;
}
