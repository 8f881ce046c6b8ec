// GPUs: the NVLink domains that a switch joins, each GPU's network card, and the network between them.
const domains = { places: [] };

function domainsLayout(width) {
  const { chips, slices: total, host } = DATA.machine, detailed = total <= 16 && chips <= 8;
  const wide = chips <= 8 ? Math.min(chips, 4) : 3 * host[0], tall = Math.ceil(chips / wide);
  const gap = detailed ? (width < 520 ? 10 : 18) : 8, left = total > 1 && detailed ? 18 : 4;
  // as many beside each other as the picture is about as high as wide with
  const many = Math.round(Math.sqrt(total * width / 460 * tall / wide * 0.9)), most = Math.floor(width / (wide * 7 + 8));
  const columns = total === 1 ? 1 : detailed ? (total <= 4 || width < 700 ? 2 : 4) : Math.max(1, Math.min(total, many, most));
  const rows = Math.ceil(total / columns), each = Math.min(520, (width - left - 6 - gap * (columns - 1)) / columns);
  const cell = detailed ? each / wide : Math.max(5, (each - 6 - 3 * hostGaps(wide)) / wide);
  const size = detailed ? Math.min(54, cell * 0.62) : cell * 0.84, named = each > 110;
  const high = detailed ? (tall > 1 ? 2 * size + 140 : size + 96) : cell * tall + (named ? 24 : 6);
  return { chips, total, detailed, wide, tall, columns, rows, gap, left, each, cell, size, high, named,
    height: rows * (high + gap) + 12 };
}
// Between the hosts of a row, where a domain has several.
function hostGaps(wide) { return DATA.machine.hosts > 1 ? wide / DATA.machine.host[0] - 1 : 0; }
function domainsHeight(width) { return Math.max(150, domainsLayout(width).height); }
function drawDomains(ctx, width, height) {
  const at = domainsLayout(width), look = meshLook();
  domains.places = [];
  const start = at.columns === 1 ? Math.max(at.left, (width - at.each) / 2) : at.left;
  for (let d = 0; d < at.total; d++) {
    const x = start + d % at.columns * (at.each + at.gap), y = 6 + Math.floor(d / at.columns) * (at.high + at.gap);
    if (at.detailed) drawDomain(ctx, at, look(d), d, x, y);
    else drawSmallDomain(ctx, at, look(d), d, x, y);
  }
  if (at.detailed && at.total > 1) drawNetwork(ctx, at, start);
}
function drawDomain(ctx, at, look, d, x, y) {
  const middle = y + at.high / 2, bar = 24;
  ctx.fillStyle = theme.raised;
  ctx.strokeStyle = theme.rule;
  rounded(ctx, x, y, at.each, at.high, 10);
  ctx.fill();
  ctx.stroke();
  ctx.fillStyle = theme.dim;
  ctx.fillText(at.total > 1 ? `machine ${d}` : "one machine", x + 10, y + 14);
  if (!DATA.machine.near.bytes) return drawGpu(ctx, look, d, 0, x + at.each / 2, middle, at.size, true);  // a CPU
  const first = at.tall > 1 ? middle : y + at.high - 26;
  rounded(ctx, x + 12, first - bar / 2, at.each - 24, bar, 6);
  ctx.fillStyle = theme.card;
  ctx.fill();
  ctx.strokeStyle = colour("--c2");
  ctx.stroke();
  for (let g = 0; g < at.chips; g++) {
    const above = Math.floor(g / at.wide) === 0, column = g % at.wide;
    const cx = x + 8 + (at.each - 16) / at.wide * (column + 0.5),
      cy = above ? first - bar / 2 - 18 - at.size / 2 : first + bar / 2 + 18 + at.size / 2;
    const out = above ? cy - at.size / 2 : cy + at.size / 2, card = out + (above ? -17 : 17);
    ctx.globalAlpha = look.alpha(g);
    ctx.strokeStyle = colour("--c2");
    ctx.lineWidth = 2;
    line(ctx, cx, above ? cy + at.size / 2 : cy - at.size / 2, cx, above ? first - bar / 2 : first + bar / 2);
    ctx.strokeStyle = colour("--c4");
    ctx.lineWidth = 1.5;
    line(ctx, cx, out, cx, card);
    ctx.fillStyle = colour("--c4");
    rounded(ctx, cx - 8, card - 4, 16, 8, 2);
    ctx.fill();
    ctx.lineWidth = 1;
    drawGpu(ctx, look, d, g, cx, cy, at.size, true);
  }
  ctx.globalAlpha = 1;
  ctx.fillStyle = theme.ink;
  ctx.textAlign = "center";
  ctx.fillText(at.each > 230 ? `NVSwitch: ${bytesText(DATA.machine.near.bytes)}/s per GPU` : "NVSwitch",
    x + at.each / 2, first + 4);
  ctx.textAlign = "start";
}
function line(ctx, x1, y1, x2, y2) {
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  ctx.lineTo(x2, y2);
  ctx.stroke();
}
function drawGpu(ctx, look, d, g, cx, cy, size, named) {
  ctx.globalAlpha = look.alpha(g);
  ctx.fillStyle = look.tones(g)[0];
  rounded(ctx, cx - size / 2, cy - size / 2, size, size, Math.min(8, size / 6));
  ctx.fill();
  if (named) {
    ctx.fillStyle = "#fff";
    ctx.textAlign = "center";
    ctx.font = "600 13px system-ui, sans-serif";
    ctx.fillText(String(look.index(g)), cx, cy + 5);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textAlign = "start";
  }
  ctx.globalAlpha = 1;
  if (look.chosen(g)) {
    ctx.strokeStyle = theme.ink;
    ctx.lineWidth = 2.5;
    rounded(ctx, cx - size / 2 - 3, cy - size / 2 - 3, size + 6, size + 6, Math.min(10, size / 5));
    ctx.stroke();
    ctx.lineWidth = 1;
  }
  domains.places.push([cx, cy, size / 2 + 3, d * DATA.machine.chips + g]);
}
function drawSmallDomain(ctx, at, look, d, x, y) {
  const { host, hosts } = DATA.machine, per = hosts > 1 ? host[0] : at.wide, top = y + (at.named ? 20 : 3);
  ctx.fillStyle = theme.raised;
  ctx.strokeStyle = theme.rule;
  rounded(ctx, x, y, at.each, at.high, 5);
  ctx.fill();
  ctx.stroke();
  if (at.named) {
    ctx.fillStyle = theme.dim;
    ctx.fillText(fitted(ctx, `domain ${d}: NVLink joins ${at.chips} GPUs`, at.each - 10), x + 5, y + 14);
  }
  for (let g = 0; g < at.chips; g++) {
    const column = g % at.wide, left = x + 3 + at.cell * column + 3 * Math.floor(column / per);
    drawGpu(ctx, look, d, g, left + at.cell / 2, top + at.cell * (Math.floor(g / at.wide) + 0.5), at.size, false);
  }
}
function drawNetwork(ctx, at, start) {
  const x = start - 12, top = 6 + at.high / 2, bottom = 6 + (at.rows - 1) * (at.high + at.gap) + at.high / 2;
  ctx.strokeStyle = ctx.fillStyle = colour("--c4");
  ctx.lineWidth = 2;
  if (at.rows > 1) line(ctx, x, top, x, bottom);
  for (let r = 0; r < at.rows; r++) {
    const y = 6 + r * (at.high + at.gap) + at.high / 2;
    line(ctx, x, y, start, y);
    for (let c = 1; c < Math.min(at.columns, at.total - r * at.columns); c++) line(ctx,
      start + c * (at.each + at.gap) - at.gap, y, start + c * (at.each + at.gap), y);
  }
  ctx.lineWidth = 1;
}
function pickDomains(x, y) {
  const found = domains.places.find(([cx, cy, reach]) => Math.abs(cx - x) <= reach && Math.abs(cy - y) <= reach);
  return found ? found[3] : null;
}
