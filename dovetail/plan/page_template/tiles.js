// A GPU's tensor cores: no systolic array. Each multiprocessor makes one tile of the result, adding a slab of k at a
// time.
const tensorTiles = {
  tiles(product) {
    const { tile } = DATA.unit;
    return { side: tile, down: Math.ceil(product.m / tile), across: Math.ceil(product.n / tile) };
  },
  slabs: product => Math.ceil(product.k / DATA.unit.slab),
  rounds(product) {
    const { down, across } = tensorTiles.tiles(product);
    return Math.ceil(down * across * product.copies / (DATA.unit.processors || 1));
  },
  clocks(product) { return tensorTiles.slabs(product); },
  count: product => tensorTiles.rounds(product),  // a round of tiles on all multiprocessors takes the place of a tile
  leap: product => Math.max(1, Math.round(tensorTiles.slabs(product) / 8)),
};
function drawTensorTile(ctx, width, height, product, round, clock) {
  const { tile, slab } = DATA.unit, slabs = tensorTiles.slabs(product), done = Math.min(clock, slabs);
  const size = Math.min(230, width * 0.5, height - 120), long = size * 0.62,
    x = Math.min(width - size - 12, long + 40), y = 96;
  const shown = Math.min(12, slabs), now = Math.min(slabs - 1, clock),
    first = Math.max(0, Math.min(slabs - shown, now - 5));
  ctx.fillStyle = theme.raised;
  ctx.fillRect(x, y, size, size);
  ctx.globalAlpha = 0.15 + 0.85 * done / slabs;
  ctx.fillStyle = colour("--c0");
  ctx.fillRect(x, y, size, size);
  ctx.globalAlpha = 1;
  const each = long / shown, high = 62 / shown;
  for (let i = 0; i < shown; i++) {  // the slabs of both factors, the one at work in full colour
    const at = first + i, on = at === now && clock < slabs;
    ctx.globalAlpha = on ? 1 : at < clock ? 0.28 : 0.6;
    ctx.fillStyle = on ? colour("--c1") : colour("--c2");
    ctx.fillRect(x - 12 - long + i * each, y, each - 1.5, size);
    ctx.fillStyle = on ? colour("--c1") : colour("--c3");
    ctx.fillRect(x, y - 12 - 62 + i * high, size, high - 1);
  }
  ctx.globalAlpha = 1;
  ctx.strokeStyle = theme.link;
  ctx.beginPath();
  for (let i = 0; i <= 8; i++) {  // the pieces that single instructions make
    ctx.moveTo(x + i * size / 8, y);
    ctx.lineTo(x + i * size / 8, y + size);
    ctx.moveTo(x, y + i * size / 8);
    ctx.lineTo(x + size, y + i * size / 8);
  }
  ctx.globalAlpha = 0.5;
  ctx.stroke();
  ctx.globalAlpha = 1;
  ctx.fillStyle = theme.dim;
  ctx.textAlign = "center";
  ctx.fillText(`${tile} rows x ${slab} of k`, x - 12 - long / 2, y + size + 15);
  ctx.fillText(`sums of ${tile} x ${tile}, in registers`, x + size / 2, y + size + 15);
  ctx.fillText(`${slab} of k x ${tile} columns`, x + size / 2, 14);
  ctx.textAlign = "start";
}
function tensorWords(product, round, clock) {
  const { processors } = DATA.unit, slabs = tensorTiles.slabs(product), { down, across } = tensorTiles.tiles(product);
  const all = down * across * product.copies, here = processors ? Math.min(processors, all - round * processors) : 1;
  return `Round ${wholeText(round + 1)} of ${wholeText(tensorTiles.rounds(product))}: ${wholeText(here)} of `
    + `${processors ? wholeText(processors) : "the"} multiprocessors make a tile each; `
    + `${wholeText(Math.min(clock, slabs))} of ${wholeText(slabs)} slabs of k are added.`;
}
function tensorHow(product) {
  const { tile, processors } = DATA.unit, { down, across } = tensorTiles.tiles(product), each = `${tile} x ${tile}`;
  const many = product.copies > 1 ? `, ${wholeText(product.copies)} times,` : "";
  return ["A GPU has tensor cores and no systolic array: the result of",
    `${wholeText(product.m)} x ${wholeText(product.n)} is cut into ${wholeText(down)} x ${wholeText(across)} tiles of ${each}${many}`,
    `and ${processors ? wholeText(processors) : "its"} multiprocessors take one each, round after round. Padding and the last`,
    `round, in which some have no tile, waste ${shareText(product.wasted)} of them.`,
    `Libraries choose other tiles where they fit better; ${each} is the usual large one.`].join(" ");
}
