// Charts that share an x axis, a zoom and a cursor. uPlot gives axes, ticks, cursor and selection. The lines are drawn
// here from their own arrays: uPlot wants one x array for all series of a chart, and runs differ in their steps.

import { eachFrame, make, setText } from "./dom.js";
import { compact, duration, number, round, shortDuration } from "./format.js";

const LEFT = 54; // of all charts, so that they and the time line are aligned
const RIGHT = 20;
const READOUT = 3; // more lines than this are listed beside the cursor
export const UNSEEN = 1 / 300; // of the width: less than that, a pixel or two, is hardly seen
const STALE = 6000; // milliseconds after which a picture that has hardly changed is drawn all the same
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400]
  .concat([2, 3, 7, 14, 28].map((days) => days * 86400));
export const PADDING = { left: LEFT, right: RIGHT };

export const X_KINDS = {
  step: { label: "Step", show: compact, read: (x) => `step ${number(Math.round(x), 9)}` },
  time: { label: "Time", show: shortDuration, read: duration, increments: TIMES },
  epoch: { label: "Epoch", show: (x) => String(Number(x.toPrecision(4))), read: (x) => `epoch ${x.toFixed(2)}` },
};

// A canvas does not know custom properties nor themes: the color of an element is the one of the current theme.
const probe = document.body.appendChild(Object.assign(document.createElement("i"), { hidden: true }));
const colors = new Map();
export const forgetColors = () => colors.clear();
export function color(name) {
  if (!colors.has(name)) {
    probe.style.color = name.startsWith("--") ? `var(${name})` : name;
    colors.set(name, getComputedStyle(probe).color);
  }
  return colors.get(name);
}

// Runs beyond the eighth get colors that are far apart on the circle.
export function runColor(place) {
  return place < 8 ? `--run-${place}` : `hsl(${(place * 137.5) % 360} 55% 50%)`;
}

// The position of the point of a sorted array that is nearest to the value.
export function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle;
    else high = middle;
  }
  return high >= 0 && Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}

// What stands on the same x axis. `range` is what is zoomed to, or null.
export class Group {
  members = new Set();
  range = null;
  point = null;
  kind = "step";
  marks = [];

  constructor(zoomed = () => {}) {
    this.zoomed = zoomed;
    this.refresh = eachFrame(() => this.#refresh());
    this.grow = eachFrame(() => this.#grow());
  }

  #refresh() {
    this.drawn = { range: this.shown, time: performance.now() };
    this.members.forEach((member) => member.refresh());
  }

  // After points were added: to draw is most of the work, so it is done when a pixel changes.
  #grow() {
    const { range = [0, 0], time = 0 } = this.drawn ?? {};
    const [low, high] = this.shown;
    const more = low === range[0] ? high - range[1] : Infinity;
    if (more > (high - low) * UNSEEN || performance.now() - time > STALE) this.#refresh();
    else this.members.forEach((member) => member.grow?.());
  }

  get extent() {
    let [low, high] = [Infinity, -Infinity];
    for (const member of this.members) {
      const [from, to] = member.extent ?? [Infinity, -Infinity];
      low = Math.min(low, from);
      high = Math.max(high, to);
    }
    return low < high ? [low, high] : Number.isFinite(low) ? [low, low + 1] : [0, 1];
  }

  get shown() {
    return this.range ?? this.extent;
  }

  show(point, from = null) {
    this.point = point;
    for (const member of this.members) if (member !== from) member.showPoint(point);
  }

  zoom(from, to) {
    const [low, high] = this.extent;
    const whole = from === null || (from <= low && to >= high) || !(to > from);
    this.range = whole ? null : [Math.max(from, low), Math.min(to, high)];
    if (this.range && this.range[0] >= this.range[1]) this.range = null;
    this.refresh();
    this.zoomed(this.range);
  }

  // By a factor around the cursor, or the middle.
  magnify(factor) {
    const [low, high] = this.shown;
    const middle = this.point !== null && this.point >= low && this.point <= high ? this.point : (low + high) / 2;
    this.zoom(middle - (middle - low) * factor, middle + (high - middle) * factor);
  }

  pan(share) {
    if (!this.range) return;
    const [[low, high], [least, most]] = [this.range, this.extent];
    const by = Math.max(least - low, Math.min(most - high, (high - low) * share));
    this.zoom(low + by, high + by);
  }

  // True if the key was for the charts.
  key(event) {
    const [low, high] = this.shown;
    const stride = ((high - low) / 100) * (event.shiftKey ? 10 : 1);
    const at = this.point ?? high;
    const actions = {
      ArrowLeft: () => this.show(Math.max(low, at - stride)),
      ArrowRight: () => this.show(Math.min(high, at + stride)),
      Home: () => this.show(low),
      End: () => this.show(high),
      "+": () => this.magnify(0.5),
      "=": () => this.magnify(0.5),
      "-": () => this.magnify(2),
      0: () => this.zoom(null),
      "<": () => this.pan(-0.25),
      ">": () => this.pan(0.25),
      Escape: () => (this.range ? this.zoom(null) : this.show(null)),
    };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey || event.altKey) return false;
    actions[event.key]();
    return true;
  }
}

// A line: { label, color, x, y, width, alpha, dots, dash, silent }; `silent` ones have no value in the readout.
export class Chart {
  lines = [];
  #plot = null;
  #width = 0;

  constructor(group, { title, height = 190, show = number, tick = show === number ? round : show, zero = false, top = null, stacked = false, log = false }) {
    Object.assign(this, { group, title, height, show, tick, zero, top, stacked, log });
    this.readout = make("p", "readout");
    this.tip = make("div", "tip");
    this.tip.hidden = true;
    this.box = make("div", "plot");
    this.heading = make("h3", "", title);
    this.element = make("figure", "chart", make("figcaption", "", this.heading, this.readout), this.box);
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", `${title}: chart. Arrow keys move the cursor, plus and minus zoom.`);
    this.box.addEventListener("keydown", (event) => {
      if (group.key(event)) {
        event.preventDefault();
        event.stopPropagation();
      }
    });
    this.observer = new ResizeObserver(() => this.#resize());
    this.observer.observe(this.box);
    this.seen = new IntersectionObserver((entries) => {
      this.visible = entries.at(-1).isIntersecting;
      if (this.visible && this.stale) this.refresh();
    }, { rootMargin: "200px" });
    this.seen.observe(this.element);
    group.members.add(this);
  }

  close() {
    this.observer.disconnect();
    this.seen.disconnect();
    this.group.members.delete(this);
    this.#plot?.destroy();
    this.#plot = null;
  }

  // After a change of scale or theme: uPlot keeps what it was made with.
  remake() {
    this.#plot?.destroy();
    this.#plot = null;
    this.refresh();
  }

  get extent() {
    let [low, high] = [Infinity, -Infinity];
    for (const { x } of this.lines) {
      if (!x.length) continue;
      low = Math.min(low, x[0]);
      high = Math.max(high, x[x.length - 1]);
    }
    return [low, high];
  }

  #resize() {
    const width = Math.floor(this.box.clientWidth);
    if (width === this.#width || width < 80) return;
    this.#width = width;
    if (this.#plot) this.#plot.setSize({ width, height: this.height });
    else this.refresh();
  }

  #make() {
    const axis = (more) => ({
      stroke: color("--dim"), font: "11px Inter, system-ui, sans-serif", ticks: { show: false },
      grid: { stroke: color("--hair"), width: 1 }, ...more,
    });
    const kind = X_KINDS[this.group.kind];
    const options = {
      width: this.#width, height: this.height, padding: [8, RIGHT, 0, 0], legend: { show: false },
      scales: { x: { time: false, auto: false }, y: { auto: false, distr: this.log ? 3 : 1 } },
      axes: [
        axis({ size: 26, gap: 6, space: 70, grid: { show: false }, values: (_, all) => all.map(kind.show), ...(kind.increments && { incrs: kind.increments }) }),
        axis({ size: LEFT, gap: 8, space: 32, values: (_, all) => all.map((one) => (one === null ? "" : this.tick(one))) }),
      ],
      series: [{}, { points: { show: false } }],
      cursor: {
        y: false, points: { show: false }, drag: { x: true, y: false, setScale: false, dist: 6 },
        bind: { dblclick: () => () => this.group.zoom(null) },
      },
      hooks: {
        draw: [(plot) => this.#draw(plot)],
        setCursor: [(plot) => this.#pointed(plot)],
        setSelect: [(plot) => this.#selected(plot)],
      },
    };
    this.#plot = new window.uPlot(options, [[0, 1], [null, null]], this.box);
    this.#plot.over.append(this.tip);
    this.#scrub(this.#plot.over);
  }

  // A finger that moves sideways moves the cursor; uPlot knows the mouse only.
  #scrub(over) {
    over.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse" || !this.#plot) return;
      this.group.show(this.#plot.posToVal(event.clientX - over.getBoundingClientRect().left, "x"));
    });
  }

  refresh() {
    this.element.classList.toggle("bare", !this.lines.some(({ x }) => x.length));
    this.stale = !this.visible; // what nobody sees is drawn when it is scrolled to
    if (!this.#width || this.stale) return;
    if (!this.#plot) this.#make();
    const [min, max] = this.group.shown;
    const [low, high] = this.#heights(min, max);
    this.#plot.batch(() => {
      this.#plot.setData([[min, max], [null, null]], false);
      this.#plot.setScale("x", { min, max });
      this.#plot.setScale("y", { min: low, max: high });
    });
    this.#plot.redraw(false, true);
    this.showPoint(this.group.point);
  }

  // Shows the latest values, and draws only if one of them is outside of what is drawn.
  grow() {
    if (!this.#plot || this.stale) return;
    const { min, max } = this.#plot.scales.y;
    if (this.lines.some(({ y }) => y.length && y.at(-1) !== null && (y.at(-1) < min || y.at(-1) > max))) this.refresh();
    else if (this.group.point === null) this.#read(null, false);
  }

  #heights(from, to) {
    let [low, high] = [Infinity, -Infinity];
    for (const line of this.lines) {
      const [first, last] = inside(line.x, from, to);
      for (let at = first; at < last; at += 1) {
        const y = line.y[at];
        if (y === null || (this.log && y <= 0)) continue;
        if (y < low) low = y;
        if (y > high) high = y;
      }
    }
    if (low > high) return this.log ? [0.1, 1] : [0, this.top ?? 1];
    if (this.log) return low === high ? [low / 2, high * 2] : [low, high];
    if (this.stacked) high = Math.min(high, 2 * typical(this.lines.at(-1), from, to)); // a pause is cut off, or all else would be flat
    if (this.zero) low = Math.min(0, low);
    if (this.top) return [low, Math.max(this.top, high)];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [this.zero && low === 0 ? 0 : low - room, high + room];
  }

  #draw(plot) {
    const { ctx, bbox } = plot;
    const [from, to] = [plot.scales.x.min, plot.scales.x.max];
    const X = (value) => plot.valToPos(value, "x", true);
    const Y = (value) => plot.valToPos(value, "y", true);
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - 4 * ratio, bbox.top - 4 * ratio, bbox.width + 8 * ratio, bbox.height + 8 * ratio); // dots at the edge stay round
    ctx.clip();
    for (const mark of this.group.marks) {
      ctx.strokeStyle = color(mark.bad ? "--bad" : "--dim");
      ctx.globalAlpha = 0.45;
      ctx.lineWidth = ratio;
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(X(mark.x), bbox.top);
      ctx.lineTo(X(mark.x), bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    ctx.globalAlpha = 1;
    if (this.stacked) this.#drawStack(ctx, X, Y, from, to);
    else for (const line of this.lines) this.#drawLine(ctx, line, X, Y, from, to, ratio);
    ctx.restore();
  }

  #drawLine(ctx, line, X, Y, from, to, ratio) {
    const [first, last] = inside(line.x, from, to);
    ctx.globalAlpha = line.alpha ?? 1;
    ctx.strokeStyle = ctx.fillStyle = color(line.color);
    ctx.lineWidth = (line.width ?? 1.6) * ratio;
    ctx.setLineDash(line.dash ? [5 * ratio, 4 * ratio] : []);
    ctx.lineJoin = last - first > 200 ? "bevel" : "round"; // round ones take most of the time, and many are not seen
    ctx.beginPath();
    let pen = false;
    for (let at = Math.max(0, first - 1); at < Math.min(line.x.length, last + 1); at += 1) {
      const y = line.y[at];
      if (y === null || (this.log && y <= 0)) {
        pen = false;
        continue;
      }
      if (pen) ctx.lineTo(X(line.x[at]), Y(y));
      else ctx.moveTo(X(line.x[at]), Y(y));
      pen = true;
    }
    ctx.stroke();
    ctx.setLineDash([]);
    if (!(line.dots || last - first === 1) || last - first > 60) return;
    for (let at = first; at < last; at += 1) {
      if (line.y[at] === null) continue;
      ctx.beginPath();
      ctx.arc(X(line.x[at]), Y(line.y[at]), 2.4 * ratio, 0, 7);
      ctx.fill();
    }
  }

  // Each line's y is the top of its band, from the bottom of the stack to its top.
  #drawStack(ctx, X, Y, from, to) {
    for (let number = this.lines.length - 1; number >= 0; number -= 1) {
      const { x, y, color: name } = this.lines[number];
      const [first, last] = inside(x, from, to);
      const [start, end] = [Math.max(0, first - 1), Math.min(x.length, last + 1)];
      if (end <= start) continue;
      ctx.fillStyle = color(name);
      ctx.beginPath();
      ctx.moveTo(X(x[start]), Y(0));
      for (let at = start; at < end; at += 1) ctx.lineTo(X(x[at]), Y(y[at]));
      ctx.lineTo(X(x[end - 1]), Y(0));
      ctx.fill();
    }
  }

  #pointed(plot) {
    if (!plot.cursor.event) return; // set by another chart
    const { left } = plot.cursor;
    const point = left >= 0 ? plot.posToVal(left, "x") : null;
    this.group.show(point, this);
    this.#read(point, true);
  }

  #selected(plot) {
    const { left, width } = plot.select;
    if (width < 6) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.group.zoom(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
  }

  showPoint(point) {
    if (!this.#plot) return;
    const left = point === null ? -10 : this.#plot.valToPos(point, "x");
    this.#plot.setCursor({ left, top: left < 0 ? -10 : 10 }, false);
    this.#read(point, this.box.contains(document.activeElement));
  }

  // The values at the cursor, or the latest ones.
  #read(point, here) {
    const told = this.lines.filter((line) => !line.silent && line.x.length);
    const few = told.length <= READOUT;
    const values = told.map((line) => {
      const at = point === null ? line.x.length - 1 : nearest(line.x, point);
      return { line, value: line.read ? line.read[at] : line.y[at], x: line.x[at] };
    });
    if (few) readouts(this.readout, values, this.show, told.length > 1);
    else setText(this.readout, point === null ? "" : X_KINDS[this.group.kind].read(point));
    this.tip.hidden = point === null || !here || (few && !this.stacked);
    if (!this.tip.hidden) this.#showTip(point, values);
  }

  #showTip(point, values) {
    const order = this.stacked ? [...values].reverse() : [...values].sort((one, other) => (other.value ?? -Infinity) - (one.value ?? -Infinity));
    const rows = order.filter(({ value }) => !this.stacked || value > 0).slice(0, 12).map(({ line, value }) => {
      const swatch = make("i", "swatch");
      swatch.style.background = color(line.color);
      return make("li", "", swatch, make("span", "", line.label), make("b", "", this.show(value)));
    });
    if (order.length > 12 && !this.stacked) rows.push(make("li", "dim", `and ${order.length - 12} more`));
    this.tip.replaceChildren(make("p", "", X_KINDS[this.group.kind].read(point)), make("ul", "", ...rows));
    const [left, width] = [this.#plot.valToPos(point, "x"), this.#plot.over.clientWidth];
    this.tip.style.transform = left > width / 2 ? `translateX(calc(${left}px - 100% - 12px))` : `translateX(${left + 12}px)`;
  }
}

function readouts(place, values, show, named) {
  if (place.children.length !== values.length) {
    place.replaceChildren(...values.map(() => make("span", "", make("i", "swatch"), make("span", "label"), make("b"))));
  }
  values.forEach(({ line, value }, at) => {
    const [swatch, label, figure] = place.children[at].children;
    swatch.hidden = !named;
    swatch.style.background = color(line.color);
    setText(label, named ? line.label : "");
    setText(figure, show(value));
  });
}

// The half-open range of positions whose x lies in the interval.
function inside(x, from, to) {
  const find = (value, orEqual) => {
    let [low, high] = [0, x.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] < value || (orEqual && x[middle] === value)) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return [find(from, false), find(to, true)];
}

// What nineteen of twenty values in the interval stay below.
function typical({ x, y }, from, to) {
  const sorted = y.slice(...inside(x, from, to)).sort((one, other) => one - other);
  return sorted[Math.floor(0.95 * (sorted.length - 1))] || Infinity;
}

// An exponential mean that does not begin at zero. The weight is between 0 and 1.
export function smoothed(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return value;
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}
