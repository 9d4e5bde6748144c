// The server: questions, and the stream that says when to ask again.

import { fetchJson } from "./fetch.js";

const UNREACHABLE = "The dashboard's server does not answer. Is `packtrain ui` still running?";

export function ask(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") query.append(name, one);
    }
  }
  return fetchJson(query.size ? `${path}?${query}` : path, { signal }, UNREACHABLE);
}

// One question at a time for each asker: a newer question replaces the older one.
export class Asker {
  #controller = null;

  async ask(path, parameters) {
    this.close();
    const mine = new AbortController();
    this.#controller = mine;
    try {
      return await ask(path, parameters, mine.signal);
    } catch (error) {
      if (mine.signal.aborted) return null;
      throw error;
    }
  }

  close() {
    this.#controller?.abort();
    this.#controller = null;
  }
}

// The browser connects again by itself after a lost connection, but not after an answer that is an error: this does.
export class Stream {
  #source = null;
  #timer = 0;

  constructor(run, { rows, versions, store, open, lost }) {
    Object.assign(this, { run, rows, versions, store, open, lost });
    this.#connect();
  }

  #connect() {
    const source = new EventSource(this.run ? `api/stream?run=${encodeURIComponent(this.run)}` : "api/stream");
    this.#source = source;
    source.addEventListener("open", () => this.open());
    source.addEventListener("runs", (event) => this.rows(JSON.parse(event.data)));
    source.addEventListener("run", (event) => this.versions(JSON.parse(event.data)));
    source.addEventListener("store", (event) => this.store(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      this.lost();
      source.close();
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#connect(), 1500);
    });
  }

  close() {
    clearTimeout(this.#timer);
    this.#source.close();
  }
}
