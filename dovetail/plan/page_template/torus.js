// A torus of chips, in two or three dims, seen from any side: the projection, the drawing, and which chip is at a
// place.
// Sides are laid out from the last: to the right, down, towards the viewer.
const SPACE = { host: 0.3, chip: 0.5, boxes: 20000, links: 2600, plates: 300, together: 20000, slices: 4 };
const torus = { yaw: 0, pitch: 0, zoom: 1, places: null, quick: false };

function torusDims() {
  const { sides, host } = DATA.machine, count = [1, 1, 1], group = [1, 1, 1];
  sides.forEach((side, i) => { count[sides.length - 1 - i] = side; group[sides.length - 1 - i] = host[i]; });
  const reach = count.map((n, i) => group[i] > 1 && n > group[i] ? (n - 1)
    + SPACE.host * (Math.ceil(n / group[i]) - 1) : n - 1);
  const wraps = count.map((_, i) => Boolean(DATA.machine.wraps[sides.length - 1 - i]));
  const at = (i, v) => v + (group[i] > 1
    && count[i] > group[i] ? SPACE.host * Math.floor(v / group[i]) : 0) - reach[i] / 2;
  return { count, group, reach, wraps, at, flat: sides.length < 3 };
}
function torusReset() {
  const flat = DATA.machine.sides.length < 3;
  Object.assign(torus, flat ? { yaw: 0, pitch: 0 } : { yaw: -0.62, pitch: 0.42 }, { zoom: 1 });
}
function chipSize(dims) { return dims.flat ? 0.66 : SPACE.chip; }
// Slices that are drawn: all of a few, or the chosen one of many.
function shownSlices() {
  const { slices, chips } = DATA.machine;
  return slices <= SPACE.slices && slices * chips <= SPACE.together ? Array.from({ length: slices }, (_, i) => i)
    : [mesh.slice];
}
function torusHeight(width) {
  const many = shownSlices().length, flat = DATA.machine.sides.length < 3;
  if (width < 520 && many > 1) return Math.round(Math.min(3, many) * width * 0.72);
  const across = width / (many > 1 && many < 4 ? many : 1),
    shape = flat ? Math.min(0.78, 0.16 + COUNTS[1] / COUNTS[0]) : many > 1 ? 1 : 0.68;
  return Math.round(Math.min(560, Math.max(220, across * shape)));
}
// Each slice has a cell of the picture to itself, and all turn together.
function torusCells(width, height, count) {
  const across = width < 520 ? 1 : count === 4 ? 2 : count, down = Math.ceil(count / across),
    low = count > 1 && across > 1 ? 30 : 0, left = count > 1 && across === 1 ? 22 : 0;
  const w = (width - left) / across, h = (height - low) / down;
  return Array.from({ length: count }, (_,
    i) => ({ x: left + w * (i % across), y: h * Math.floor(i / across), w, h, across }));
}
function torusCamera(cell, dims) {
  const whole = dims.reach.map(v => v + 1.6), radius = Math.hypot(...whole) / 2, far = 5.5 * radius;
  const [cy, sy, cp, sp] = [Math.cos(torus.yaw), Math.sin(torus.yaw), Math.cos(torus.pitch), Math.sin(torus.pitch)];
  // flat ones fill the picture; others may turn without leaving it
  const margin = dims.wraps.some(Boolean) ? 0.86 : 0.94;
  const fit = dims.flat ? margin * Math.min(cell.w / whole[0], cell.h / whole[1])
    : 0.97 * Math.min(cell.w, cell.h * 1.16) / (2 * radius);
  const scale = fit * torus.zoom;
  // of a step along each dim
  const right = [cy, 0, sy], down = [-sp * sy, cp, sp * cy], towards = [-cp * sy, -sp, cp * cy];
  const origin = [cell.x + cell.w / 2, cell.y + cell.h / 2];
  const project = (x, y, z) => {
    const near = towards[0] * x + towards[1] * y + towards[2] * z, s = scale * far / (far - near);
    return [origin[0] + s * (right[0] * x + right[1] * y + right[2] * z),
      origin[1] + s * (down[0] * x + down[1] * y + down[2] * z), near, s];
  };
  return { project, towards, scale, radius };
}
function drawTorus(ctx, width, height) {
  const dims = torusDims(), shown = shownSlices(), cells = torusCells(width, height, shown.length),
    chips = DATA.machine.chips;
  const places = { x: new Float32Array(chips * shown.length), y: new Float32Array(chips * shown.length),
    z: new Float32Array(chips * shown.length), size: 0, shown };
  const drawn = chips * shown.length, look = meshLook();
  ctx.lineJoin = "round";
  if (shown.length > 1) torusNetwork(ctx, cells, height);
  shown.forEach((slice, i) => {
    const camera = torusCamera(cells[i], dims);
    torusRings(ctx, dims, camera, false);
    if (drawn <= SPACE.plates) torusPlates(ctx, dims, camera);
    if (drawn > SPACE.links) torusFrame(ctx, dims, camera);
    torusChips(ctx, dims, camera, i * chips, places, look(slice), drawn);
    torusRings(ctx, dims, camera, true);
    torusSizes(ctx, dims, camera, cells[i]);
    if (shown.length > 1) {
      ctx.fillStyle = theme.dim;
      ctx.fillText(`slice ${slice}`, cells[i].x + 8, cells[i].y + 16);
    }
    places.size = Math.max(4, chipSize(dims) * camera.scale * 0.6);
  });
  torus.places = places;
}
function torusChips(ctx, dims, camera, first, places, look, drawn) {
  const nz = dims.count[2], half = chipSize(dims) / 2, { towards } = camera;
  const run = i => Array.from({ length: dims.count[i] }, (_, v) => towards[i] >= 0 ? v : dims.count[i] - 1 - v);
  const [xs, ys, zs] = [run(0), run(1), run(2)].map((all, i) => i === 2 ? all.filter(v => v < nz - mesh.cut) : all);
  const boxes = drawn <= SPACE.boxes && !(torus.quick && drawn > 700),
    links = drawn <= SPACE.links && !(torus.quick && drawn > 700);
  const edges = [0, 1, 2].map(i => {
    const a = camera.project(...[0, 1, 2].map(j => i === j ? half : 0)),
      b = camera.project(...[0, 1, 2].map(j => i === j ? -half : 0));
    return [(a[0] - b[0]) / 2 / camera.scale, (a[1] - b[1]) / 2 / camera.scale];
  });
  ctx.lineWidth = 1;
  let chosen = null;
  for (const z of zs) for (const y of ys) for (const x of xs) {
    const local = chipAt(x, y, z), [px, py, pz, s] = camera.project(dims.at(0, x), dims.at(1, y), dims.at(2, z));
    const k = first + local;
    places.x[k] = px; places.y[k] = py; places.z[k] = pz;
    const alpha = look.alpha(local);
    if (links) {
      ctx.strokeStyle = theme.link;
      ctx.globalAlpha = alpha < 1 ? 0.25 : 0.85;
      ctx.beginPath();
      for (let i = 0; i < 3; i++) {
        const to = (i === 0 ? x : i === 1 ? y : z) + (towards[i] >= 0 ? -1 : 1);
        if (to < 0 || to >= (i === 2 ? nz - mesh.cut : dims.count[i])) continue;
        const q = k + (towards[i] >= 0 ? -1 : 1) * STRIDES[i];  // behind, so drawn already: the link begins at its face
        ctx.moveTo(px, py);
        ctx.lineTo(places.x[q] + half * (px - places.x[q]), places.y[q] + half * (py - places.y[q]));
      }
      ctx.stroke();
    }
    ctx.globalAlpha = alpha;
    const tones = look.tones(local);
    if (boxes) torusBox(ctx, px, py, s, edges, towards, tones);
    else {
      const size = Math.max(1.4, 2 * half * s), fog = 0.5 + 0.5 * pz / camera.radius;
      ctx.fillStyle = tones[fog > 0.62 ? 0 : fog > 0.38 ? 1 : 2];
      ctx.fillRect(px - size / 2, py - size / 2, size, size);
    }
    if (look.chosen(local)) chosen = { px, py, s, tones };
  }
  ctx.globalAlpha = 1;
  if (chosen) torusChosen(ctx, chosen, half, edges, towards);
}
// In front of all others, wherever it is.
function torusChosen(ctx, { px, py, s, tones }, half, edges, towards) {
  const reach = Math.max(7, s * half * 1.9);
  ctx.fillStyle = theme.card;
  ctx.strokeStyle = theme.ink;
  ctx.beginPath();
  ctx.arc(px, py, reach, 0, 7);
  ctx.globalAlpha = 0.8;
  ctx.fill();
  ctx.globalAlpha = 1;
  ctx.lineWidth = 2;
  ctx.stroke();
  ctx.lineWidth = 1;
  torusBox(ctx, px, py, Math.max(s, 4 / half), edges, towards, tones);
}
// The three faces of a chip that look at the viewer, each with a tone of its own.
function torusBox(ctx, px, py, s, edges, towards, tones) {
  const signs = towards.map(v => v >= 0 ? 1 : -1), tone = COUNTS[2] > 1 ? [2, 0, 1] : [2, 1, 0];
  for (let i = 0; i < 3; i++) {
    if (Math.abs(towards[i]) < 0.02) continue;
    const [a, b] = [0, 1, 2].filter(j => j !== i).map(j => edges[j]);
    const cx = px + s * signs[i] * edges[i][0], cy = py + s * signs[i] * edges[i][1];
    ctx.fillStyle = tones[tone[i]];
    ctx.beginPath();
    ctx.moveTo(cx + s * (a[0] + b[0]), cy + s * (a[1] + b[1]));
    ctx.lineTo(cx + s * (a[0] - b[0]), cy + s * (a[1] - b[1]));
    ctx.lineTo(cx - s * (a[0] + b[0]), cy - s * (a[1] + b[1]));
    ctx.lineTo(cx - s * (a[0] - b[0]), cy - s * (a[1] - b[1]));
    ctx.fill();
  }
}
function pickTorus(x, y) {
  const { places } = torus, chips = DATA.machine.chips;
  let best = null, front = -Infinity;
  for (let k = 0; places && k < places.x.length; k++) {
    if (Math.abs(places.x[k] - x) > places.size || Math.abs(places.y[k] - y) > places.size) continue;
    const local = k % chips;
    if (places.z[k] <= front || chipPlace(local)[2] >= COUNTS[2] - mesh.cut) continue;
    front = places.z[k];
    best = places.shown[Math.floor(k / chips)] * chips + local;
  }
  return best;
}
