// One run: who it is, how far it is, and a tab for each kind of question.

import { ask } from "./api.js";
import { make, quiet, setText } from "./dom.js";
import { ago, capital, compact, count, duration, money, number, percent, sampled, short, titled } from "./format.js";
import { Answers } from "./answers.js";
import { Curves } from "./curves.js";
import { Checkpoints, Job } from "./job.js";
import { Logs } from "./logs.js";
import { Machines } from "./machines.js";
import { Samples } from "./samples.js";
import { address, current } from "./route.js";
import { STATES, stateBadge } from "./runs.js";
import { RECENT_STEPS } from "./terms.js";

const TABS = [
  ["curves", "Curves", Curves],
  ["answers", "Answers", Answers],
  ["machines", "Machines", Machines],
  ["samples", "Samples", Samples],
  ["logs", "Logs", Logs],
  ["checkpoints", "Checkpoints", Checkpoints],
  ["job", "Job", Job],
];
// What the detail of a run is made of: when one of these has changed, it is asked for again.
const IN_DETAIL = ["events", "checkpoints"];
const SLOW = 10_000; // milliseconds between two questions for what only counting changes, such as the goodput

class RunView {
  #tab = null;
  #versions = {};
  #asking = false;
  #again = false;
  #asked = 0;

  constructor(place, route, app) {
    Object.assign(this, { app, place, name: route.name, detail: null });
    app.title(short(this.name));
    this.content = make("div", "tab-content");
    this.content.id = "panel";
    this.#build();
    this.#choose(route.tab || "curves");
    this.#facts();
    this.#ask();
  }

  get row() {
    return this.app.rows.get(this.name) ?? this.detail;
  }

  #build() {
    const back = Object.assign(make("a", "back", "Runs"), { href: "#/" });
    this.heading = make("h1", "", short(this.name, 200));
    this.badge = make("span");
    this.line = make("p", "dim");
    this.facts = make("dl", "facts");
    this.tabs = make("nav", "tabs");
    this.tabs.setAttribute("aria-label", "Of this run");
    for (const [key, text] of TABS) {
      const link = make("a", "", text);
      link.dataset.tab = key;
      this.tabs.append(link);
    }
    const title = make("div", "run-head", back, make("div", "title", this.heading, this.badge), this.line);
    this.place.append(title, this.facts, this.tabs, this.content);
  }

  #choose(key) {
    const found = TABS.find(([one]) => one === key) ?? TABS[0];
    this.#tab?.close();
    this.tabName = found[0];
    for (const link of this.tabs.children) {
      if (link.dataset.tab === found[0]) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.#links();
    this.content.replaceChildren();
    this.#tab = new found[2](this.content, this);
    if (this.detail) this.#tab.detailed?.(this.detail);
    // On a phone the tabs scroll sideways; the chosen one must be seen.
    this.tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  }

  // A tab's link keeps the runs that are compared.
  #links() {
    const { query } = current();
    for (const link of this.tabs.children) {
      link.href = address({ page: "run", name: this.name, tab: link.dataset.tab === "curves" ? "" : link.dataset.tab, query: { with: query.get("with") } });
    }
  }

  routed(route) {
    const key = route.tab || "curves";
    if (key !== this.tabName) this.#choose(key);
    else {
      this.#links();
      this.#tab.routed?.(route);
    }
  }

  // Shows that links of other tabs keep up with what was chosen here.
  adjusted() {
    this.#links();
  }

  async #ask() {
    if (this.#asking) {
      this.#again = true;
      return;
    }
    this.#asking = true;
    this.#asked = performance.now();
    try {
      const detail = await ask(`api/runs/${encodeURIComponent(this.name)}`);
      if (this.closed) return;
      this.detail = detail;
      this.#facts();
      this.#tab.detailed?.(detail);
    } catch (error) {
      if (!this.closed) this.#refuse(error);
    } finally {
      this.#asking = false;
      if (this.#again && !this.closed) {
        this.#again = false;
        this.#ask();
      }
    }
  }

  #refuse(error) {
    if (error.status !== 404) {
      this.app.trouble(error);
      return;
    }
    this.#tab?.close();
    this.missing = true;
    const all = Object.assign(make("a", "", "All runs"), { href: "#/" });
    this.place.replaceChildren(quiet(`There is no run ${short(this.name)} in this store.`, short(error.message, 300)), make("p", "quiet", all));
  }

  rowsChanged(rows) {
    if (this.missing) {
      if (this.app.rows.has(this.name)) location.reload(); // it has just been started
      return;
    }
    if (!rows || rows.some((row) => row.name === this.name)) this.#facts();
    this.#tab.rowsChanged?.(rows);
  }

  versionsChanged(name, versions) {
    if (name !== this.name || this.missing) return;
    const changed = Object.keys(versions).filter((key) => versions[key] !== this.#versions[key]);
    this.#versions = versions;
    if (IN_DETAIL.some((key) => changed.includes(key)) || performance.now() - this.#asked > SLOW) this.#ask();
    this.#tab.changed?.(new Set(changed));
  }

  // Nobody knows what was missed while the server was away.
  reconnected() {
    if (this.missing) return;
    if (this.connectedBefore) {
      this.#ask();
      this.#tab.changed?.(new Set(["points", "events", "machines", "logs", "samples", "checkpoints"]));
    }
    this.connectedBefore = true;
  }

  themed() {
    this.#tab.themed?.();
  }

  key(event) {
    const chosen = TABS[Number(event.key) - 1];
    if (event.key === "u") location.hash = "#/";
    else if (this.#tab.key?.(event)) return true;
    else if (chosen) this.tabs.children[Number(event.key) - 1].click();
    else return false;
    return true;
  }

  #facts() {
    const { row } = this;
    if (!row || this.missing) return;
    const started = ago(row.created, this.app.now());
    const words = JSON.stringify([row.state, row.tags, row.reason, row.description, row.note, started]);
    if (words !== this.words) {
      this.words = words;
      this.badge.replaceChildren(stateBadge(row.state));
      const tags = row.tags.map((tag) => make("span", "tag", short(tag, 40)));
      const reason = row.reason && !["running", "waiting"].includes(row.state) ? `${short(row.reason, 300)} · ` : "";
      this.line.replaceChildren(...tags, `${reason}${short(row.description, 300)} · started ${started}`);
      if (row.note) this.line.append(make("span", "note", short(row.note, 500)));
    }
    const { score, best, test } = row;
    const scored = (one, ...more) => [capital(titled(one)), number(one.value), [sampled(one.samples), ...more].filter(Boolean).join(", ")];
    const isBest = !best || !score || best.value === score.value;
    const facts = [
      ["Progress", row.progress === null ? count(row.step) : percent(row.progress), row.goal ? `step ${count(row.step)} of ${count(row.goal)}` : row.progress === null ? (row.unit ? "steps" : "commits") : row.unit ? `step ${count(row.step)}` : `${count(row.step)} commits`, row.progress],
      ["Training loss", number(row.loss), row.loss === null ? "" : `mean of the last ${row.loss_steps === 1 ? "step" : `${row.loss_steps} steps`}`],
      score ? scored(score, isBest ? "" : `best ${number(best.value)} at step ${count(best.step)}`) : ["Score", "–", ""],
      ["Speed", compact(row.units_per_second), row.unit ? `${row.unit}/s, last ${row.step > 1 ? `${Math.min(RECENT_STEPS, row.step)} steps` : "step"}` : ""],
      ["Time", duration(row.seconds), row.seconds_left === null ? "" : `${duration(row.seconds_left)} left`],
      ["Cost", money(row.dollars), row.dollars === null ? "no price known" : row.dollars_left === null ? "" : `${money(row.dollars_left)} left`],
      ["Machines", row.machines === null ? "–" : String(row.machines), row.state === "running" || !row.machines ? "" : "at the end"],
    ];
    if (test && test.name !== score?.name) facts.splice(3, 0, scored(test));
    if (this.facts.children.length !== facts.length) {
      this.facts.replaceChildren(...facts.map(() => make("div", "", make("dt"), make("dd", "", make("b"), make("small")))));
    }
    facts.forEach(([label, value, detail, share], at) => {
      const [dt, dd] = this.facts.children[at].children;
      setText(dt, label);
      setText(dd.children[0], value);
      setText(dd.children[1], detail);
      if (share === undefined || share === null) return;
      const bar = dd.querySelector(".bar") ?? dd.appendChild(make("span", "bar", make("i")));
      bar.className = `bar ${STATES.includes(row.state) ? row.state : ""}`;
      bar.firstChild.style.transform = `scaleX(${Math.max(0, Math.min(1, share)).toFixed(3)})`;
    });
  }

  close() {
    this.closed = true;
    this.#tab?.close();
  }
}

export const showRun = (place, route, app) => new RunView(place, route, app);
