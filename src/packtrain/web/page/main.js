// The frame around the views: address, stream of changes, theme, keyboard, and what to do when nobody answers.

import { Stream, ask } from "./api.js";
import { forgetColors } from "./chart.js";
import { make, quiet, setText } from "./dom.js";
import { Failure } from "./fetch.js";
import { short } from "./format.js";
import { address, current } from "./route.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showSweeps } from "./sweeps.js";

const VIEWS = { runs: showRuns, run: showRun, sweeps: showSweeps, sweep: showSweeps };
const KEYS = [
  ["Everywhere", [["g r", "All runs"], ["g s", "Sweeps"], ["t", "Change the color theme"], ["?", "This help"]]],
  ["Runs", [["/", "Filter"], ["j k", "Next, previous run"], ["Enter", "Open the run"], ["x", "Select for overlay"], ["o", "Overlay selected runs"]]],
  ["A run", [["1 … 7", "Choose a tab"], ["/", "Search, or overlay a run"], ["u", "Back to all runs"]]],
  ["Charts", [["← →", "Move the cursor"], ["+ −", "Zoom in, out"], ["< >", "Move the view"], ["0", "Show everything"], ["drag", "Zoom to a range"]]],
  ["Samples", [["[ ]", "Previous, next evaluation"]]],
];
const THEMES = ["auto", "light", "dark"];
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };

const main = document.getElementById("main");
const banner = document.getElementById("banner");
const link = document.getElementById("link");

// What the views share. `rows` has all runs by name; views subscribe to changes by their `rowsChanged`.
const app = {
  rows: new Map(),
  loaded: false,
  clockSkew: 0,
  now: () => Date.now() / 1000 + app.clockSkew,
  go: (route) => { location.hash = address(route); },
  trouble: (error) => trouble(error),
  title: (text) => { document.title = text ? `${text} · Packtrain` : "Packtrain"; },
};

let view = null;
let stream = null;
let away = false;
let loading = false;
let meanwhile = { rows: new Map(), gone: new Set() };
let shown = ""; // page, run and tab; a change of the rest stays within the view

// The server.

function trouble(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401 || error.status === 403) {
    stream?.close();
    view?.close?.();
    view = null;
    shown = "";
    banner.hidden = true;
    setText(link, "locked");
    link.className = "link away";
    main.replaceChildren(quiet("This dashboard needs its token.", "Open the link that `packtrain ui` printed; it works as long as that command runs."));
    return;
  }
  setText(banner, short(error.message, 300));
  banner.hidden = false;
}

function online() {
  setText(link, "live");
  link.className = "link live";
  if (away || !(app.loaded || loading)) load();
  away = false;
}

function offline() {
  away = true;
  setText(link, "reconnecting");
  link.className = "link away";
}

// All of it once, and again after the connection was lost; else only what the stream sends.
async function load() {
  const newer = { rows: new Map(), gone: new Set() };
  loading = true;
  meanwhile = newer; // what the stream says while the answer is under way is newer than the answer
  try {
    const answer = await ask("api/runs");
    app.clockSkew = answer.time - Date.now() / 1000;
    app.rows = new Map(answer.runs.map((row) => [row.name, row]));
    for (const [name, row] of newer.rows) app.rows.set(name, row);
    for (const name of newer.gone) app.rows.delete(name);
    app.loaded = true;
    setText(document.getElementById("store"), short(answer.store, 200));
    document.getElementById("store").title = short(answer.store, 1000);
    banner.hidden = true;
    view?.rowsChanged?.();
    view?.reconnected?.();
  } catch (error) {
    trouble(error);
    if (error.status === 503) setTimeout(load, 3000);
    view?.failed?.(error);
  } finally {
    loading = false;
    if (meanwhile === newer) meanwhile = { rows: new Map(), gone: new Set() };
  }
}

function connect(run) {
  if (stream && stream.run === run) return;
  stream?.close();
  stream = new Stream(run, {
    open: online,
    lost: () => {
      offline();
      // A stream does not say why it ended: an ordinary question does.
      ask("api/sweeps").catch(trouble);
    },
    rows: ({ rows, gone }) => {
      for (const row of rows) {
        app.rows.set(row.name, row);
        meanwhile.rows.set(row.name, row);
        meanwhile.gone.delete(row.name);
      }
      for (const name of gone ?? []) {
        app.rows.delete(name);
        meanwhile.rows.delete(name);
        meanwhile.gone.add(name);
      }
      if (rows.length || gone?.length) view?.rowsChanged?.(rows);
    },
    store: ({ error }) => {
      if (error) trouble(new Failure(503, error));
      else if (!banner.hidden) load();
    },
    versions: ({ run: name, versions }) => view?.versionsChanged?.(name, versions),
  });
}

// The address.

function navigate() {
  const route = current();
  const show = VIEWS[route.page];
  const identity = `${route.page}/${route.name}/${route.tab}`;
  for (const one of document.querySelectorAll("nav a")) {
    const here = { run: "runs", sweep: "sweeps" }[route.page] ?? route.page;
    if (one.dataset.page === here) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  if (identity === shown && view?.routed) return view.routed(route);
  const sameRun = view?.name && route.page === "run" && view.name === route.name;
  shown = identity;
  if (sameRun) return view.routed(route);
  view?.close?.();
  view = null;
  main.replaceChildren();
  window.scrollTo(0, 0);
  if (!show) {
    app.title("Not found");
    main.replaceChildren(quiet("There is no such page."), make("p", "quiet", Object.assign(make("a", "", "All runs"), { href: "#/" })));
    return undefined;
  }
  view = show(main, route, app);
  connect(route.page === "run" ? route.name : "");
  return undefined;
}

// Theme.

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("theme", theme);
  } catch { /* storage may be forbidden; the choice then lasts until the page is closed */ }
  const switcher = document.getElementById("theme");
  setText(switcher, SIGNS[theme]);
  const label = `Color theme: ${theme === "auto" ? "automatic" : theme}`;
  switcher.setAttribute("aria-label", label);
  switcher.title = `${label} (t)`;
  switcher.dataset.value = theme;
  themed();
}

function themed() {
  forgetColors();
  view?.themed?.();
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(document.getElementById("theme").dataset.value) + 1) % THEMES.length]);
}

// Keyboard.

const help = document.getElementById("help");
for (const [title, keys] of KEYS) {
  const list = make("dl", "", ...keys.flatMap(([key, meaning]) => [
    make("dt", "", ...key.split(" ").map((one) => make("kbd", "", one))), make("dd", "", meaning),
  ]));
  document.getElementById("keys").append(make("section", "", make("h3", "", title), list));
}

let prefix = "";
document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const typing = event.target.closest("input:not([type=checkbox]):not([type=range]), textarea, select");
  if (typing) {
    if (event.key === "Escape") typing.blur();
    return;
  }
  const go = prefix === "g" ? { r: "#/", s: "#/sweeps" }[event.key] : undefined;
  prefix = event.key;
  if (go) location.hash = go;
  else if (event.key === "?") help.showModal();
  else if (event.key === "t") nextTheme();
  else if (!view?.key?.(event)) return;
  event.preventDefault();
});

document.getElementById("help-button").addEventListener("click", () => help.showModal());
document.getElementById("theme").addEventListener("click", nextTheme);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address is the view's
  main.focus();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);
window.addEventListener("hashchange", navigate);
let theme = null;
try {
  theme = localStorage.getItem("theme");
} catch { /* as above */ }
setTheme(THEMES.includes(theme) ? theme : "auto");
load();
navigate();
