// The page of the service. Whatever comes from the model or a person is set as text, never as HTML.

import { wordBar } from "./attention.js";
import { copier, make, setText } from "./dom.js";
import { Failure, fetchJson } from "./fetch.js";
import { bytes, count, duration, percent } from "./format.js";

const main = document.getElementById("main");
const LABELS = {
  beam: ["Beam size", 1, 32, 1],
  n_best: ["Outputs to show", 1, 32, 1],
  temperature: ["Temperature", 0.01, 100, 0.01],
  nucleus: ["Nucleus (top p)", 0, 1, 0.01],
  repetition: ["Repetition penalty", 1, 100, 0.05],
  seed: ["Seed", 0, 2 ** 53, 1],
};

let model = null;

// Requests.

function ask(path, init = {}) {
  const headers = new Headers(init.headers);
  const token = sessionStorage.getItem("token");
  if (token) headers.set("Authorization", `Bearer ${token}`);
  return fetchJson(path, { ...init, headers }, "The service cannot be reached. Is it still running?");
}

function predict(body, options) {
  const text = JSON.stringify({ ...body, ...options });
  return ask("/v1/predict", { method: "POST", headers: { "Content-Type": "application/json" }, body: text });
}

// Elements.

function view(name) {
  main.replaceChildren(document.getElementById(name).content.cloneNode(true));
  main.setAttribute("aria-busy", "false");
  const focused = main.querySelector("[autofocus]");
  if (focused && matchMedia("(hover: hover)").matches) focused.focus(); // a phone would open its keyboard
  return (selector) => main.querySelector(selector);
}

function said(text) {
  return text === "" ? make("p", "blank", "(empty)") : make("p", "text", text);
}

const took = (started) => duration((performance.now() - started) / 1000);

function showError(place, error) {
  if (error.status === 401) return askForToken("That token is not accepted.");
  const line = make("p", "error", error.message);
  line.setAttribute("role", "alert");
  place.replaceChildren(line);
}

function optionFields(names) {
  const shown = names.filter((name) => name in LABELS);
  if (!shown.length) return () => ({});
  main.append(document.getElementById("options-view").content.cloneNode(true));
  const fields = main.querySelector(".fields");
  for (const name of shown) {
    const [label, min, max, step] = LABELS[name];
    const input = Object.assign(make("input"), { type: "number", name, min, max, step, placeholder: "default" });
    if (name === "beam") input.placeholder = String(model.packtrain.beam);
    const field = make("label", "", label);
    field.append(input);
    fields.append(field);
  }
  return () => {
    const given = [...fields.querySelectorAll("input")].filter((input) => input.value !== "");
    return Object.fromEntries(given.map((input) => [input.name, Number(input.value)]));
  };
}

// Texts: each line is one input.

function showText() {
  const find = view("text-view");
  const options = optionFields(model.packtrain.options);
  const [form, input, output] = [find("form"), find("#input"), find("#output")];
  const { action, doing, done, result } = model.packtrain.words;
  input.placeholder = `Type or paste text. Each line is ${done} by itself.`;
  find("button").textContent = capitalized(action);
  find("#output-label").textContent = capitalized(result);
  find(".placeholder").textContent = `The ${result} appears here.`;
  find("#hint").textContent = `${/Mac|iP/.test(navigator.platform) ? "⌘" : "Ctrl"}+Enter ${action}s`;
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const lines = input.value.split("\n");
    if (!input.value.trim()) return input.focus();
    const button = find("button");
    const started = performance.now();
    button.disabled = true;
    output.replaceChildren(make("p", "busy", `${capitalized(doing)}…`));
    try {
      const filled = lines.map((line, at) => [line, at]).filter(([line]) => line.trim());
      const answer = await predict({ inputs: filled.map(([line]) => line) }, options());
      const texts = lines.map(() => "");
      answer.predictions.forEach((one, number) => { texts[filled[number][1]] = one.output; });
      const parts = [said(texts.join("\n"))];
      for (const [number, one] of answer.predictions.entries()) {
        const where = filled.length > 1 ? `line ${filled[number][1] + 1}: ` : "";
        if (one.note) parts.push(make("p", "note", where + one.note));
        if (one.n_best) parts.push(others(one.n_best));
      }
      output.replaceChildren(...parts);
      find("#took").textContent = took(started);
    } catch (error) {
      find("#took").textContent = "";
      showError(output, error);
    } finally {
      button.disabled = false;
    }
  });
}

function capitalized(word) {
  return word[0].toUpperCase() + word.slice(1);
}

function others(outputs) {
  const list = make("ol", "others");
  for (const one of outputs) {
    const row = make("li");
    row.append(make("span", "", one.output || "(empty)"), make("span", "score", one.score.toFixed(3)));
    list.append(row);
  }
  return list;
}

// Chat.

function showChat() {
  const find = view("chat-view");
  const options = optionFields(model.packtrain.options.filter((name) => name !== "n_best"));
  const [talk, form, input, fault] = [find("#talk"), find("form"), find("#input"), find(".error")];
  const empty = talk.firstElementChild;
  let turns = [];
  let round = 0; // an answer that comes after "New conversation" belongs to nobody
  const add = (className, text) => {
    const line = talk.appendChild(make("li", className, text));
    talk.scrollTop = talk.scrollHeight;
    return line;
  };
  const fit = () => {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight + 2}px`;
  };
  input.addEventListener("input", fit);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  find("#again").addEventListener("click", () => {
    turns = [];
    round += 1;
    fault.hidden = true;
    talk.replaceChildren(empty);
    input.focus();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = input.value.trim();
    const button = form.querySelector("button");
    if (!text || button.disabled) return;
    empty.remove();
    fault.hidden = true;
    button.disabled = true;
    const own = round;
    const asked = add("turn you", text);
    const waiting = add("busy", "thinking…");
    input.value = "";
    fit();
    try {
      const { predictions: [reply] } = await predict({ turns: [...turns, text].slice(-100) }, options());
      if (own !== round) return;
      turns.push(text, reply.output);
      waiting.remove();
      add(reply.output ? "turn model" : "turn model blank", reply.output || "(no reply)");
      if (reply.note) add("note", reply.note);
    } catch (error) {
      if (own !== round) return;
      waiting.remove();
      if (error.status === 401) return askForToken("That token is not accepted.");
      // The message goes back to where it can be corrected: it is no part of the conversation.
      asked.remove();
      if (!talk.childElementCount) talk.append(empty);
      input.value = text;
      fit();
      fault.textContent = error.message;
      fault.hidden = false;
    } finally {
      button.disabled = false;
      input.focus();
    }
  });
}

// Pictures.

function showImage() {
  const find = view("image-view");
  const options = optionFields(model.packtrain.options);
  const [drop, stage, picture, output] = [find("#drop"), find("#stage"), find("#picture"), find("#output")];
  const file = find("#file");
  let newest = 0;
  const send = async (chosen) => {
    if (!chosen) return;
    const own = (newest += 1);
    const limit = model.packtrain.limits.max_bytes;
    stage.classList.remove("looking"); // the map of the picture before
    URL.revokeObjectURL(picture.src);
    picture.src = URL.createObjectURL(chosen);
    stage.hidden = false;
    find("#invite").hidden = true;
    drop.classList.add("filled");
    find("#filename").textContent = chosen.name || "pasted picture";
    find("#took").textContent = "";
    if (chosen.size > limit) {
      return showError(output, new Failure(413, `The file is larger than ${bytes(limit)}.`));
    }
    output.replaceChildren(make("p", "busy", "Looking…"));
    const started = performance.now();
    try {
      const query = new URLSearchParams(options());
      const headers = { "Content-Type": chosen.type.startsWith("image/") ? chosen.type : "image/unknown" };
      const answer = await ask(`/v1/predict?${query}`, { method: "POST", headers, body: chosen });
      if (own !== newest) return;
      const [one] = answer.predictions;
      output.replaceChildren(...(one.top5 ? [bars(one.top5)] : caption(one, stage)));
      if (one.note) output.append(make("p", "note", one.note));
      find("#took").textContent = took(started);
    } catch (error) {
      if (own === newest) showError(output, error);
    }
  };
  picture.addEventListener("error", () => {
    if (!picture.src) return;
    stage.hidden = true; // a TIFF, which the model can read and the browser cannot
    find("#invite").hidden = false;
  });
  file.addEventListener("change", () => send(file.files[0]));
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    send(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => {
    const [pasted] = event.clipboardData?.files ?? [];
    if (pasted && drop.isConnected) send(pasted);
  });
}

function bars(classes) {
  const list = make("ol", "bars");
  for (const one of classes) {
    const [row, head, track, fill] = [make("li"), make("div", "head"), make("div", "track"), make("div", "fill")];
    const shown = one.probability >= 0.01 ? percent(one.probability) : "< 1%";
    head.append(make("span", "name", one.class), make("span", "value", shown));
    fill.style.width = `${100 * one.probability}%`;
    track.append(fill);
    row.append(head, track);
    list.append(row);
  }
  return list;
}

function caption(answer, stage) {
  const parts = [said(answer.output)];
  if (answer.words?.length) parts.push(wordButtons(answer.words, stage));
  if (answer.n_best) parts.push(others(answer.n_best));
  return parts;
}

// The words of a caption, which show where the model looked for each.
function wordButtons(words, stage) {
  const maps = words.map(({ attention }) => ({ rows: attention.length, columns: attention[0].length, values: attention.flat() }));
  const bar = wordBar(words.map(({ word }) => word), stage, (place) => maps[place]);
  const group = make("div");
  group.append(make("p", "dim small", "Where it looked: point at a word, or use the arrow keys."), bar);
  // Once by itself, word by word, so that nobody has to guess that there is something to see.
  const play = (place) => {
    if (!bar.isConnected && place) return;
    bar.light(place < words.length ? place : -1);
    if (place < words.length) playing = setTimeout(play, 650, place + 1);
  };
  let playing = setTimeout(play, 300, 0);
  for (const event of ["pointerover", "focusin", "click"]) bar.addEventListener(event, () => clearTimeout(playing));
  return group;
}

// Start.

function askForToken(fault) {
  const find = view("token-view");
  const known = sessionStorage.getItem("token");
  const line = find(".error");
  line.textContent = fault;
  line.hidden = !known;
  find("input").focus();
  find("form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("token", find("input").value.trim());
    start();
  });
}

function showState(text, className = "") {
  const state = document.getElementById("state");
  setText(state, text);
  state.className = `state ${className}`;
}

async function watch() {
  try {
    const { status } = await (await fetch("/readyz")).json();
    showState(status, status === "ready" ? "ready" : status === "loading" ? "" : "away");
    setTimeout(watch, status === "loading" ? 1000 : 10000);
  } catch {
    showState("unreachable", "away");
    setTimeout(watch, 3000);
  }
}

function snippet() {
  const { inputs, chat } = model.packtrain;
  const token = sessionStorage.getItem("token") ? " -H 'Authorization: Bearer TOKEN'" : "";
  const address = `${location.origin}/v1/predict`;
  if (inputs === "images") return `curl ${address}${token} -H 'Content-Type: image/jpeg' --data-binary @picture.jpg`;
  const body = chat ? '{"turns": ["Hello"]}' : '{"inputs": ["Hello"]}';
  return `curl ${address}${token} -H 'Content-Type: application/json' -d '${body}'`;
}

async function start() {
  try {
    [model] = (await ask("/v1/models")).data;
  } catch (error) {
    if (error.status === 401) return askForToken("That token is not accepted.");
    const line = make("p", "card error", error.message);
    main.replaceChildren(line);
    setTimeout(start, 3000);
    return;
  }
  if (!model) {
    setTimeout(start, 1000); // it is still being loaded
    return;
  }
  const facts = model.packtrain;
  document.title = `${model.id} - Packtrain`;
  document.getElementById("name").textContent = model.id;
  document.getElementById("facts").textContent = `${facts.recipe} · ${facts.form} ${facts.precision} · step ${count(facts.step)}`;
  document.getElementById("snippet").textContent = snippet();
  document.getElementById("footer").hidden = false;
  document.getElementById("links").hidden = sessionStorage.getItem("token") !== null; // links do not send a token
  if (facts.inputs === "images") showImage();
  else if (facts.chat) showChat();
  else showText();
}

const snippetText = document.getElementById("snippet");
snippetText.closest(".snippet").append(copier(snippetText, "quiet"));
start();
watch();
