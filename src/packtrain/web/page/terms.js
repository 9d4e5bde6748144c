// What the report and the dashboard call things, and in which colors they draw them: the server has put it into the page.

const terms = JSON.parse(document.getElementById("terms").textContent);

// The parts of a run's time, from the bottom: { name, label, color }.
export const SPANS = terms.spans.map(({ color: [light, dark], opacity, ...span }) => ({
  ...span, color: `color-mix(in srgb, light-dark(${light}, ${dark}) ${100 * opacity}%, var(--card))`,
}));
// By verdict: { mark, meaning }.
export const VERDICTS = terms.verdicts;
// The steps at the end of a run that its loss and its speed are of.
export const RECENT_STEPS = terms.recent_steps;
