// The mesh on the machine: which axis is coloured, which chip is chosen, and what is told of it.
const mesh = { axis: null, slice: 0, chip: null, cut: 0, cache: null };

// Chips are numbered along the first side first, as jax does; the picture's dims run from the last side to the first.
const COUNTS = [0, 1, 2].map(i => DATA.machine.sides[DATA.machine.sides.length - 1 - i] || 1);
const STRIDES = [0, 1, 2].map(i => DATA.machine.sides.slice(0,
  Math.max(0, DATA.machine.sides.length - 1 - i)).reduce((a, b) => a * b, 1));
function chipAt(x, y, z) { return x * STRIDES[0] + y * STRIDES[1] + z * STRIDES[2]; }
function chipPlace(local) { return COUNTS.map((n, i) => Math.floor(local / STRIDES[i]) % n); }
// Along each side of the torus, in its order.
function chipCoordinates(local) { return chipPlace(local).slice(0, DATA.machine.sides.length).reverse(); }
function axisIndex(axis, slice, local, device = 0, coordinates = chipCoordinates(local)) {
  const { chips, devices, sides } = DATA.machine;
  return axis.digits.reduce((sum, [where, stride, count, times]) => {
    const value = where === "slice" ? slice : where === "number" ? (slice * chips + local) * devices + device
      : where === sides.length ? device : coordinates[where];
    return sum + Math.floor(value / stride) % count * times;
  }, 0);
}
function hostOf(local) {
  const { sides, host, tpu } = DATA.machine;
  if (!tpu) return Math.floor(local / host[0]);
  return chipCoordinates(local).reduceRight((sum, v, i) => sum * Math.ceil(sides[i] / host[i])
    + Math.floor(v / host[i]), 0);
}
// Of all chips of a slice: the index along the coloured axis, and a number that the chips share which differ in it
// alone.
function sliceIndices(slice) {
  const key = [state.plan, mesh.axis].join();
  if (!mesh.cache || mesh.cache.key !== key) mesh.cache = { key, slices: new Map() };
  if (mesh.cache.slices.has(slice)) return mesh.cache.slices.get(slice);
  if (mesh.cache.slices.size > 8) mesh.cache.slices.clear();
  const { chips } = DATA.machine, axes = plan().axes,
    found = { index: new Int32Array(chips), group: new Float64Array(chips) };
  for (let local = 0; local < chips; local++) {
    const coordinates = chipCoordinates(local);
    let group = 0;
    axes.forEach((axis, i) => {
      const index = axisIndex(axis, slice, local, 0, coordinates);
      if (i === mesh.axis) found.index[local] = index;
      else group = group * axis.size + index;
    });
    found.group[local] = group;
  }
  mesh.cache.slices.set(slice, found);
  return found;
}
// The colours of a slice's chips: by index, with those that the chosen chip does not exchange with drawn back.
function meshLook() {
  const axis = plan().axes[mesh.axis], size = axis ? axis.size : 1, { chips } = DATA.machine,
    steps = Math.min(size, 240);
  const lights = theme.dark ? [62, 50, 38] : [57, 46, 36];
  const palette = Array.from({ length: steps }, (_, i) => lights.map(light => hue(i, steps, light)));
  const chosen = mesh.chip === null ? null : { slice: Math.floor(mesh.chip / chips), local: mesh.chip % chips };
  const alone = !chosen || !axis, same = chosen && sliceIndices(chosen.slice).group[chosen.local];
  return slice => {
    const { index, group } = sliceIndices(slice), here = chosen && chosen.slice === slice ? chosen.local : -1;
    return {
      index: local => index[local],
      tones: local => palette[Math.floor(index[local] * steps / size)],
      alpha: local => alone || group[local] === same ? 1 : 0.13,
      chosen: local => local === here,
    };
  };
}
function drawMesh() {
  const { tpu } = DATA.machine, canvas = by("mesh"), width = canvas.getBoundingClientRect().width || 320;
  const made = prepare(canvas, tpu ? torusHeight(width) : domainsHeight(width));
  (tpu ? drawTorus : drawDomains)(made.ctx, made.width, made.height);
}
const redrawMesh = onFrame(drawMesh);

function meshControls() {
  const { tpu, slices, chips, sides } = DATA.machine, axes = plan().axes;
  if (mesh.axis === null) mesh.axis = busiestAxis();
  mesh.axis = Math.min(mesh.axis, Math.max(0, axes.length - 1));
  by("mesh-axis").replaceChildren(...axes.map((axis, i) => option(i,
    `${axis.name}: ${wholeText(axis.size)} over ${axisLinks(axis)}`)));
  if (!axes.length) by("mesh-axis").append(option(0, "no axis: one device"));
  by("mesh-axis").value = mesh.axis;
  by("mesh-turn").hidden = !tpu;
  by("mesh-cut-label").hidden = !tpu || sides.length < 3 || sides[0] < 4;
  by("mesh-cut").max = sides[0] - 1;
  by("mesh-slice-label").hidden = !tpu || shownSlices().length === slices;
  by("mesh-slice").max = slices - 1;
  by("mesh-chip").max = chips * slices - 1;
  meshSlices();
}
// The one whose links take longest in a step.
function busiestAxis() {
  const sent = plan().axes.map(axis => axisExchanges(axis).reduce((sum, one) => sum + one.seconds, 0));
  return Math.max(0, sent.indexOf(Math.max(...sent)));
}
function axisExchanges(axis) {
  return plan().time.exchanges.filter(one => one.axis.split("+").includes(axis.name) && one.bytes > 0);
}
function axisLinks(axis) {
  return axis.far > 1 && axis.near > 1 ? `${DATA.machine.near.name} and ${axis.over}` : axis.over;
}
function meshSlices() {
  const { slices, tpu } = DATA.machine, axis = plan().axes[mesh.axis], box = by("mesh-slices");
  box.hidden = !tpu || shownSlices().length === slices;
  if (box.hidden) return;
  const far = axis && axis.digits.find(([where]) => where === "slice");
  box.replaceChildren(...Array.from({ length: Math.min(slices, 1024) }, (_, i) => {
    const tone = far ? hue(axisIndex(axis, i, 0), axis.size, theme.dark ? 50 : 52) : colour("--c8");
    const made = element("button", { type: "button", tabindex: -1, style: `background:${tone}`,
      "aria-label": `slice ${i}`, title: `slice ${i}`,
      "aria-pressed": String(i === mesh.slice) }, String(i));
    made.onclick = () => chooseSlice(i);
    return made;
  }));
}
function chooseSlice(i) {
  mesh.slice = Math.max(0, Math.min(DATA.machine.slices - 1, Math.round(i) || 0));
  if (mesh.chip !== null) mesh.chip = mesh.slice * DATA.machine.chips + mesh.chip % DATA.machine.chips;
  meshAll();
}
function chooseChip(chip) {
  mesh.chip = chip === null ? null : Math.max(0,
    Math.min(DATA.machine.chips * DATA.machine.slices - 1, Math.round(chip) || 0));
  if (mesh.chip !== null) mesh.slice = Math.floor(mesh.chip / DATA.machine.chips);
  meshAll();
}
function meshAll() {
  by("mesh-slice").value = mesh.slice;
  by("mesh-chip").value = mesh.chip === null ? "" : mesh.chip;
  meshSlices();
  meshTold();
  meshLegend();
  redrawMesh();
}
function meshLegend() {
  const axis = plan().axes[mesh.axis], { machine } = DATA, parts = [];
  if (axis && axis.size <= 8) parts.push(...Array.from({ length: axis.size },
    (_, i) => swatch(hue(i, axis.size, theme.dark ? 62 : 57), `${axis.name} ${i}`)));
  else if (axis) {
    const stops = Array.from({ length: 13 },
      (_, i) => hue(Math.min(i * axis.size / 12, axis.size - 1), axis.size, theme.dark ? 62 : 57));
    parts.push(element("span", {}, `${axis.name} 0`,
      element("i", { class: "ramp", style: `background:linear-gradient(90deg,${stops.join(",")})` }),
      wholeText(axis.size - 1)));
  }
  if (machine.tpu && machine.chips > 1) parts.push(swatch("var(--link)", `${machine.near.name} links`, "line solid"));
  if (machine.wraps.some(Boolean)) parts.push(swatch("var(--c1)", "wraparound, one drawn per outer edge", "line"));
  if (machine.near.name === "NVLink" && machine.chips > 1 && domainsLayout(600).detailed) parts.push(swatch("var(--c2)", "NVLink"), swatch("var(--c4)", "network card"));
  by("mesh-legend").replaceChildren(...parts);
}

// --- what is told of a chip ---

function rows(pairs) {
  return element("dl", {}, ...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}
function meshTold() {
  const { machine } = DATA, axis = plan().axes[mesh.axis];
  if (mesh.chip === null) {
    by("mesh-told").replaceChildren(element("h3", {}, machine.name), element("p", {}, machine.says + "."),
      element("p", {}, axis ? axisSentence(axis) : "One device, so nothing is exchanged."),
        element("p", {}, "Choose a chip to see where it is, what it holds and whom it exchanges with."));
    return;
  }
  const slice = Math.floor(mesh.chip / machine.chips), local = mesh.chip % machine.chips,
    where = [["chip", wholeText(mesh.chip)]];
  if (machine.slices > 1 && machine.tpu) where.push(["slice", slice]);
  if (machine.tpu) where.push(["coordinates", chipCoordinates(local).join(", ")]);
  where.push(["host", wholeText(slice * machine.hosts + hostOf(local))]);
  if (machine.devices > 1) where.push(["jax devices", machine.devices]);
  const several = Array.from({ length: machine.devices }, (_, i) => i);
  const indices = plan().axes.map(one => [one.name,
    [...new Set(several.map(device => axisIndex(one, slice, local, device)))].join(" and ")
    + ` of ${wholeText(one.size)}`]);
  const holds = plan().shares.map(share => [share.what, holdsText(share, slice, local)]);
  by("mesh-told").replaceChildren(element("h3", {}, `chip ${wholeText(mesh.chip)}`), rows(where),
    ...(indices.length ? [element("h3", {}, "place in the mesh"), rows(indices)] : []),
    ...(holds.length ? [element("h3", {}, machine.devices > 1 ? "holds (its first device)" : "holds"), rows(holds)]
      : []),
    ...(axis ? [element("h3", {}, `exchanges along ${axis.name}`), element("p", {}, axisSentence(axis))] : []));
}
function axisSentence(axis) {
  const says = one => `${one.what}: ${bytesText(one.bytes)} per step over ${one.over}, ${secondsText(one.seconds)}`;
  const lasts = axisExchanges(axis).map(says).join("; "), groups = `between ${wholeText(axis.far)} groups`;
  const far = axis.far > 1 && axis.farBandwidth && axis.near > 1 ? `, ${bytesText(axis.farBandwidth)}/s ${groups}` : "";
  const speed = `${bytesText(axis.bandwidth)}/s per device${far}`;
  return `${axis.name} joins ${wholeText(axis.size)} devices over ${axisLinks(axis)} (${speed})${lasts && "; " + lasts}.`;
}
function holdsText(share, slice, local) {
  let part = 0, parts = 1;
  for (const name of share.axes) {
    const axis = plan().axes.find(one => one.name === name);
    if (!axis) continue;
    part = part * axis.size + axisIndex(axis, slice, local);
    parts *= axis.size;
  }
  if (parts === 1) return `all ${wholeText(share.total)}`;
  if (share.total % parts) return share.total < parts ? `all ${wholeText(share.total)}`
    : `part ${wholeText(part)} of ${wholeText(parts)}`;
  const each = share.total / parts;
  return each === 1 ? `${wholeText(part)} of ${wholeText(share.total)}`
    : `${wholeText(part * each)} to ${wholeText((part + 1) * each - 1)} of ${wholeText(share.total)}`;
}
function meshWords() {
  const { machine } = DATA, many = machine.tpu && machine.slices > shownSlices().length;
  const shape = machine.tpu ? "Each block is a chip; chips of one host stand closer together."
    : !machine.near.bytes ? "Each square is a machine without accelerators."
    : machine.slices > 1 ? "Each square is a GPU; a frame is what NVLink joins, and network cards join the frames."
    : "Each square is a GPU, with its NVLink to the switch and its network card.";
  by("mesh-how").textContent = [shape,
    many ? `One of ${wholeText(machine.slices)} slices is drawn; the tiles are all of them, joined by ${machine.far.name}.` : "",
    "Its colour is its index along the chosen axis.",
    "Choose a chip: those that it exchanges with along that axis stay bright.",
    machine.tpu ? "Drag to turn it, or use the arrows." : "",
    `With the picture focused, the arrow keys go to the next chip${machine.tpu ? " and Shift with them turns it" : ""};`,
    "Escape lets the chip go."].filter(Boolean).join(" ");
}

// --- hands ---

function turnMesh(yaw, pitch) {
  torus.yaw += yaw;
  torus.pitch = Math.max(-1.45, Math.min(1.45, torus.pitch + pitch));
  torus.quick = true;
  clearTimeout(torus.settling);
  torus.settling = setTimeout(() => { torus.quick = false; redrawMesh(); }, 160);
  redrawMesh();
}
pointers(by("mesh"), {
  moved: (dx, dy) => { if (DATA.machine.tpu) turnMesh(dx * 0.008, dy * 0.008); },
  tapped: (x, y) => { const found = (DATA.machine.tpu ? pickTorus : pickDomains)(x,
    y); chooseChip(found === mesh.chip ? null : found); },
  zoomed: by => { torus.zoom = Math.max(0.4, Math.min(8, torus.zoom * by)); redrawMesh(); },
});
by("mesh").addEventListener("keydown", event => {
  const step = { ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, -1, 0], ArrowDown: [0, 1, 0],
    PageUp: [0, 0, 1], PageDown: [0, 0, -1] }[event.key];
  if (event.key === "Escape") return chooseChip(null);
  if (!step) return;
  event.preventDefault();
  if (event.shiftKey) return turnMesh(step[0] * 0.12, step[1] * 0.12);
  if (mesh.chip === null) return chooseChip(mesh.slice * DATA.machine.chips);
  if (!DATA.machine.tpu) return chooseChip(mesh.chip + step[0] + 4 * step[1]);
  const local = mesh.chip % DATA.machine.chips,
    next = chipPlace(local).map((v, i) => (v + step[i] + COUNTS[i]) % COUNTS[i]);
  chooseChip(mesh.chip - local + chipAt(...next));
});
by("mesh-turn").addEventListener("click", event => {
  const { turn, zoom } = event.target.dataset;
  if (turn) turnMesh(...turn.split(",").map(Number));
  if (zoom) { torus.zoom = Math.max(0.4, Math.min(8, torus.zoom * zoom)); redrawMesh(); }
});
by("mesh-axis").oninput = () => { mesh.axis = Number(by("mesh-axis").value); meshAll(); };
by("mesh-slice").oninput = () => chooseSlice(by("mesh-slice").value);
by("mesh-chip").oninput = () => chooseChip(by("mesh-chip").value === "" ? null : by("mesh-chip").value);
by("mesh-cut").oninput = () => { mesh.cut = Number(by("mesh-cut").value); redrawMesh(); };
torusReset();
pictures.push(function meshPicture() { meshControls(); meshTold(); meshLegend(); meshWords(); drawMesh(); });
