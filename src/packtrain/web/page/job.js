// What a run was asked to do and how that differs from others; what it has saved.

import { Asker } from "./api.js";
import { card, copier, make, quiet, select, setText, table } from "./dom.js";
import { bytes, clean, clock, count, short } from "./format.js";
import { adjust, current, listed } from "./route.js";

export class Job {
  #asker = new Asker();

  constructor(place, view) {
    Object.assign(this, { place, view, app: view.app });
    this.source = listing("Job file");
    this.command = listing("Command");
    this.commit = make("p", "readout");
    const again = card("Run it again", this.command);
    again.head.append(this.commit, copier(this.command));
    const job = card("Job as written", this.source);
    this.file = make("p", "readout");
    job.head.append(this.file, copier(this.source));
    this.chooser = select("Compare with", [["", "Choose a run"]], "", (name) => {
      adjust({ with: name });
      view.adjusted();
      this.#compare();
    });
    this.result = make("div");
    this.differences = card("Differences", this.result);
    this.differences.head.append(this.chooser);
    this.parent = make("p", "readout");
    job.head.append(this.parent);
    place.append(job, again, this.differences);
    this.#fill();
    this.#compare();
  }

  #fill() {
    const [chosen = ""] = listed(current().query, "with");
    const names = [...this.app.rows.keys()].filter((name) => name !== this.view.name);
    const own = this.view.row?.job;
    // Runs of the same job first: these are the ones that differ in little.
    names.sort((one, other) => (this.app.rows.get(other)?.job === own) - (this.app.rows.get(one)?.job === own) || one.localeCompare(other, "en", { numeric: true }));
    const key = names.join("\n");
    if (key === this.names) return;
    this.names = key;
    this.chooser.fill([["", "Choose a run"], ...names.map((name) => [name, short(name, 60)])], chosen);
  }

  rowsChanged() {
    this.#fill();
  }

  detailed({ source, parent }) {
    const { file = "", text = "", command = "", commit = "", uncommitted = 0 } = source ?? {};
    setText(this.parent, short(parent ?? "", 200));
    setText(this.source.firstChild, clean(text, 200_000));
    setText(this.command.firstChild, clean(command, 20_000));
    setText(this.file, short(file, 80));
    const changed = uncommitted ? ` and ${count(uncommitted)} changed ${uncommitted === 1 ? "file" : "files"}` : "";
    setText(this.commit, commit ? `git ${short(commit.slice(0, 12))}${changed}` : "");
  }

  routed() {
    this.#fill();
    this.#compare();
  }

  async #compare() {
    const others = listed(current().query, "with").slice(0, 10);
    this.chooser.value = others[0] ?? "";
    if (!others.length) {
      this.result.replaceChildren(make("p", "dim", "Choose a run to see what differs between the two jobs."));
      return;
    }
    try {
      const runs = [this.view.name, ...others];
      const answer = await this.#asker.ask("api/difference", { run: runs });
      if (answer === null || this.closed) return;
      if (!answer.fields.length) this.result.replaceChildren(quiet("The jobs are the same."));
      else {
        const rows = answer.fields.map(({ field, values }) => [make("code", "", short(field, 120)), ...values.map((value) => make("code", value === null ? "dim" : "", value === null ? "–" : short(value, 300)))]);
        const box = table("listing", ["Field", ...runs.map((run) => short(run, 40))], rows);
        box.setAttribute("aria-label", "Differences");
        this.result.replaceChildren(box);
      }
    } catch (error) {
      if (this.closed) return;
      if (error.status === 404) this.result.replaceChildren(quiet(short(error.message, 300)));
      else this.app.trouble(error);
    }
  }

  close() {
    this.closed = true;
    this.#asker.close();
  }
}

// Text as it is to be copied, which scrolls by keyboard, too.
function listing(label) {
  const made = make("pre", "source", make("code"));
  made.tabIndex = 0;
  made.setAttribute("role", "region");
  made.setAttribute("aria-label", label);
  return made;
}

export class Checkpoints {
  constructor(place) {
    this.place = place;
    place.append(make("div", "skeleton tall"));
  }

  detailed({ checkpoints, name, recipe, result }) {
    const key = JSON.stringify([checkpoints, recipe, Boolean(result)]);
    if (key === this.known) return;
    this.known = key;
    if (!checkpoints.length) {
      this.place.replaceChildren(result ? quiet("No checkpoint was committed.") : quiet("No checkpoint is committed yet.", "The first one follows after the interval that the job sets."));
      return;
    }
    const opened = new Set([...this.place.querySelectorAll("details[open]")].map((one) => one.dataset.name));
    const newest = [...checkpoints].sort((one, other) => other.step - one.step);
    const items = newest.map((one) => {
      const facts = [make("b", "", `${recipe ? "Step" : "Commit"} ${count(one.step)}`), make("span", "", one.time ? clock(one.time) : "–"), make("span", "number", bytes(one.bytes)), make("code", "dim", short(one.name, 80))];
      const files = one.files.map((file) => make("li", "", make("code", "", short(file.name, 200)), make("span", "number", bytes(file.bytes))));
      const details = make("details", "checkpoint", make("summary", "", ...facts), make("ul", "", ...files));
      details.dataset.name = one.name;
      details.open = opened.has(one.name);
      return make("li", "", details);
    });
    const total = checkpoints.reduce((sum, one) => sum + (one.bytes ?? 0), 0);
    const made = card("Checkpoints", make("ol", "checkpoints", ...items));
    made.head.append(make("p", "readout", `${checkpoints.length} kept, ${bytes(total)}`));
    // A program has commits: its own files, which Packtrain cannot export.
    const [words, command] = recipe ? ["Export the best one: ", `packtrain export ${short(name, 120)} -o model/`] : ["Download the newest one: ", `packtrain get ${short(name, 120)} checkpoints/`];
    const hint = make("p", "dim small", words, make("code", "", command));
    this.place.replaceChildren(made, hint);
  }

  close() {}
}
