// Elements. Whatever comes from a store is set as text, never as HTML.

// `make("p", "dim small", "text", child, ...)`
export function make(tag, className = "", ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content.filter((one) => one !== null && one !== undefined));
  return made;
}

export function draw(tag, attributes = {}, ...content) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...content);
  return made;
}

export function button(className, text, action, label = "") {
  const made = make("button", className, text);
  made.type = "button";
  if (label) {
    made.setAttribute("aria-label", label);
    made.title = label;
  }
  made.addEventListener("click", action);
  return made;
}

// Changing a text that is the same already would cost a layout, and a screen reader would say it again.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function quiet(text, detail = "") {
  return make("div", "quiet", make("p", "", text), detail ? make("p", "small", detail) : null);
}

export function card(title, ...content) {
  const head = make("div", "card-head", make("h2", "", title));
  const section = make("section", "card", head, ...content);
  section.head = head;
  return section;
}

// A row of choices of which one is pressed.
export function choices(label, options, chosen, choose) {
  const group = make("div", "choices");
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", label);
  for (const [value, text] of options) {
    const one = button("", text, () => choose(value));
    one.dataset.value = value;
    group.append(one);
  }
  group.choose = (value) => {
    for (const one of group.children) one.setAttribute("aria-pressed", String(one.dataset.value === value));
  };
  group.choose(chosen);
  return group;
}

export function select(label, options, chosen, choose) {
  const made = make("select");
  made.setAttribute("aria-label", label);
  made.fill = (list, value) => {
    made.replaceChildren(...list.map(([key, text]) => Object.assign(make("option", "", text), { value: key })));
    made.value = value;
  };
  made.fill(options, chosen);
  made.addEventListener("change", () => choose(made.value));
  return made;
}

export function table(className, heads, rows) {
  const row = (cells, tag) => make("tr", "", ...cells.map((cell, at) => {
    const made = make(tag, typeof heads[at] === "string" && heads[at].startsWith(">") ? "number" : "", cell);
    if (tag === "th") made.scope = "col";
    return made;
  }));
  const head = row(heads.map((text) => text.replace(/^>/, "")), "th");
  const made = make("table", className, make("thead", "", head), make("tbody", "", ...rows.map((cells) => row(cells, "td"))));
  const box = make("div", "scroll", made);
  box.tabIndex = 0; // what scrolls must be reachable by keyboard
  box.setAttribute("role", "region");
  return box;
}

// Copies what is shown: a terminal runs control characters that someone has put into a text of the store.
export function copier(listing, className = "plain") {
  const made = button(className, "Copy", async () => {
    await navigator.clipboard?.writeText(listing.textContent);
    setText(made, "Copied");
    setTimeout(() => setText(made, "Copy"), 1500);
  });
  return made;
}

// Calls the function at most once for each frame, however often it is asked for.
export function eachFrame(work) {
  let asked = 0;
  return () => {
    if (asked) return;
    asked = requestAnimationFrame(() => {
      asked = 0;
      work();
    });
  };
}

export function debounced(milliseconds, work) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(work, milliseconds, ...values);
  };
}
