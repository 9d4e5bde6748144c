// Where a model looked for each word of a caption. The pages of `packtrain serve` and `packtrain ui` share this file.

// From no attention to full attention, as in the attention maps that `packtrain predict` draws.
const HEAT = [[24, 12, 60], [120, 28, 109], [212, 72, 66], [251, 155, 6], [252, 245, 160]];

// Returns a toolbar with a button for each word: pointing at one, or walking with the arrow keys, shows its map on the
// stage, which has the picture (img) and a canvas. `mapOf(place)` returns { rows, columns, values }, or null.
export function wordBar(words, stage, mapOf) {
  const bar = Object.assign(document.createElement("div"), { className: "words" });
  bar.setAttribute("role", "toolbar");
  bar.setAttribute("aria-label", "Words of the caption: where the model looked");
  const buttons = words.map((word, place) => {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: word, tabIndex: place ? -1 : 0 });
    for (const event of ["pointerenter", "focus", "click"]) made.addEventListener(event, () => bar.light(place));
    return made;
  });
  bar.append(...buttons);
  bar.light = (place) => {
    buttons.forEach((one, at) => one.classList.toggle("now", at === place));
    look(stage, place < 0 ? null : mapOf(place));
  };
  bar.addEventListener("pointerleave", () => bar.light(buttons.indexOf(document.activeElement)));
  bar.addEventListener("focusout", () => bar.light(-1));
  bar.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(document.activeElement);
    const next = buttons[{ ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key]];
    if (!next) return;
    event.preventDefault();
    for (const one of buttons) one.tabIndex = one === next ? 0 : -1;
    next.focus();
  });
  return bar;
}

function look(stage, map) {
  const canvas = stage.querySelector("canvas");
  if (!canvas) return; // the picture is missing
  stage.classList.toggle("looking", map !== null);
  if (map === null) return;
  const { rows, columns, values } = map;
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const small = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
  const pixels = small.getContext("2d").createImageData(columns, rows);
  values.forEach((value, at) => {
    const share = (value - least) / (most - least || 1);
    const place = share * (HEAT.length - 1);
    const below = Math.min(Math.floor(place), HEAT.length - 2);
    const color = HEAT[below].map((channel, one) => channel + (HEAT[below + 1][one] - channel) * (place - below));
    pixels.data.set([...color, 255 * (0.62 - 0.17 * share)], 4 * at);
  });
  small.getContext("2d").putImageData(pixels, 0, 0);
  const image = stage.querySelector("img");
  canvas.width = image.clientWidth;
  canvas.height = image.clientHeight;
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
}
