// A TPU's systolic array: a square of weights stays, activations come in from the left, one row's numbers each a clock
// later
// than the one above, and sums fall out below. Numbers are small stand-ins: the real ones are the model's.
const systolic = {
  tiles(product) {
    const side = DATA.unit.side;
    return { side, down: Math.ceil(product.k / side), across: Math.ceil(product.n / side) };
  },
  // Of one tile: its weights are loaded, then the rows stream through until the last sum has left.
  clocks(product) { return DATA.unit.side + product.m + 2 * DATA.unit.side - 2; },
  count(product) { const { down, across } = systolic.tiles(product); return down * across; },
  leap: () => DATA.unit.side / 4,
  // What of the array the tile fills: the last ones along k and n may be smaller.
  fills(product, tile) {
    const { side, across } = systolic.tiles(product), row = Math.floor(tile / across), column = tile % across;
    return { rows: Math.min(side, product.k - row * side), columns: Math.min(side, product.n - column * side), row,
      column };
  },
};
const activation = (r, i) => ((r * 7 + i * 5 + (r * i) % 3) % 5) - 2;
const weight = (i, j) => ((i * 3 + j * 11 + (i * j) % 4) % 5) - 2;

// The row whose number is in cell (i, j) at this clock; null: none.
function rowIn(clock, i, j, product) {
  const row = clock - DATA.unit.side - i - j;
  return row >= 0 && row < product.m ? row : null;
}
function drawSystolic(ctx, width, height, product, tile, clock) {
  const narrow = width < 430, cells = 6, fills = systolic.fills(product, tile);
  const cell = Math.min(46, (narrow ? width - 66 : width * 0.62 - 66) / cells), left = 62, top = 12;
  drawCorner(ctx, left, top, cell, cells, product, fills, clock);
  const size = narrow ? Math.min(190, width - 20) : Math.min(230, width - left - cells * cell - 24);
  const x = narrow ? (width - size) / 2 : width - size - 2, y = narrow ? top + cells * cell + 66 : top;
  drawWholeArray(ctx, x, y, size, product, fills, clock);
  ctx.fillStyle = theme.dim;
  ctx.textAlign = "center";
  ctx.fillText(`all ${DATA.unit.side} x ${DATA.unit.side} cells`, x + size / 2, y + size + 15);
  ctx.textAlign = "start";
}
function drawCorner(ctx, left, top, cell, cells, product, fills, clock) {
  const loaded = Math.min(DATA.unit.side, clock);
  ctx.textAlign = "center";
  for (let i = 0; i < cells; i++) for (let j = 0; j < cells; j++) {
    const x = left + j * cell, y = top + i * cell, padded = i >= fills.rows || j >= fills.columns,
      row = rowIn(clock, i, j, product);
    const on = row !== null && !padded;
    ctx.fillStyle = padded ? theme.rule : on ? hue(row % 8, 8, theme.dark ? 42 : 56, 55) : loaded > i ? theme.raised
      : theme.card;
    rounded(ctx, x + 1.5, y + 1.5, cell - 3, cell - 3, 5);
    ctx.fill();
    ctx.strokeStyle = theme.link;
    ctx.stroke();
    if (loaded <= i) continue;
    ctx.fillStyle = on ? "#fff" : theme.dim;
    ctx.font = "11px system-ui, sans-serif";
    ctx.fillText(padded ? "0" : `w ${weight(i, j)}`, x + cell / 2, y + cell * 0.4);
    if (!on) continue;
    let sum = 0;
    for (let n = 0; n <= i; n++) sum += activation(row, n) * weight(n, j);
    ctx.font = "600 12px system-ui, sans-serif";
    ctx.fillText(`Σ ${sum}`, x + cell / 2, y + cell * 0.76);
  }
  ctx.font = "11px system-ui, sans-serif";
  // activations on their way in
  for (let i = 0; i < cells && i < fills.rows; i++) for (let ahead = 0; ahead < 2; ahead++) {
    const row = clock - DATA.unit.side - i + 1 + ahead;
    if (row < 0 || row >= product.m || clock < DATA.unit.side - 2) continue;
    const x = left - 16 - 26 * ahead, y = top + (i + 0.5) * cell;
    ctx.fillStyle = hue(row % 8, 8, theme.dark ? 42 : 56, 55);
    ctx.beginPath();
    ctx.arc(x, y, 11, 0, 7);
    ctx.fill();
    ctx.fillStyle = "#fff";
    ctx.fillText(activation(row, i), x, y + 4);
  }
  ctx.fillStyle = theme.dim;
  const below = top + cells * cell + 14;
  for (let j = 0; j < cells; j++) ctx.fillText("↓", left + (j + 0.5) * cell, below);
  ctx.fillText(`sums go on through ${DATA.unit.side - cells} more rows`, left + cells * cell / 2, below + 17);
  ctx.textAlign = "start";
}
const arrayImage = document.createElement("canvas");
function drawWholeArray(ctx, x, y, size, product, fills, clock) {
  const side = DATA.unit.side, inside = arrayImage.getContext("2d"), tones = {};
  arrayImage.width = arrayImage.height = side;
  for (const [name, value] of [["empty", theme.card], ["loaded", theme.link],
    ["padded", theme.rule]]) tones[name] = numbers(value);
  const rows = Array.from({ length: 8 }, (_, i) => numbers(hue(i, 8, theme.dark ? 48 : 54, 60)));
  const image = inside.createImageData(side, side);
  for (let i = 0; i < side; i++) for (let j = 0; j < side; j++) {
    const row = rowIn(clock, i, j, product), padded = i >= fills.rows || j >= fills.columns;
    const tone = padded ? tones.padded : row !== null ? rows[Math.floor(row / 8) % 8] : clock > i ? tones.loaded
      : tones.empty, at = 4 * (i * side + j);
    image.data.set(tone, at);
  }
  inside.putImageData(image, 0, 0);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(arrayImage, x, y, size, size);
  ctx.strokeStyle = theme.dim;
  ctx.strokeRect(x, y, size, size);
  ctx.strokeStyle = theme.ink;
  ctx.strokeRect(x, y, size * 6 / side, size * 6 / side);
}
const toneCache = new Map();
function numbers(tone) {  // what a colour is in red, green, blue and 255
  if (!toneCache.has(tone)) {
    const one = document.createElement("canvas").getContext("2d");
    one.fillStyle = tone;
    one.fillRect(0, 0, 1, 1);
    toneCache.set(tone, [...one.getImageData(0, 0, 1, 1).data]);
  }
  return toneCache.get(tone);
}
// Cells that multiply something of the product at this clock: those on the diagonals that a row is on.
function busyCells(product, fills, clock) {
  let busy = 0;
  const last = clock - DATA.unit.side, first = Math.max(0, last - product.m + 1);
  for (let d = first; d <= Math.min(last, fills.rows + fills.columns - 2); d++)
    busy += Math.max(0, Math.min(d, fills.rows - 1) - Math.max(0, d - fills.columns + 1) + 1);
  return busy;
}
function systolicWords(product, tile, clock) {
  const fills = systolic.fills(product, tile), side = DATA.unit.side, busy = wholeText(busyCells(product, fills, clock));
  if (clock < side) return `Clock ${wholeText(clock)}: the tile's weights are being loaded, ${clock} of ${side} rows are `
    + "there. (On the chip the next tile's are loaded while this one computes.)";
  const out = Math.max(0, Math.min(product.m, clock - side - (side - 1)));
  return `Clock ${wholeText(clock)}: ${busy} of ${wholeText(side * side)} cells multiply; `
    + `${wholeText(out)} of ${wholeText(product.m)} rows have their first sum at the bottom.`;
}
function systolicHow(product) {
  const { side, down, across } = systolic.tiles(product), size = [product.m, product.k, product.n].map(wholeText).join(" x ");
  const idle = 1 - product.m / (product.m + 2 * side - 2);
  return [`The product ${size} is cut into ${wholeText(down)} x ${wholeText(across)} squares of weights,`,
    `and all ${wholeText(product.m)} rows of activations stream through each.`,
    product.wasted > 0.0005 ? `Padding k and n to multiples of ${side} wastes ${shareText(product.wasted)} of the array.`
      : `k and n are multiples of ${side}, so padding wastes nothing.`,
    `Filling and emptying the array would leave ${shareText(idle)} of a tile's time unused if the next tile did not follow`,
    "at once. Colours tell apart the rows that pass; the numbers are stand-ins. A chip has several such arrays.",
    DATA.unit.published ? "" : `The side of this chip's array is not published: ${side} is that of the generation before.`,
  ].filter(Boolean).join(" ");
}
