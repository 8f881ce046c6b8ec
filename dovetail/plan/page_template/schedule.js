// One step of one device as a schedule: products in their order, and what is sent beside them or between them.
//
// Each layer's weights are gathered while the layer before is computed; gradients are sent when a layer has them. What
// may
// not overlap stops the products. Where nothing overlaps, one thing comes after another. Lane 0 is the products'.
const ORDER = ["projections", "attention", "feed-forward", "experts"];

// When in a step an exchange takes place, by what it is for (plan.exchange).
function placeOf(exchange, trained) {
  if (/gather weights/.test(exchange.what)) return { when: "before", forward: 1, backward: 1 };
  if (/scatter gradients|sum .*gradients/.test(exchange.what)) return { when: "after", forward: 0, backward: 1 };
  if (/gradients/.test(exchange.what)) return { when: "within", forward: 0, backward: 1 };
  return { when: "within", forward: 1, backward: trained ? 1 : 0 };
}
// The links along each axis are a lane of their own: those of different axes may be busy at the same time.
function lanesOf(one) {
  const links = new Map(one.time.exchanges.map(each => [`${each.over} ${each.axis}`, each]));
  const near = each => each.over === DATA.machine.far.name ? 1 : 0;
  return ["products", ...[...links.keys()].sort((a, b) => near(links.get(a)) - near(links.get(b)))];
}
// Blocks of one layer and of the head: [part, seconds], whose sum over the step is what its products, or its memory,
// take.
function blocksOf(one) {
  const { peak, bandwidth } = DATA.roofs || { peak: 1e12, bandwidth: 1e11 };
  const cost = op => Math.max(op.flops / peak, (op.read + op.written) / bandwidth) * op.times;
  const total = one.operations.reduce((sum, op) => sum + cost(op), 0) || 1;
  const scale = Math.max(one.time.products, one.time.memory) / total;
  const sum = (part, forward) => scale * one.operations.filter(op => op.part === part
    && (op.phase === "forward") === forward).reduce((all, op) => all + cost(op), 0);
  const layer = forward => ORDER.map(part => [part,
    sum(part, forward) / one.layers / one.microsteps]).filter(([, seconds]) => seconds > 0);
  return { forward: layer(true), backward: layer(false).reverse(),
    head: [["head", (sum("head", true) + sum("head", false)) / one.microsteps]] };
}
function slotsOf(one) {
  const blocks = blocksOf(one), slots = [], trained = blocks.backward.length > 0;
  for (let micro = 0; micro < one.microsteps; micro++) {
    for (let layer = 0; layer < one.layers; layer++) slots.push({ micro, layer, pass: "forward",
      blocks: blocks.forward });
    slots.push({ micro, layer: -1, pass: "head", blocks: blocks.head });
    for (let layer = one.layers - 1; trained
      && layer >= 0; layer--) slots.push({ micro, layer, pass: "backward", blocks: blocks.backward });
  }
  return slots;
}
// What each slot sends: [exchange, seconds] before, within and after it.
function sendsOf(one, slots) {
  const sends = slots.map(() => ({ before: [], within: [], after: [] }));
  for (const exchange of one.time.exchanges) {
    const place = placeOf(exchange, slots.some(slot => slot.pass === "backward"));
    const share = slot => slot.pass === "head" ? 0 : place[slot.pass];
    const total = slots.reduce((sum, slot) => sum + share(slot), 0);
    slots.forEach((slot, i) => { if (share(slot)) sends[i][place.when].push([exchange,
      exchange.seconds * share(slot) / total]); });
  }
  return sends;
}
function schedule(one, overlapped) {
  const slots = slotsOf(one), sends = sendsOf(one, slots), events = [], lanes = lanesOf(one),
    free = lanes.map(() => 0), begins = [];
  const laneOf = exchange => lanes.indexOf(`${exchange.over} ${exchange.axis}`);
  const add = (lane, from, seconds, slot, what, exchange) => {
    events.push({ lane, from, to: from + seconds, slot, what, exchange });
    free[lane] = Math.max(free[lane], from + seconds);
    return from + seconds;
  };
  const send = ([exchange, seconds], earliest, slot) => {
    const lane = laneOf(exchange), from = Math.max(earliest, overlapped ? free[lane] : Math.max(...free));
    return add(lane, from, seconds, slot, exchange.what, exchange);
  };
  const ready = slots.map(() => 0);
  const gather = i => {
    const earliest = i && overlapped ? begins[i - 1] : 0;
    for (const each of sends[i].before) ready[i] = Math.max(ready[i], send(each, earliest, slots[i]));
  };
  slots.forEach((slot, i) => {
    if (!overlapped || i === 0) gather(i);
    let now = Math.max(free[0], ready[i], overlapped ? 0 : Math.max(...free));
    begins[i] = now;
    if (overlapped && i + 1 < slots.length) gather(i + 1);
    // what may overlap runs beside the slot's products and must be there at its end; what may not splits them in two
    const beside = overlapped ? sends[i].within.filter(([exchange]) => exchange.overlaps) : [];
    const between = sends[i].within.filter(one => !beside.includes(one));
    const arrived = beside.map(one => send(one, now, slot));
    slot.blocks.forEach(([part, seconds], n) => {
      now = add(0, Math.max(now, overlapped ? 0 : Math.max(...free)), seconds, slot, part);
      const stops = slot.blocks.length > 1 ? [1, slot.blocks.length - 1].includes(n)
        ? 1 / (new Set([1, slot.blocks.length - 1]).size) : 0 : 1;
      if (stops) for (const [exchange, whole] of between) now = send([exchange, whole * stops], now, slot);
    });
    now = Math.max(now, ...arrived);
    free[0] = Math.max(free[0], now);
    for (const one of sends[i].after) {
      const end = send(one, now, slot);
      if (overlapped && !one[0].overlaps) free[0] = Math.max(free[0], end);
    }
  });
  return { events, lanes, seconds: Math.max(...free),
    slots: slots.map((slot, i) => ({ ...slot, from: begins[i],
    to: i + 1 < slots.length ? begins[i + 1] : Math.max(...free) })) };
}
