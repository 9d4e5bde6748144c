// Answers to what people ask about a run, with their evidence; where its time went; what `plan` had said.

import { ask } from "./api.js";
import { card, make, quiet, table } from "./dom.js";
import { capital, clean, count, duration, number, percent, short, titled } from "./format.js";
import { SPANS, VERDICTS } from "./terms.js";

export class Answers {
  constructor(place) {
    this.place = place;
    place.append(make("div", "skeleton tall"));
  }

  async detailed(detail) {
    this.detail = detail;
    if (this.asking) return;
    this.asking = true;
    try {
      // Asked for apart from the rest: answers take the whole run, and so may take seconds.
      this.answers = await ask(`api/answers?run=${encodeURIComponent(detail.name)}`);
      this.failure = null;
    } catch (error) {
      if (error.name === "AbortError" || this.closed) return;
      this.failure = error.message;
    } finally {
      this.asking = false;
    }
    const key = JSON.stringify([this.answers, this.failure, this.detail.goodput, this.detail.result]);
    if (this.closed || key === this.known) return;
    this.known = key;
    this.#show();
  }

  #show() {
    const { goodput, result } = this.detail;
    const { findings, forecast } = this.answers ?? {};
    if (this.failure) {
      this.place.replaceChildren(quiet("The answers could not be read.", clean(this.failure, 300)));
      return;
    }
    const parts = [findings?.length ? list(findings) : quiet("No answers yet.", "They need some steps first.")];
    if (goodput?.seconds) parts.push(spent(goodput));
    if (forecast?.length) parts.push(compared(forecast));
    if (result?.scores && Object.keys(result.scores).length) parts.push(scores(result));
    this.place.replaceChildren(...parts);
  }

  themed() {
    if (this.answers) this.#show();
  }

  close() {
    this.closed = true;
  }
}

function list(findings) {
  return make("ol", "findings", ...findings.map((one) => {
    const verdict = one.verdict in VERDICTS ? one.verdict : "unknown";
    const mark = make("span", `verdict ${verdict}`, VERDICTS[verdict].mark);
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", VERDICTS[verdict].meaning);
    const evidence = Array.isArray(one.evidence) ? one.evidence.join(" ") : one.evidence;
    return make("li", "", mark, make("div", "", make("h3", "", short(one.question, 200)), make("p", "", ...prose(one.answer)), evidence ? make("p", "evidence", ...prose(evidence)) : null));
  }));
}

function spent({ parts, seconds, fraction, useful }) {
  const bar = make("div", "stack");
  bar.setAttribute("role", "img");
  const shown = SPANS.filter(({ name }) => parts[name] > 0);
  const rows = shown.map(({ name, label, color }) => {
    const share = parts[name] / seconds;
    const piece = make("i");
    piece.style.flexGrow = String(share);
    piece.style.background = color;
    piece.title = `${capital(label)}: ${duration(parts[name])}`;
    bar.append(piece);
    const swatch = make("i", "swatch");
    swatch.style.background = color;
    return make("li", "", swatch, make("span", "", capital(label)), make("b", "", duration(parts[name])), make("small", "", share < 0.005 ? "< 1%" : percent(share)));
  });
  bar.setAttribute("aria-label", shown.map(({ name, label }) => `${capital(label)} ${percent(parts[name] / seconds)}`).join(", "));
  const made = card("Where the time went", bar, make("ul", "key columns", ...rows));
  made.head.append(make("p", "readout", `${percent(fraction)} of ${duration(seconds)} in steps that counted (${duration(useful)})`));
  return made;
}

function compared(forecast) {
  const rows = forecast.map(({ what, expected_text: expected, seen_text: seen, off, is_right: isRight }) => {
    const sign = make("span", off === null ? "dim" : isRight ? "near" : "far", off === null ? "–" : `${off >= 0 ? "+" : "−"}${Math.abs(100 * off).toFixed(0)}%`);
    return [short(what, 60), short(expected, 60), short(seen, 60), sign];
  });
  return card("Plan against outcome", table("listing", ["", ">Expected", ">Measured", ">Off by"], rows));
}

function scores({ scores: known, signatures, counts }) {
  const rows = Object.entries(known).map(([name, value]) => [titled({ name }), number(value), count(counts?.[name]), make("code", "dim", short(signatures?.[name] ?? "", 200))]);
  return card("Final scores", table("listing", ["Score", ">Value", ">Samples", "Signature"], rows));
}

// Commands in a text stand between backquotes.
const prose = (text) => clean(text, 2000).split("`").map((part, at) => (at % 2 ? make("code", "", part) : part));
