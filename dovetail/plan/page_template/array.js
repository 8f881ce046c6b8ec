// One chip from inside: the product that is chosen, the clock, and its tiling beside it.
const array = { product: null, tile: 0, clock: 0, playing: null };
const ofTpu = () => DATA.unit && DATA.unit.kind === "systolic";
const theUnit = () => ofTpu() ? systolic : tensorTiles;
const tiling = document.createElement("canvas");

function arrayProducts() {
  const seen = new Map();
  for (const one of plan().operations) {
    const key = [one.name, one.phase, one.m, one.k, one.n].join();
    if (!seen.has(key)) seen.set(key, one);
  }
  return [...seen.values()];
}
// The one of the forward pass, besides the head, that the most FLOPs go into.
function largestProduct(products) {
  const work = products.map(one => one.phase === "forward" && one.part !== "head" ? one.flops * one.times : 0);
  return Math.max(0, work.indexOf(Math.max(...work)));
}
function productName(one) {
  return `${one.name}${one.phase === "forward" ? "" : ", " + one.phase}: ${[one.m, one.k, one.n].map(wholeText).join(" x ")}`;
}
function drawArray() {
  by("array-section").hidden = !DATA.unit || !plan().operations.length;
  if (by("array-section").hidden) return;
  const products = arrayProducts();
  if (array.product === null) array.product = largestProduct(products);
  array.product = Math.min(array.product, products.length - 1);
  by("array-product").replaceChildren(...products.map((one, i) => option(i, productName(one))));
  by("array-product").value = array.product;
  const side = ofTpu() ? DATA.unit.side : DATA.unit.tile;
  by("array-title").textContent = ofTpu() ? `One chip from inside: the ${side} x ${side} systolic array`
    : "One chip from inside: tensor-core tiles";
  by("array-left-title").textContent = ofTpu() ? "The corner where the first weights are" : "One multiprocessor's tile";
  by("array-clock-name").textContent = ofTpu() ? "clock of this tile" : "slabs of k in this round";
  by("array-legend").replaceChildren(...(ofTpu()
    ? [swatch("var(--link)", "weight loaded, waiting"),
    swatch(hue(1, 8, 54, 60), "multiplying (colours tell rows apart)"), swatch("var(--rule)", "padding")]
    : [swatch("var(--c2)", "rows of the left factor"), swatch("var(--c3)", "columns of the right factor"),
      swatch("var(--c1)", "the slab at work"), swatch("var(--c0)", "sums")]));
  drawClock();
}
function drawClock() {
  if (by("array-section").hidden) return;
  const product = arrayProducts()[array.product], unit = theUnit(), most = unit.clocks(product);
  array.clock = Math.max(0, Math.min(most, array.clock));
  array.tile = Math.max(0, Math.min(unit.count(product) - 1, array.tile));
  by("array-clock").max = most;
  by("array-clock").value = array.clock;
  const { width } = by("array-left").getBoundingClientRect(), narrow = width < 430;
  const tall = ofTpu() ? (narrow ? 6 * Math.min(46, (width - 66) / 6) + 300 : 330) : narrow ? 300 : 360;
  const left = prepare(by("array-left"), tall);
  (ofTpu() ? drawSystolic : drawTensorTile)(left.ctx, left.width, left.height, product, array.tile, array.clock);
  drawTiling(product);
  by("array-told").textContent = (ofTpu() ? systolicWords : tensorWords)(product, array.tile, array.clock);
  by("array-how").textContent = (ofTpu() ? systolicHow : tensorHow)(product);
}
const redrawClock = onFrame(drawClock);

// The matrix that is cut, one pixel a tile, stretched; what is beyond its edge is padding.
function drawTiling(product) {
  const { down, across, side } = theUnit().tiles(product), tall = ofTpu() ? product.k : product.m, wide = product.n;
  by("array-right-title").textContent = ofTpu()
    ? `Its weights, ${wholeText(tall)} x ${wholeText(wide)}, in tiles of ${side} x ${side}`
    : `Its result, ${wholeText(tall)} x ${wholeText(wide)}, in tiles of ${side} x ${side}`;
  const { ctx, width, height } = prepare(by("array-right"), 330), room = [width - 64, height - 76];
  const stretch = Math.min(room[0] / across, room[1] / down), thin = 26;
  const w = Math.max(thin, Math.min(room[0], across * stretch)), h = Math.max(thin, Math.min(room[1], down * stretch)),
    x = 44 + (room[0] - w) / 2, y = 30;
  array.box = { x, y, w, h, down, across };
  const shown = [Math.min(across, 512), Math.min(down, 512)], inside = tiling.getContext("2d");
  [tiling.width, tiling.height] = shown;
  const image = inside.createImageData(...shown), tones = [theme.raised, colour("--c0"), theme.link].map(numbers);
  const processors = DATA.unit.processors || 1;
  for (let i = 0; i < shown[1]; i++) for (let j = 0; j < shown[0]; j++) {
    const at = Math.floor(i * down / shown[1]) * across + Math.floor(j * across / shown[0]),
      round = ofTpu() ? at : Math.floor(at / processors);
    image.data.set(round === array.tile ? tones[1] : round < array.tile ? tones[2] : tones[0], 4 * (i * shown[0] + j));
  }
  inside.putImageData(image, 0, 0);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(tiling, x, y, w, h);
  tilingLines(ctx, x, y, w, h, down, across);
  tilingPadding(ctx, x, y, w, h, tall / (down * side), wide / (across * side));
  if (ofTpu()) {
    const column = array.tile % across, row = Math.floor(array.tile / across);
    ctx.fillStyle = colour("--c0");
    ctx.fillRect(x + column * w / across, y + row * h / down, Math.max(3, w / across), Math.max(3, h / down));
  } else if (h * processors / across / down < 3) {  // a round too thin to be seen
    ctx.fillStyle = colour("--c0");
    ctx.fillRect(x, Math.min(y + h - 3, y + h * array.tile * processors / across / down), w, 3);
  }
  ctx.fillStyle = theme.dim;
  ctx.textAlign = "center";
  ctx.fillText(`n = ${wholeText(wide)}: ${wholeText(across)} ${across === 1 ? "tile" : "tiles"}`, x + w / 2, y - 10);
  const waste = ofTpu() ? "padding" : "padding and last round";
  ctx.fillText(`${shareText(1 - product.wasted)} useful, ${shareText(product.wasted)} ${waste}`, width / 2, y + h + 34);
  ctx.save();
  ctx.translate(x - 12, y + h / 2);
  ctx.rotate(-Math.PI / 2);
  ctx.fillText(`${ofTpu() ? "k" : "m"} = ${wholeText(tall)}`, 0, 0);
  ctx.restore();
  ctx.fillStyle = colour("--c2");
  ctx.fillRect(x, y + h + 10, w * (1 - product.wasted), 6);
  ctx.fillStyle = theme.bad;
  ctx.fillRect(x + w * (1 - product.wasted), y + h + 10, w * product.wasted, 6);
  ctx.textAlign = "start";
}
function tilingLines(ctx, x, y, w, h, down, across) {
  ctx.strokeStyle = theme.link;
  ctx.lineWidth = 0.5;
  ctx.beginPath();
  if (w / across > 4) for (let j = 0; j <= across; j++) { ctx.moveTo(x + j * w / across,
    y); ctx.lineTo(x + j * w / across, y + h); }
  if (h / down > 4) for (let i = 0; i <= down; i++) { ctx.moveTo(x, y + i * h / down); ctx.lineTo(x + w,
    y + i * h / down); }
  ctx.stroke();
  ctx.lineWidth = 1;
  ctx.strokeRect(x, y, w, h);
}
function tilingPadding(ctx, x, y, w, h, tall, wide) {
  ctx.fillStyle = theme.bad;
  ctx.globalAlpha = 0.55;
  if (tall < 1) ctx.fillRect(x, y + h * tall, w, h * (1 - tall));
  if (wide < 1) ctx.fillRect(x + w * wide, y, w * (1 - wide), h * tall);
  ctx.globalAlpha = 1;
}
function advance(by) {
  const product = arrayProducts()[array.product], unit = theUnit();
  array.clock += by;
  if (array.clock > unit.clocks(product)) Object.assign(array,
    { clock: 0, tile: (array.tile + 1) % unit.count(product) });
  drawClock();
}
function play(on) {
  clearInterval(array.playing);
  array.playing = on ? setInterval(() => { if (!document.hidden) advance(1); }, ofTpu() ? 110 : 90) : null;
  by("array-play").textContent = on ? "pause" : "play";
}
// when some rows are on their way
function restartArray() { Object.assign(array, { clock: ofTpu() ? DATA.unit.side + 6 : 0, tile: 0 }); }
by("array-play").onclick = () => play(!array.playing);
by("array-step").onclick = () => { play(false); advance(1); };
by("array-back").onclick = () => { play(false); advance(-1); };
by("array-leap").onclick = () => advance(theUnit().leap(arrayProducts()[array.product]));
by("array-restart").onclick = () => { Object.assign(array, { clock: 0, tile: 0 }); drawClock(); };
by("array-clock").oninput = () => { array.clock = Number(by("array-clock").value); drawClock(); };
by("array-product").oninput = () => { array.product = Number(by("array-product").value); restartArray(); drawClock(); };
pointers(by("array-right"), {
  tapped: (px, py) => {
    const { x, y, w, h, down, across } = array.box;
    if (px < x || px > x + w || py < y || py > y + h) return;
    const at = Math.floor((py - y) / h * down) * across + Math.floor((px - x) / w * across);
    array.tile = ofTpu() ? at : Math.floor(at / (DATA.unit.processors || 1));
    array.clock = ofTpu() ? DATA.unit.side : 0;
    drawClock();
  },
});
if (DATA.unit) restartArray();
pictures.push(drawArray);
