// What all pictures share: the data, the plan that is looked at, words for numbers, and elements.
const DATA = JSON.parse(document.getElementById("data").textContent);
const by = id => document.getElementById(id);
const state = { plan: 0 };
const plan = () => DATA.plans[state.plan];
const pictures = [];  // each a function that draws itself anew from `state` and the page's width and colours

// All that comes from a plan is put in as text, never as markup.
function element(name, attributes, ...inside) {
  const svg = ["svg", "g", "path", "circle", "text", "line", "rect", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) if (value !== undefined) made.setAttribute(key, value);
  made.append(...inside.filter(one => one !== null && one !== undefined));
  return made;
}
function option(value, text) { return element("option", { value }, text); }
function swatch(colour, text, kind) {
  const style = /^line/.test(kind || "") ? `border-color:${colour}` : `background:${colour}`;
  return element("span", {}, element("i", { class: "swatch " + (kind || ""), style }), text);
}
// A picture that fails leaves the others as they are.
function refresh() {
  for (const draw of pictures) try { draw(); } catch (error) { reportError(error); }
}

// --- numbers with their units ---

function scaled(value, base, units, unit) {
  let i = 0;
  while (Math.abs(value) >= base * 0.9995 && i < units.length - 1) { value /= base; i++; }
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return (Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(digits)) + " " + units[i] + unit;
}
const flopsText = value => scaled(value, 1000, ["", "k", "M", "G", "T", "P", "E"], "FLOPs");
const rateText = value => scaled(value, 1000, ["", "k", "M", "G", "T", "P", "E"], "FLOP/s");
const bytesText = value => scaled(value, 1000, ["", "k", "M", "G", "T", "P"], "B");
const heldText = value => scaled(value, 1024, ["", "Ki", "Mi", "Gi", "Ti"], "B");  // memory is sold in powers of two
const wholeText = value => Math.round(value).toLocaleString("en");
function shareText(value) {
  if (value > 0 && value < 0.0005) return "under 0.1%";
  if (value < 1 && value > 0.9995) return "over 99.9%";
  return (100 * value).toFixed((value < 0.0995 && value > 0) || (value > 0.9905 && value < 1) ? 1 : 0) + "%";
}
function secondsText(value) {
  if (value === 0) return "0 s";
  const [size, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e-3, "ms"] : value >= 1e-6 ? [1e-6, "µs"]
    : [1e-9, "ns"];
  return Number((value / size).toPrecision(3)).toLocaleString("en") + " " + unit;
}

// --- colours ---

const PARTS = { projections: "--c0", attention: "--c3", "feed-forward": "--c2", experts: "--c9", head: "--c5" };
const PART_NAMES = { projections: "attention's projections", attention: "attention over keys",
  "feed-forward": "feed-forward",
  experts: "experts", head: "output head" };
const KINDS = ["--c0", "--c7", "--c1", "--c4", "--c6", "--c2", "--c5", "--c3", "--c9", "--c10"];
let theme = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  theme = { dark: matchMedia("(prefers-color-scheme: dark)").matches };
  for (const name of ["paper", "card", "raised", "ink", "dim", "rule", "bad", "link",
    ...Array.from({ length: 11 }, (_, i) => "c" + i)])
    theme[name] = style.getPropertyValue("--" + name).trim();
}
const colour = name => theme[name.replace("--", "")] || name;
// A turn of the colour wheel: neighbours look alike, and the last is beside the first, as on a ring.
function hue(i, n, light, strength = 62) {
  const turn = n <= 1 ? 215 : (215 + 360 * i / n) % 360;
  const even = 6 * Math.cos((turn - 60) * Math.PI / 180);  // yellow looks lighter than blue of the same lightness
  return `hsl(${turn.toFixed(0)} ${strength}% ${(light - even).toFixed(0)}%)`;
}

// --- the plans and their figures ---

function planButtons() {
  by("plans").hidden = DATA.plans.length < 2;
  by("plans").replaceChildren(...DATA.plans.map((one, i) => {
    const made = element("button", { type: "button", "aria-pressed": String(i === state.plan) }, one.title,
      element("small", {}, secondsText(one.time.lower) + " at least"));
    made.onclick = () => choosePlan(i);
    return made;
  }));
}
function choosePlan(i) { state.plan = i; refresh(); }
pictures.push(function heading() {
  planButtons();
  by("figures").replaceChildren(...plan().figures.map(([name, value, more]) => element("div", {},
    element("div", { class: "name" }, name), element("div", { class: "value" }, value.replace(/ (?=\S+$)/, "\u00a0")),
      element("div", { class: "more" }, more))));
  by("recipe-section").hidden = !plan().recipe;
  by("recipe").textContent = plan().recipe;
});
