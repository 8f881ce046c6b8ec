// The roofline: how fast each product can go, by the FLOPs that it makes of each byte.
const roofline = { phase: null, on: null };

function roofProducts() {
  const chosen = roofline.phase === "all" ? plan().operations
    : plan().operations.filter(one => one.phase === roofline.phase);
  const merged = new Map();  // layers of several kinds have products of the same size
  for (const one of chosen) {
    const key = [one.name, one.phase, one.m, one.k, one.n, one.copies].join();
    if (merged.has(key)) merged.get(key).times += one.times;
    else merged.set(key, { ...one });
  }
  return [...merged.values()].map(one => {
    const bytes = one.read + one.written, { peak, bandwidth } = DATA.roofs;
    const computes = one.flops / peak, waits = bytes / bandwidth, seconds = Math.max(computes, waits);
    return { ...one, bytes, intensity: one.flops / bytes, seconds, bound: computes >= waits ? "compute" : "memory",
      rate: one.flops / seconds };
  });
}
function roofSentence(one) {
  const size = [one.m, one.k, one.n].map(wholeText).join(" x ");
  const copies = one.copies > 1 ? ` (${wholeText(one.copies)} side by side)` : "";
  const bound = one.bound === "compute" ? "the chip's products" : "its memory";
  const padding = one.wasted > 0.0005 ? `; padding makes ${shareText(one.wasted)} of the unit's work` : "";
  return `${one.name}, ${one.phase}: ${size}${copies}, ${flopsText(one.flops)}, ${bytesText(one.bytes)}, `
    + `${one.intensity.toPrecision(3)} FLOPs per byte: bound by ${bound}, at least ${secondsText(one.seconds)} each, `
    + `${wholeText(one.times)} in a step${padding}.`;
}
function drawRoofline() {
  by("roofline-section").hidden = !DATA.roofs || !plan().operations.length;
  if (by("roofline-section").hidden) return;
  const phases = [...new Set(plan().operations.map(one => one.phase))];
  if (!phases.includes(roofline.phase) && roofline.phase !== "all") roofline.phase = phases[0];
  const names = phases.length > 1 ? [["all", "the whole step"],
    ...phases.map(one => [one, one === "forward" ? "the forward pass" : one])]
    : [[phases[0], DATA.step]];
  by("roofline-phase").replaceChildren(...names.map(([value, text]) => option(value, text)));
  by("roofline-phase").value = roofline.phase;
  by("roofline-phase").parentElement.hidden = names.length < 2;
  const { peak, bandwidth } = DATA.roofs, products = roofProducts(), ridge = peak / bandwidth;
  const width = Math.max(300, Math.floor(by("roofline").getBoundingClientRect().width) || 300),
    height = width < 520 ? 300 : 380;
  const [left, right, top, bottom] = [46, 14, 26, 34];
  const least = Math.min(0.5, ...products.map(one => one.intensity)) / 1.6,
    most = Math.max(ridge * 16, ...products.map(one => one.intensity)) * 1.6;
  const high = peak * 3.2, low = Math.min(least * bandwidth, ...products.map(one => one.rate * (1 - one.wasted))) / 1.4;
  const x = v => left + (width - left - right) * Math.log(v / least) / Math.log(most / least);
  const y = v => top + (height - top - bottom) * (1 - Math.log(v / low) / Math.log(high / low));
  const parts = [];
  for (let power = Math.ceil(Math.log10(least)); 10 ** power <= most; power++) {
    parts.push(element("line", { class: "grid", x1: x(10 ** power), x2: x(10 ** power), y1: top, y2: height - bottom }),
      element("text", { x: x(10 ** power), y: height - bottom + 15, "text-anchor": "middle" }, String(10 ** power)));
  }
  for (let power = Math.ceil(Math.log10(low)); 10 ** power <= high; power++) {
    parts.push(element("line", { class: "grid", x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power) }),
      element("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" },
        scaled(10 ** power, 1000, ["", "k", "M", "G", "T", "P"], "")));
  }
  const base = height - bottom, roof = `M${x(least)} ${y(least * bandwidth)}L${x(ridge)} ${y(peak)}H${width - right}`;
  parts.push(element("path", { class: "under", d: `${roof}V${base}H${x(least)}Z` }),
    element("line", { class: "ridge", x1: x(ridge), x2: x(ridge), y1: y(peak), y2: base }),
    element("path", { class: "roof", d: roof }),
    element("text", { class: "name", x: width - right, y: y(peak) - 24, "text-anchor": "end" },
      `peak ${rateText(peak)}`),
    element("text", { x: x(ridge) - 5, y: base - 7, "text-anchor": "end" }, `${Math.round(ridge)} FLOPs per byte`),
    element("text", { x: left, y: 14 }, "FLOP/s of one device"),
    element("text", { x: width - right, y: height - 4, "text-anchor": "end" }, "FLOPs per byte of memory"));
  const slope = Math.atan2(y(peak) - y(least * bandwidth), x(ridge) - x(least)) * 180 / Math.PI,
    middle = Math.sqrt(least * ridge);
  parts.push(element("text", { class: "name",
    transform: `translate(${x(middle)} ${y(middle * bandwidth) - 8}) rotate(${slope})`,
    "text-anchor": "middle" }, `memory ${bytesText(bandwidth)}/s`));
  parts.push(...roofDots(products, x, y));
  by("roofline").replaceChildren(element("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height,
    role: "group", "aria-label": "roofline" }, ...parts));
  const found = new Set(products.map(one => one.part));
  const named = Object.keys(PARTS).filter(one => found.has(one));
  by("roofline-legend").replaceChildren(...named.map(one => swatch(`var(${PARTS[one]})`, PART_NAMES[one])),
    element("span", {}, "A larger dot takes more of the step."));
  roofTable(products);
  roofWords(products, ridge);
}
function roofDots(products, x, y) {
  const total = products.reduce((sum, one) => sum + one.seconds * one.times, 0);
  const size = one => 4.5 + 13 * Math.sqrt(one.seconds * one.times / total);
  return [...products].sort((a, b) => size(b) - size(a)).flatMap(one => {
    const px = x(one.intensity), py = y(one.rate), reached = y(one.rate * (1 - one.wasted)),
      tone = `var(${PARTS[one.part]})`;
    const dot = element("circle", { class: "dot", cx: px, cy: py, r: size(one), fill: tone, tabindex: 0,
      role: "button", "aria-label": roofSentence(one) });
    const tell = () => {
      for (const other of document.querySelectorAll("#roofline .dot.on")) other.classList.remove("on");
      dot.classList.add("on");
      by("roofline-told").textContent = roofSentence(one);
    };
    for (const kind of ["pointerenter", "focus", "click"]) dot.addEventListener(kind, tell);
    const drop = one.wasted > 0.03 ? [element("line",
      { class: "drop", x1: px, x2: px, y1: py, y2: reached, stroke: tone }),
      element("path", { d: `M${px - 5} ${reached}H${px + 5}`, stroke: tone, "stroke-width": 2 })] : [];
    return [...drop, dot];
  });
}
function roofTable(products) {
  const head = ["product", "pass", "m x k x n", "side by side", "FLOPs", "bytes", "FLOPs/byte", "at least",
    "in a step", "bound by", "padding"];
  const rows = products.map(one => [one.name, one.phase, [one.m, one.k, one.n].map(wholeText).join(" x "),
    wholeText(one.copies), flopsText(one.flops),
    bytesText(one.bytes), one.intensity.toPrecision(3), secondsText(one.seconds), wholeText(one.times), one.bound,
      shareText(one.wasted)]);
  by("roofline-table").replaceChildren(element("tr", {},
    ...head.map((cell, i) => element("th", { class: i > 1 ? "n" : "" }, cell))),
    ...rows.map(row => element("tr", {}, ...row.map((cell, i) => element("td", { class: i > 1 ? "n" : "" }, cell)))));
}
function roofWords(products, ridge) {
  const waiting = products.filter(one => one.bound === "memory"),
    total = products.reduce((sum, one) => sum + one.seconds * one.times, 0);
  const share = waiting.reduce((sum, one) => sum + one.seconds * one.times, 0) / total;
  by("roofline-told").textContent = waiting.length
    ? `${shareText(share)} of the products' time waits for memory, at best.`
    : "Every product has work enough for the chip: none waits for memory.";
  by("roofline-how").textContent = "Each dot is a product of this model on one device, as high as the chip lets it go. "
    + `Left of ${Math.round(ridge)} FLOPs per byte a product waits for memory, right of it for the chip's multipliers. `
    + "A short line below a dot is where padding leaves it. Bounds, not measurements. Point at a dot, or reach it with Tab.";
}
by("roofline-phase").oninput = () => { roofline.phase = by("roofline-phase").value; drawRoofline(); };
pictures.push(drawRoofline);
