// What the model answered at each evaluation, beside what was right.

import { Asker, ask } from "./api.js";
import { wordBar } from "./attention.js";
import { button, make, quiet, setText } from "./dom.js";
import { clean, count, percent, short } from "./format.js";
import { adjust, current } from "./route.js";

const MAX_WORDS = 400;
const OVER_TIME = 12; // evaluations, when one sample is followed through all of them

export class Samples {
  #asker = new Asker();
  steps = [];

  constructor(place, view) {
    Object.assign(this, { place, view });
    this.slider = Object.assign(make("input"), { type: "range", min: 0, max: 0, value: 0 });
    this.slider.setAttribute("aria-label", "Evaluation");
    this.slider.addEventListener("input", () => this.#choose(Number(this.slider.value)));
    this.label = make("output", "at");
    const nav = make("div", "choices", button("", "‹", () => this.#move(-1), "Previous evaluation ([)"), button("", "›", () => this.#move(1), "Next evaluation (])"));
    this.tools = make("div", "tools", nav, make("label", "slider long", "Evaluation at", this.slider, this.label));
    this.tools.hidden = true;
    this.list = make("div", "samples");
    place.append(this.tools, this.list);
    this.list.append(make("div", "skeleton tall"));
    this.#loadSteps();
  }

  changed(what) {
    if (what.has("samples")) this.#loadSteps();
  }

  routed() {
    this.#pick();
  }

  async #loadSteps() {
    try {
      const { steps } = await ask("api/samples", { run: this.view.name });
      if (this.closed) return;
      const newest = this.at === undefined || this.at === this.steps[this.steps.length - 1];
      this.steps = steps;
      this.slider.max = String(Math.max(0, steps.length - 1));
      this.tools.hidden = !steps.length;
      if (!steps.length) this.list.replaceChildren(this.view.row?.recipe === null ? quiet("No samples.", "A program records none; a recipe does.") : quiet("No samples yet.", "Every evaluation records some."));
      else if (newest || current().query.has("step")) this.#pick();
      else this.#say();
    } catch (error) {
      if (!this.closed) this.view.app.trouble(error);
    }
  }

  // The evaluation of the address, or the newest one.
  #pick() {
    const wanted = Number(current().query.get("step"));
    const place = this.steps.indexOf(wanted);
    this.#show(this.steps[place >= 0 ? place : this.steps.length - 1]);
  }

  #choose(place) {
    const step = this.steps[place];
    if (step === undefined) return;
    adjust({ step: place === this.steps.length - 1 ? null : step }); // the newest one stays the newest
    this.#show(step);
  }

  #move(by) {
    this.#choose(Math.max(0, Math.min(this.steps.length - 1, this.steps.indexOf(this.at) + by)));
  }

  #say() {
    this.slider.value = String(this.steps.indexOf(this.at));
    setText(this.label, `step ${count(this.at)}`);
    this.slider.setAttribute("aria-valuetext", `step ${this.at}`);
  }

  async #show(step) {
    const same = step === this.at;
    this.at = step;
    this.#say();
    if (same && this.list.querySelector(".sample")) return;
    try {
      const answer = await this.#asker.ask("api/samples", { run: this.view.name, step });
      if (answer === null || this.closed) return;
      this.words = answer.words;
      const pictures = answer.samples.some((sample) => sample.picture);
      this.list.classList.toggle("pictures", pictures);
      this.list.replaceChildren(...answer.samples.map((sample, place) => this.#sample(sample, place)));
    } catch (error) {
      if (!this.closed) this.view.app.trouble(error);
    }
  }

  #sample(sample, place) {
    if (sample.picture) return sample.words?.length ? this.#caption(sample) : this.#classified(sample);
    return this.#text(sample, place);
  }

  #stage({ picture }) {
    const image = Object.assign(make("img"), { loading: "lazy", alt: "" });
    image.src = `api/picture?run=${encodeURIComponent(this.view.name)}&name=${encodeURIComponent(picture)}`;
    image.addEventListener("error", () => stage.replaceChildren(quiet("The picture is missing.")));
    const stage = make("div", "stage", image, make("canvas"));
    return stage;
  }

  #classified(sample) {
    const right = sample.reference === sample.prediction;
    const text = make("p", right ? "label right" : "label wrong", make("b", "", short(sample.prediction, 80)));
    if (sample.confidence !== null && sample.confidence !== undefined) text.append(make("small", "", percent(sample.confidence)));
    const stage = this.#stage(sample);
    stage.querySelector("img").alt = `Predicted ${short(sample.prediction, 80)}, is ${short(sample.reference, 80)}`;
    return make("article", "card sample", stage, text, right ? make("p", "dim", "correct") : make("p", "dim", `is ${short(sample.reference, 80)}`));
  }

  #caption(sample) {
    const stage = this.#stage(sample);
    stage.querySelector("img").alt = clean(sample.reference, 300);
    const words = sample.words.slice(0, MAX_WORDS).map((word) => clean(word, 60));
    const bar = wordBar(words, stage, (place) => decoded(sample.attention?.[place], sample.attention_shape));
    return make("article", "card sample", stage, bar, make("p", "dim", clean(sample.reference, 2000)));
  }

  #text(sample, place) {
    const { input, output, follow_references: compared } = this.words;
    const [wrong, missing] = compared ? difference(sample.prediction, sample.reference) : [[sample.prediction], [sample.reference]];
    const line = (label, className, content) => [make("dt", "", label), make("dd", className, ...content)];
    const same = sample.prediction === sample.reference;
    const body = make("dl", "", ...line(input, "input", [clean(sample.input)]), ...line(output, "prediction", wrong), ...line("Reference", "reference", missing));
    const history = make("div", "history");
    const follow = button("plain", "Over time", async () => {
      const open = follow.getAttribute("aria-expanded") === "true";
      follow.setAttribute("aria-expanded", String(!open));
      if (open) history.replaceChildren();
      else await this.#overTime(history, sample, place);
    });
    follow.setAttribute("aria-expanded", "false");
    follow.hidden = this.steps.length < 2;
    return make("article", `card sample text ${same ? "same" : ""}`, body, follow, history);
  }

  // The same input at evaluations from the first to the last.
  async #overTime(history, sample, place) {
    const all = this.steps.length;
    const amount = Math.min(all, OVER_TIME);
    const chosen = Array.from({ length: amount }, (_, at) => this.steps[Math.round((at * (all - 1)) / Math.max(1, amount - 1))]);
    try {
      const answers = await Promise.all(chosen.map((step) => ask("api/samples", { run: this.view.name, step })));
      const rows = answers.map(({ step, samples }) => {
        const then = samples.find((one) => one.input === sample.input) ?? (samples[place]?.input === sample.input ? samples[place] : null);
        const text = then ? difference(then.prediction, sample.reference)[0] : [make("span", "dim", "not among its samples")];
        return make("li", "", make("span", "at", count(step)), make("span", "prediction", ...text));
      });
      history.replaceChildren(make("ol", "", ...rows));
    } catch (error) {
      if (!this.closed) this.view.app.trouble(error);
    }
  }

  key(event) {
    const by = { "[": -1, "]": 1 }[event.key];
    if (!by || !this.steps.length) return false;
    this.#move(by);
    return true;
  }

  close() {
    this.closed = true;
    this.#asker.close();
  }
}

// Both texts as parts, with what only one of them has marked: the longest common sequence of words stays plain.
function difference(prediction, reference) {
  const [mine, other] = [prediction, reference].map((text) => clean(text).split(/(\s+)/).filter((one) => one.trim()));
  if (!mine.length) return [[make("span", "dim", "(empty)")], [clean(reference)]];
  if (mine.length > MAX_WORDS || other.length > MAX_WORDS) return [[clean(prediction)], [clean(reference)]];
  const lengths = Array.from({ length: mine.length + 1 }, () => new Uint16Array(other.length + 1));
  for (let i = mine.length - 1; i >= 0; i -= 1) {
    for (let j = other.length - 1; j >= 0; j -= 1) {
      lengths[i][j] = mine[i] === other[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  const [wrong, missing] = [[], []];
  let [i, j] = [0, 0];
  while (i < mine.length || j < other.length) {
    if (i < mine.length && j < other.length && mine[i] === other[j]) {
      wrong.push(`${mine[i]} `);
      missing.push(`${other[j]} `);
      i += 1;
      j += 1;
    } else if (j >= other.length || (i < mine.length && lengths[i + 1][j] >= lengths[i][j + 1])) {
      wrong.push(make("del", "", mine[i]), " ");
      i += 1;
    } else {
      missing.push(make("ins", "", other[j]), " ");
      j += 1;
    }
  }
  return [wrong, missing];
}

// The map of a word, of which the store has one byte for each cell; null if there is none, or it is damaged.
function decoded(text, shape) {
  const [rows, columns] = shape ?? [0, 0];
  try {
    const values = Array.from(atob(text ?? ""), (one) => one.charCodeAt(0));
    return values.length && values.length === rows * columns ? { rows, columns, values } : null;
  } catch {
    return null; // not base64: no map is better than no page
  }
}
