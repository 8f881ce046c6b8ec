// What is drawn around the chips of a torus: wraparound links, hosts, the frame, the sizes of its sides, the network.

// The links that close a side to a ring: drawn along the outer edges, for all rows would hide the chips; and the chosen
// chip's own.
function torusRings(ctx, dims, camera, front) {
  ctx.setLineDash([5, 4]);
  ctx.lineWidth = 1.5;
  ctx.strokeStyle = colour("--c1");
  for (let i = 0; i < 3; i++) {
    if (!dims.wraps[i] || dims.count[i] < 3) continue;
    const others = [0, 1, 2].filter(j => j !== i);
    const ends = others.map(j => dims.count[j] > 1 ? [0, dims.count[j] - 1] : [0]);
    for (const a of ends[0]) for (const b of ends[1]) {
      const nearer = others.reduce((sum, j, n) => sum + camera.towards[j] * dims.at(j, [a, b][n]), 0) >= 0;
      if (nearer !== front || (mesh.cut && front)) continue;
      torusArc(ctx, dims, camera, i, others, [a, b]);
    }
  }
  ctx.setLineDash([]);
  if (front && dims.flat) torusStubs(ctx, dims, camera);
}
// On a flat torus every row's way around begins as a stub.
function torusStubs(ctx, dims, camera) {
  ctx.globalAlpha = 0.6;
  ctx.beginPath();
  for (const i of [0, 1]) if (dims.wraps[i]) for (let v = 0; v < dims.count[1 - i]; v++) for (const sign of [-1, 1]) {
    const at = reach => camera.project(...[0, 1,
      2].map(j => j === i ? sign * (dims.reach[i] / 2 + reach) : j === 2 ? 0 : dims.at(j, v)));
    ctx.moveTo(...at(0.46).slice(0, 2));
    ctx.lineTo(...at(0.8).slice(0, 2));
  }
  ctx.stroke();
  ctx.globalAlpha = 1;
}
function torusArc(ctx, dims, camera, i, others, where) {
  const place = (along, out) => {
    const p = [0, 0, 0];
    p[i] = along;
    let long = 0;
    others.forEach((j, n) => { p[j] = dims.at(j, where[n]); long += p[j] ** 2; });
    others.forEach(j => { p[j] *= 1 + out / Math.max(0.5, Math.sqrt(long)); });
    if (!long) p[others[0]] -= out;
    return camera.project(...p);
  };
  const end = dims.reach[i] / 2, out = 0.9 + 0.07 * dims.reach[i];
  const [a, b, c, d] = [place(-end - 0.3, 0), place(-end - 0.6, out * 1.25), place(end + 0.6, out * 1.25),
    place(end + 0.3, 0)];
  ctx.globalAlpha = 0.75;
  ctx.beginPath();
  ctx.moveTo(a[0], a[1]);
  ctx.bezierCurveTo(b[0], b[1], c[0], c[1], d[0], d[1]);
  ctx.stroke();
  ctx.globalAlpha = 1;
}
function torusPlates(ctx, dims, camera) {
  const wide = [0, 1, 2].filter(i => dims.group[i] > 1);
  if (wide.length < 2) return;
  const [i, j] = wide, k = [0, 1, 2].find(n => n !== i && n !== j);
  ctx.strokeStyle = theme.dim;
  ctx.fillStyle = theme.raised;
  const [ci, cj, ck] = [i, j, k].map(n => dims.count[n]), [gi, gj] = [dims.group[i], dims.group[j]];
  for (let c = 0; c < ck; c++) for (let a = 0; a < ci; a += gi) for (let b = 0; b < cj; b += gj) {
    const corner = (p, q) => {
      const v = [0, 0, 0];
      v[i] = dims.at(i, a + (p ? dims.group[i] - 1 : 0)) + (p ? 0.46 : -0.46);
      v[j] = dims.at(j, b + (q ? dims.group[j] - 1 : 0)) + (q ? 0.46 : -0.46);
      v[k] = dims.at(k, c);
      return camera.project(...v);
    };
    ctx.beginPath();
    [[0, 0], [0, 1], [1, 1], [1, 0]].forEach(([p, q], n) => ctx[n ? "lineTo" : "moveTo"](...corner(p, q)));
    ctx.closePath();
    ctx.globalAlpha = dims.flat ? 1 : 0.4;
    ctx.fill();
    ctx.globalAlpha = 0.45;
    ctx.stroke();
  }
  ctx.globalAlpha = 1;
}
function torusCorners(dims, camera) {
  const end = dims.reach.map(v => v / 2 + 0.6);
  return [0, 1, 2, 3, 4, 5, 6, 7].map(n => camera.project((n & 1 ? 1 : -1) * end[0], (n & 2 ? 1 : -1) * end[1],
    (n & 4 ? 1 : -1) * end[2]));
}
function torusFrame(ctx, dims, camera) {
  const corners = torusCorners(dims, camera);
  ctx.strokeStyle = theme.link;
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let n = 0; n < 8; n++) for (const bit of [1, 2, 4]) if (!(n & bit)) {
    ctx.moveTo(corners[n][0], corners[n][1]);
    ctx.lineTo(corners[n | bit][0], corners[n | bit][1]);
  }
  ctx.stroke();
}
// How many chips each side has, beside an edge that is seen well.
function torusSizes(ctx, dims, camera, cell) {
  const corners = torusCorners(dims, camera);
  const middle = corners.reduce((sum, c) => [sum[0] + c[0] / 8, sum[1] + c[1] / 8], [0, 0]);
  ctx.fillStyle = theme.dim;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (let i = 0; i < 3; i++) {
    if (dims.count[i] < 2) continue;
    const bit = 1 << i, edges = [0, 1, 2, 3, 4, 5, 6,
      7].filter(n => !(n & bit)).map(n => [corners[n], corners[n | bit]]);
    const seen = edges.map(([a, b]) => ({ x: (a[0] + b[0]) / 2, y: (a[1] + b[1]) / 2,
      far: Math.hypot((a[0] + b[0]) / 2 - middle[0], (a[1] + b[1]) / 2 - middle[1]) }));
    const best = seen.reduce((a, b) => b.far + 0.2 * b.y > a.far + 0.2 * a.y ? b : a), out = 15 / Math.max(1, best.far);
    const x = best.x + (best.x - middle[0]) * out, y = best.y + (best.y - middle[1]) * out;
    ctx.fillText(String(dims.count[i]), Math.min(cell.x + cell.w - 14, Math.max(cell.x + 14, x)),
      Math.min(cell.y + cell.h - 8, Math.max(cell.y + 8, y)));
  }
  ctx.textAlign = "start";
  ctx.textBaseline = "alphabetic";
}
function torusNetwork(ctx, cells, height) {
  const across = cells[0].across, bar = across > 1 ? height - 18 : 10;
  ctx.strokeStyle = ctx.fillStyle = colour("--c4");
  ctx.lineWidth = 2;
  ctx.beginPath();
  for (const cell of cells) {
    const middle = across > 1 ? cell.x + cell.w / 2 : cell.y + cell.h / 2;
    if (across > 1) { ctx.moveTo(middle, cell.y + cell.h - 6); ctx.lineTo(middle, bar); }
    else { ctx.moveTo(34, middle); ctx.lineTo(bar, middle); }
  }
  const [first, last] = [cells[0], cells[Math.max(across, cells.length) - 1]];
  if (across > 1) { ctx.moveTo(first.x + first.w / 2, bar); ctx.lineTo(cells[across - 1].x + first.w / 2, bar); }
  else { ctx.moveTo(bar, first.y + first.h / 2); ctx.lineTo(bar, last.y + last.h / 2); }
  ctx.stroke();
  ctx.lineWidth = 1;
  ctx.fillText(DATA.machine.far.name, across > 1 ? first.x + first.w / 2 + 8 : 16,
    across > 1 ? bar + 14 : first.y + first.h - 4);
}
