// The lines that workers wrote: newest at the bottom, older ones when scrolled to, new ones as they come.

import { Asker } from "./api.js";
import { button, debounced, make, quiet, select, setText } from "./dom.js";
import { clean, clock, short } from "./format.js";
import { adjust, current } from "./route.js";

const PAGE = 200;
const MOST = 3000; // lines in the document; beyond, the far end is dropped and fetched again when wanted
const PAUSE = 800;

export class Logs {
  #asker = new Asker();
  #newer = new Asker();
  #before = null;
  #after = null;
  #busy = false;
  #asked = 0;

  constructor(place, view) {
    Object.assign(this, { place, view });
    this.#read();
    this.search = Object.assign(make("input", "search"), { type: "search", placeholder: "Search the logs", value: this.query.search, spellcheck: false });
    this.search.setAttribute("aria-label", "Search the logs");
    this.search.addEventListener("input", debounced(250, () => this.#choose({ search: this.search.value })));
    this.rank = select("Rank", [["", "All ranks"]], "", (rank) => this.#choose({ rank }));
    this.stream = select("Stream", [["", "Both streams"], ["out", "stdout"], ["err", "stderr"]], this.query.stream, (stream) => this.#choose({ stream }));
    this.node = select("Machine", [["", "All machines"]], "", (node) => this.#choose({ node }));
    this.tally = make("p", "dim");
    this.tally.setAttribute("role", "status");
    this.lines = make("ol", "lines");
    this.box = make("div", "log", this.lines);
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "log");
    this.box.setAttribute("aria-live", "off"); // a log that is read out never ends
    this.box.setAttribute("aria-label", "Log lines");
    this.box.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    this.latest = button("plain latest", "Follow ↓", () => this.#end());
    this.latest.hidden = true;
    place.append(make("div", "tools", this.search, this.rank, this.stream, this.node, this.tally), make("div", "log-frame", this.box, this.latest));
    this.following = true;
    this.#fillChoices();
    this.#load();
  }

  #read() {
    const { query } = current();
    this.query = Object.fromEntries(["search", "rank", "stream", "node"].map((key) => [key, query.get(key) ?? ""]));
  }

  #choose(changes) {
    adjust(changes);
    this.routed();
  }

  routed() {
    const before = JSON.stringify(this.query);
    this.#read();
    if (document.activeElement !== this.search) this.search.value = this.query.search;
    this.#fillChoices();
    if (JSON.stringify(this.query) !== before) this.#load();
  }

  detailed() {
    this.#fillChoices();
  }

  #fillChoices() {
    const last = this.view.detail?.generations ?? [];
    const nodes = [...new Set(last.flatMap(({ members }) => members))];
    const ranks = Math.max(this.view.detail?.goodput?.ranks?.length ?? 0, Number(this.query.rank) + 1 || 0);
    this.rank.fill([["", "All ranks"], ...Array.from({ length: Math.min(ranks, 1024) }, (_, rank) => [String(rank), `Rank ${rank}`])], this.query.rank);
    this.node.fill([["", "All machines"], ...nodes.map((name) => [name, short(name, 40)])], this.query.node);
    this.stream.value = this.query.stream;
  }

  async #load() {
    this.lines.replaceChildren();
    this.#newer.close();
    [this.#before, this.#after] = [null, null]; // or scrolling would ask for lines before those of another search
    setText(this.tally, "Searching…");
    try {
      const answer = await this.#asker.ask("api/logs", { run: this.view.name, ...this.query, limit: PAGE });
      if (answer === null || this.closed) return;
      [this.#before, this.#after] = [answer.before, answer.after];
      this.place.querySelector(".quiet")?.remove();
      this.lines.append(...answer.lines.map((line) => this.#line(line)));
      this.#end();
      this.#say();
      // A rare word may be far back: the server answers in parts.
      if (answer.before && this.lines.children.length < 50) this.#older();
    } catch (error) {
      setText(this.tally, "");
      if (!this.closed) this.view.app.trouble(error);
    }
  }

  #say() {
    const amount = this.lines.children.length;
    const filtered = Object.values(this.query).some(Boolean);
    setText(this.tally, amount ? `${amount} ${amount === 1 ? "line" : "lines"}${this.#before ? ", more above" : ""}` : this.#before ? "Searching further back…" : "");
    this.place.querySelector(".quiet")?.remove();
    if (!amount && !this.#before) this.box.before(quiet(filtered ? "No line matches." : "Nothing was written yet."));
  }

  // Only a part of what is there fits a line; a long one is opened by its line.
  #line({ time, rank, node, stream, text }) {
    const who = rank === null || rank === undefined ? short(node, 24) : `${rank}`;
    const words = make("span", "text");
    const shown = clean(text);
    const wanted = this.query.search.toLowerCase();
    const at = wanted ? shown.toLowerCase().indexOf(wanted) : -1;
    if (at < 0) words.textContent = shown;
    else words.append(shown.slice(0, at), make("mark", "", shown.slice(at, at + wanted.length)), shown.slice(at + wanted.length));
    const made = make("li", stream === "err" ? "err" : "", make("time", "", time ? clock(time) : ""), make("span", "who", who), words);
    made.title = `${short(node, 60)}${rank === null || rank === undefined ? "" : `, rank ${rank}`}, ${stream === "err" ? "stderr" : "stdout"}`;
    return made;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    this.following = scrollHeight - scrollTop - clientHeight < 40;
    this.latest.hidden = this.following;
    if (scrollTop < 200) this.#older();
  }

  #end() {
    this.following = true;
    this.box.scrollTop = this.box.scrollHeight;
    this.latest.hidden = true;
  }

  async #older() {
    if (this.#busy || !this.#before) return;
    this.#busy = true;
    try {
      const answer = await this.#asker.ask("api/logs", { run: this.view.name, ...this.query, before: this.#before, limit: PAGE });
      if (answer === null || this.closed) return;
      this.#before = answer.before;
      const height = this.box.scrollHeight - this.box.scrollTop;
      this.lines.prepend(...answer.lines.map((line) => this.#line(line)));
      this.box.scrollTop = this.box.scrollHeight - height; // what was seen stays where it was
      if (this.lines.children.length > MOST) {
        while (this.lines.children.length > MOST) this.lines.lastChild.remove();
        this.#after = null; // the end is not here any more; following loads it anew
      }
      this.#say();
    } catch (error) {
      if (!this.closed) this.view.app.trouble(error);
    } finally {
      this.#busy = false;
    }
    if (this.#before && this.lines.children.length < 50 && !this.closed) this.#older();
  }

  changed(what) {
    if (!what.has("logs")) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#append(), Math.max(0, PAUSE - (performance.now() - this.#asked)));
  }

  async #append() {
    if (this.closed || !this.#after) return;
    this.#asked = performance.now();
    try {
      const answer = await this.#newer.ask("api/logs", { run: this.view.name, ...this.query, after: this.#after, limit: 1000 });
      if (answer === null || this.closed) return;
      this.#after = answer.after ?? this.#after;
      if (!answer.lines.length) return;
      this.lines.append(...answer.lines.map((line) => this.#line(line)));
      if (this.following) {
        while (this.lines.children.length > MOST) this.lines.firstChild.remove();
        this.#end();
      }
      this.#say();
      if (answer.lines.length === 1000) this.changed(new Set(["logs"]));
    } catch (error) {
      if (!this.closed) this.view.app.trouble(error);
    }
  }

  key(event) {
    if (event.key !== "/") return false;
    this.search.focus();
    return true;
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    this.#asker.close();
    this.#newer.close();
  }
}
