// Numbers, times and texts as people read them.

const NONE = "–";
const GROUPED = new Intl.NumberFormat("en");

export const count = (value) => (value === null || value === undefined ? NONE : GROUPED.format(Math.round(value)));

export function number(value, digits = 4) {
  if (value === null || value === undefined) return NONE;
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 100_000) return compact(value);
  if (size >= 10 ** digits) return GROUPED.format(Math.round(value));
  if (size !== 0 && size < 1e-3) return Number(value.toPrecision(Math.min(3, digits))).toExponential().replace("e-", "e−");
  // Values of one measure have the same number of digits; a whole number is one.
  return size < 1 || Number.isInteger(value) ? String(Number(value.toPrecision(digits))) : value.toPrecision(digits);
}

// As short as it can be, for the ticks of an axis.
export function round(value) {
  const size = Math.abs(value);
  if (size >= 10_000) return compact(value);
  if (size !== 0 && size < 1e-3) return `${Number(value.toPrecision(3)).toExponential()}`.replace("e-", "e−");
  return String(Number(value.toPrecision(4)));
}

export function compact(value) {
  if (value === null || value === undefined) return NONE;
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${letter}`;
  }
  return String(Number(value.toPrecision(3)));
}

export const percent = (value) => (value === null || value === undefined ? NONE : `${Math.round(100 * value)}%`);

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  // From here on as the terminal shows it: a time must not differ between the two.
  const [whole, minutes, hours] = [1, 60, 3600].map((unit) => Math.round(seconds / unit));
  const pair = (value, unit, large, small) => `${Math.floor(value / unit)} ${large} ${String(value % unit).padStart(2, "0")} ${small}`;
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return pair(whole, 60, "min", "s");
  return minutes < 1440 ? pair(minutes, 60, "h", "min") : pair(hours, 24, "d", "h");
}

// For the ticks of an axis: 45 s, 20 min, 1:30 h, 2.5 d.
export function shortDuration(seconds) {
  const [minutes, days] = [Math.round(seconds / 60), seconds / 86400];
  if (seconds < 60) return `${round(seconds)} s`;
  if (seconds < 3600) return seconds % 60 ? `${Math.floor(seconds / 60)}:${String(Math.round(seconds % 60)).padStart(2, "0")} min` : `${minutes} min`;
  if (seconds < 2 * 86400) return minutes % 60 ? `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h` : `${minutes / 60} h`;
  return `${round(days)} d`;
}

export function money(dollars) {
  if (dollars === null || dollars === undefined) return NONE;
  return `$${dollars >= 100 ? GROUPED.format(Math.round(dollars)) : dollars.toFixed(2)}`;
}

export function clock(time) {
  const when = new Date(time * 1000);
  const hours = when.toLocaleTimeString("en-GB");
  const today = when.toDateString() === new Date().toDateString();
  return today ? hours : `${day(time)} ${hours}`;
}

export function day(time) {
  const when = new Date(time * 1000);
  const year = when.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return when.toLocaleDateString("en", { month: "short", day: "numeric", year });
}

export function ago(time, now) {
  if (!time) return NONE;
  const seconds = Math.max(0, now - time);
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  if (seconds < 7 * 86400) return `${Math.floor(seconds / 86400)} d ago`;
  return day(time);
}

// Colors of a terminal mean nothing here, and other control characters, or those that turn the direction of a text,
// could make a line look like another one: they are shown as what they are.
/* eslint-disable no-control-regex */
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])/g;
const CONTROLS = /[\x00-\x08\x0b-\x1f\x7f]/g;
const TURNS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u0080-\u009f]/g;
export function clean(text, length = 4000) {
  const short = text.length > length ? `${text.slice(0, length)}…` : text;
  return short
    .replace(ESCAPES, "")
    .replace(CONTROLS, (one) => `^${String.fromCharCode(one.charCodeAt(0) ^ 64)}`)
    .replace(TURNS, "\ufffd");
}

export const short = (text, length = 80) => clean(String(text ?? ""), length).replace(/\s+/g, " ");

// `train.gradient_norm` is "gradient norm"; scores keep the spelling that people know, and a program's numbers its own.
const SPELLED = { bleu: "BLEU", chrf: "chrF", cider: "CIDEr", rate: "learning rate", loss: "loss" };
export function spelled(name) {
  if (name.startsWith("log.")) return short(name.slice(4), 60);
  const plain = name.replace(/^(train|valid|test)\./, "");
  return SPELLED[plain.toLowerCase()] ?? plain.replaceAll("_", " ");
}
// What a score is of: `valid BLEU`, `100 samples`.
export const titled = (score) => `${/^(valid|test)\./.exec(score.name)?.[1] ?? ""} ${spelled(score.name)}`.trim();
export const sampled = (count) => (count === null || count === undefined ? "" : `${GROUPED.format(count)} ${count === 1 ? "sample" : "samples"}`);
export const capital = (text) => (Object.values(SPELLED).includes(text) && /[A-Z]/.test(text) ? text : text.charAt(0).toUpperCase() + text.slice(1));
