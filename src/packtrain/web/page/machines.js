// The machines of a run, now and over time. All machines of one resource share a chart: the odd one stands out.

import { Asker } from "./api.js";
import { Chart, Group, color, runColor } from "./chart.js";
import { make, quiet, table } from "./dom.js";
import { bytes, percent, short } from "./format.js";

const PAUSE = 3000; // milliseconds between two questions
const rate = (value) => (value === null || value === undefined ? "–" : `${bytes(value)}/s`);
const RATE = { tick: bytes };
const GONE = ["lost", "left"];
const RESOURCES = [
  ["cpu", "CPU", percent, { top: 1 }],
  ["gpu", "GPU", percent, { top: 1 }],
  ["memory", "Memory", percent, { top: 1 }],
  ["gpu_memory", "GPU memory", percent, { top: 1 }],
  ["sent", "Network sent", rate, RATE],
  ["received", "Network received", rate, RATE],
  ["disk_read", "Disk read", rate, RATE],
  ["disk_written", "Disk written", rate, RATE],
  ["disk_free", "Disk free", bytes, {}],
];

export class Machines {
  #asker = new Asker();
  #asked = 0;
  #charts = new Map();

  constructor(place, view) {
    Object.assign(this, { place, view });
    this.group = new Group(() => {});
    this.group.kind = "time";
    this.now = make("section", "card");
    this.grid = make("div", "grid");
    place.append(make("div", "skeleton tall"), this.now, this.grid);
    this.now.hidden = true;
    this.#load();
  }

  changed(what) {
    if (!what.has("machines") && !what.has("events")) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#load(), Math.max(0, PAUSE - (performance.now() - this.#asked)));
  }

  async #load() {
    this.#asked = performance.now();
    try {
      const answer = await this.#asker.ask("api/machines", { run: this.view.name, points: 300 });
      if (answer === null || this.closed) return;
      this.nodes = answer.nodes;
      this.#show();
    } catch (error) {
      if (!this.closed) this.view.app.trouble(error);
    }
  }

  #show() {
    this.place.querySelector(".skeleton")?.remove();
    this.place.querySelector(".quiet")?.remove();
    if (!this.nodes.length) {
      this.now.hidden = true;
      this.place.prepend(quiet("No machine has joined yet."));
      return;
    }
    const has = RESOURCES.filter(([key]) => this.nodes.some((node) => node[key]?.some((one) => one !== null)));
    this.now.hidden = false;
    const focused = this.now.contains(document.activeElement);
    // Machines that are gone use nothing: what they used is in the charts.
    const isOver = this.nodes.every((node) => !node.now || GONE.includes(node.state));
    this.now.replaceChildren(make("div", "card-head", make("h2", "", isOver ? "Machines" : "Now")), this.#table(isOver ? [] : has));
    if (focused) this.now.querySelector(".scroll")?.focus();
    const start = Math.min(...this.nodes.map((node) => node.time[0] ?? Infinity));
    for (const [key, title, show, options] of has) {
      if (!this.#charts.has(key)) {
        const chart = new Chart(this.group, { title, show, height: 150, zero: true, ...options });
        chart.element.classList.add("card", "third");
        this.grid.append(chart.element);
        this.#charts.set(key, chart);
      }
      this.#charts.get(key).lines = this.nodes.filter((node) => node[key]?.length).map((node) => ({
        label: short(node.hostname || node.node, 40), color: runColor(this.nodes.indexOf(node)), width: 1.4,
        x: node.time.map((time) => time - start), y: node[key],
      }));
    }
    this.group.refresh();
  }

  #table(resources) {
    const rows = this.nodes.map((node, place) => {
      const swatch = make("i", "swatch");
      swatch.style.background = color(runColor(place));
      const name = make("span", "machine", swatch, make("span", "", make("b", "", short(node.hostname || node.node, 60)), make("small", "", devices(node))));
      name.title = programs(node);
      const gone = !node.now || GONE.includes(node.state);
      const cells = resources.map(([key, , show]) => {
        const value = node.now?.[key] ?? null;
        if (value === null || gone) return make("span", "dim", "–");
        return show === percent ? meter(value) : show(value);
      });
      return [name, make("span", `badge ${{ working: "running", lost: "failed" }[node.state] ?? "stopped"}`, short(node.state, 30)), String(node.workers ?? "–"), ...cells];
    });
    const box = table("machines", ["Machine", "State", ">Workers", ...resources.map(([, title, show]) => (show === percent ? title : `>${title}`))], rows);
    box.setAttribute("aria-label", "Machines");
    return box;
  }

  themed() {
    for (const chart of this.#charts.values()) chart.remake();
    if (this.nodes) this.#show();
  }

  key(event) {
    return !/^[1-9]$|^Home$|^End$/.test(event.key) && this.group.key(event);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    this.#asker.close();
    for (const chart of this.#charts.values()) chart.close();
  }
}

function devices({ now, node, facts }) {
  const gpus = facts?.gpus?.length ? facts.gpus : now?.gpus ?? [];
  if (gpus.length) return `${gpus.length} × ${short(gpus[0].name, 40)}`;
  return facts?.cores ? `${facts.cores} cores, ${short(facts.processor, 40)}` : short(node, 40);
}

function programs({ facts }) {
  return short(Object.entries(facts?.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", "), 200);
}

function meter(share) {
  const bar = make("span", `meter ${share > 0.97 ? "full" : ""}`, make("i"));
  bar.firstChild.style.transform = `scaleX(${Math.max(0, Math.min(1, share))})`;
  return make("span", "metered", bar, make("span", "", percent(share)));
}
