// The timeline of one step: lanes of products and links, near enough to see a layer or far enough to see the step.
const timeline = { mode: "overlapped", from: 0, to: 1, made: null, key: "", told: null };
const EXCHANGES = ["--c1", "--c4", "--c6", "--c7", "--c10", "--c8"];

function drawTimeline() {
  by("timeline-section").hidden = !plan().operations.length;
  if (by("timeline-section").hidden) return;
  const key = [state.plan, timeline.mode].join();
  if (key !== timeline.key) {
    timeline.made = schedule(plan(), timeline.mode === "overlapped");
    Object.assign(timeline, { key, from: 0, to: timeline.made.seconds });
    timelineWords();
  }
  const { lanes } = timeline.made, tops = lanes.map((_, i) => i ? 48 + 38 * i : 30),
    highs = lanes.map((_, i) => i ? 30 : 50);
  const low = tops.at(-1) + highs.at(-1), { ctx, width, height } = prepare(by("timeline"), low + 32),
    left = width < 520 ? 64 : 104, right = width - 6;
  timeline.box = { left, right, tops, highs };
  const x = time => left + (time - timeline.from) / (timeline.to - timeline.from) * (right - left);
  ctx.fillStyle = theme.dim;
  lanes.forEach((name, i) => laneName(ctx, name, left - 8, tops[i] + highs[i] / 2 + 4));
  ctx.fillStyle = theme.raised;
  tops.forEach((top, i) => ctx.fillRect(left, top, right - left, highs[i]));
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, 0, right - left, height);
  ctx.clip();
  timelinePasses(ctx, x);
  const shown = lanes.map((_, lane) => timeline.made.events.filter(one => one.lane === lane && one.to > timeline.from
    && one.from < timeline.to));
  const thin = shown.map(all => all.length > 0 && (x(all.at(-1).to) - x(all[0].from)) / all.length < 3.5);
  shown.forEach((all, lane) => { if (thin[lane]) timelineShares(ctx, all, x, tops[lane], highs[lane]); });
  for (const event of shown.filter((_, lane) => !thin[lane]).flat()) {
    const a = x(event.from), b = x(event.to);
    ctx.fillStyle = colour(eventColour(event));
    const wide = b - a > 3;
    ctx.fillRect(a, tops[event.lane], Math.max(0.7, b - a - (wide ? 1 : 0)), highs[event.lane]);
    if (b - a > 62) {
      ctx.fillStyle = theme.dark ? "#0d1117" : "#fff";
      ctx.fillText(fitted(ctx, event.what, b - a - 8), Math.max(a, left) + 4,
        tops[event.lane] + highs[event.lane] / 2 + 4);
    }
  }
  if (timeline.told) {
    ctx.strokeStyle = theme.ink;
    ctx.lineWidth = 2;
    ctx.strokeRect(x(timeline.told.from), tops[timeline.told.lane],
      Math.max(2, x(timeline.told.to) - x(timeline.told.from) - 1), highs[timeline.told.lane]);
    ctx.lineWidth = 1;
  }
  ctx.restore();
  timelineTicks(ctx, x, left, right, low + 6);
}
// Where pieces are too thin to be told apart, some layers are one column with their shares of its time, one above the
// other.
function timelineShares(ctx, events, x, top, high) {
  const columns = timelineColumns(x), tones = [...new Set(events.map(eventColour))];
  let first = 0;
  for (const event of events) {
    while (first < columns.length - 1 && columns[first].to <= event.from) first++;
    for (let i = first; i < columns.length && columns[i].from < event.to; i++) {
      const { from, to, shares } = columns[i],
        part = (Math.min(to, event.to) - Math.max(from, event.from)) / (to - from);
      if (part > 0) shares.set(eventColour(event), (shares.get(eventColour(event)) || 0) + part);
    }
  }
  for (const { from, to, shares } of columns) {
    let y = top + high;
    for (const tone of tones) {
      const tall = high * Math.min(1, shares.get(tone) || 0);
      y -= tall;
      ctx.fillStyle = colour(tone);
      ctx.fillRect(x(from), y, x(to) - x(from) + 0.4, tall);
    }
  }
}
function timelineColumns(x) {
  const columns = [];
  for (const { pass, micro, from, to } of timeline.made.slots) {
    const last = columns.at(-1);
    if (to <= from) continue;
    if (last && last.pass === pass && last.micro === micro && x(last.to) - x(last.from) < 8) last.to = to;
    else columns.push({ pass, micro, from, to, shares: new Map() });
  }
  return columns;
}
const redrawTimeline = onFrame(drawTimeline);

// On a narrow screen a lane of links has its axis below.
function laneName(ctx, name, room, y) {
  const [first, ...rest] = name.split(" ");
  if (ctx.measureText(name).width <= room || !rest.length) return ctx.fillText(fitted(ctx, name, room), 2, y);
  ctx.fillText(first, 2, y - 6);
  ctx.fillText(fitted(ctx, rest.join(" "), room), 2, y + 8);
}
function fitted(ctx, text, room) {
  if (ctx.measureText(text).width <= room) return text;
  while (text.length > 1 && ctx.measureText(text + "…").width > room) text = text.slice(0, -1);
  return text + "…";
}
function exchangeNames() { return [...new Set(plan().time.exchanges.map(one => one.what))]; }
function eventColour(event) {
  return event.exchange ? EXCHANGES[exchangeNames().indexOf(event.what) % EXCHANGES.length] : PARTS[event.what];
}
// Above the lanes: which pass of which microstep, or which layer, where that is wide enough to be read.
function timelinePasses(ctx, x) {
  const { slots } = timeline.made, runs = [];
  const near = (timeline.to - timeline.from) / timeline.made.seconds < 12 / Math.max(12, slots.length);
  for (const slot of slots) {
    const micro = plan().microsteps > 1 ? slot.micro + 1 : "", short = `${slot.pass[0]}${near ? slot.layer : micro}`;
    const name = slot.pass === "head" ? "head" : near ? `${slot.pass}, layer ${slot.layer}` : `${slot.pass} ${micro}`;
    const last = runs.at(-1);
    if (last && last.name === name) last.to = slot.to;
    else runs.push({ name, short, from: slot.from, to: slot.to });
  }
  for (const run of runs) {
    const a = Math.max(x(run.from), timeline.box.left), b = Math.min(x(run.to), timeline.box.right);
    if (b - a < 14) continue;
    ctx.fillStyle = theme.dim;
    ctx.fillText(b - a < 44 ? fitted(ctx, run.short, b - a) : fitted(ctx, run.name, b - a - 6), a + 3, 14);
    ctx.fillRect(a, 20, b - a - 2, 2);
  }
}
// With as many digits as tell two ticks apart.
function momentText(time, step) {
  const [size, unit] = timeline.to >= 1 ? [1, "s"] : timeline.to >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return (time / size).toFixed(Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9))) + " " + unit;
}
function timelineTicks(ctx, x, left, right, top) {
  const span = timeline.to - timeline.from, rough = span / Math.max(3, (right - left) / 110),
    unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(n => n * unit).find(n => n >= rough);
  ctx.fillStyle = theme.dim;
  ctx.textAlign = "center";
  for (let time = Math.ceil(timeline.from / step) * step; time <= timeline.to; time += step) {
    const at = x(time), text = momentText(time, step);
    ctx.fillRect(at, top, 1, 5);
    ctx.fillText(text, Math.min(right - ctx.measureText(text).width / 2, Math.max(left + 8, at)), top + 18);
  }
  ctx.textAlign = "start";
}
function timelineWords() {
  const { time } = plan(), made = timeline.made, sent = time.exchanges, names = exchangeNames();
  by("timeline-title").textContent = `Timeline of one ${DATA.step}`;
  const parts = [...new Set(made.events.filter(one => !one.exchange).map(one => one.what))];
  by("timeline-legend").replaceChildren(...parts.map(one => swatch(`var(${PARTS[one]})`, PART_NAMES[one])),
    ...names.map((one, i) => {
    const all = sent.filter(each => each.what === one), seconds = all.reduce((sum, each) => sum + each.seconds, 0);
    return swatch(`var(${EXCHANGES[i % EXCHANGES.length]})`,
      `${one} (${[...new Set(all.map(each => each.over))].join(", ")}, ${secondsText(seconds)})`);
  }));
  const busy = made.events.filter(one => one.lane === 0).reduce((sum, one) => sum + one.to - one.from, 0);
  timeline.summary = `This schedule takes ${secondsText(made.seconds)}; the products are busy ${shareText(busy / made.seconds)} of `
    + `it. The plan's bounds: ${secondsText(time.lower)} with everything at once at peak rates, ${secondsText(time.upper)} one `
    + "after another at usual ones.";
  by("timeline-told").textContent = timeline.summary;
  by("timeline-how").textContent = "Time runs to the right; each lane is a part of one device: what multiplies, and its links "
    + "along an axis of the mesh. A gap in the products is time spent waiting for a link. One possible order, at the chip's "
    + "peak rates and not measured: a layer's weights come while the layer before is computed. Where pieces are too thin to "
    + "see, a column shows their shares of its time. Point at a piece to read it; drag to move, use + and − or pinch to come "
    + "nearer.";
}
function timelineTell(event) {
  timeline.told = event;
  by("timeline-told").textContent = event ? eventSentence(event) : timeline.summary;
  redrawTimeline();
}
function eventSentence({ slot, what, exchange, from, to }) {
  const where = slot.pass === "head" ? "head" : `${slot.pass}, layer ${slot.layer}`, { microsteps } = plan();
  const micro = microsteps > 1 ? `, microstep ${slot.micro + 1} of ${microsteps}` : "";
  const name = exchange ? `${what} (${exchange.kind} along ${exchange.axis} over ${exchange.over})` : PART_NAMES[what];
  return `${name}: ${secondsText(to - from)} from ${secondsText(from)}; ${where}${micro}.`;
}
function timelineAt(px, py) {
  const { left, right, tops, highs } = timeline.box,
    time = timeline.from + (px - left) / (right - left) * (timeline.to - timeline.from);
  const lane = tops.findIndex((top, i) => py >= top - 3 && py < top + highs[i] + 3);
  return timeline.made.events.find(one => one.lane === lane && one.from <= time && time <= one.to) || null;
}
function timelineZoom(by, px) {
  const { left, right } = timeline.box, at = px === undefined ? 0.5
    : Math.max(0, Math.min(1, (px - left) / (right - left)));
  const span = timeline.to - timeline.from,
    next = Math.max(timeline.made.seconds * 1e-5, Math.min(timeline.made.seconds, span / by));
  timelineMove(timeline.from + at * (span - next), next);
}
function timelineMove(from, span = timeline.to - timeline.from) {
  timeline.from = Math.max(0, Math.min(timeline.made.seconds - span, from));
  timeline.to = timeline.from + span;
  redrawTimeline();
}
function timelineLayer() {
  const slots = timeline.made.slots.filter(slot => slot.pass === "forward"), slot = slots[Math.floor(slots.length / 2)];
  timelineMove(slot.from - 0.3 * (slot.to - slot.from), Math.min(timeline.made.seconds, 2.6 * (slot.to - slot.from)));
}
pointers(by("timeline"), {
  moved: dx => timelineMove(timeline.from - dx / (timeline.box.right - timeline.box.left) * (timeline.to - timeline.from)),
  tapped: (x, y) => timelineTell(timelineAt(x, y)),
  over: (x, y) => { const found = x === null ? null
    : timelineAt(x, y); if (found !== timeline.told) timelineTell(found); },
  zoomed: timelineZoom,
});
by("timeline").addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;  // the page scrolls, unless asked to zoom
  event.preventDefault();
  timelineZoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, event.offsetX);
}, { passive: false });
by("timeline").addEventListener("keydown", event => {
  const does = { ArrowLeft: () => timelineMove(timeline.from - 0.15 * (timeline.to - timeline.from)),
    ArrowRight: () => timelineMove(timeline.from + 0.15 * (timeline.to - timeline.from)),
    "+": () => timelineZoom(1.5), "=": () => timelineZoom(1.5), "-": () => timelineZoom(1 / 1.5) }[event.key];
  if (does) { event.preventDefault(); does(); }
});
by("timeline-section").addEventListener("click", event => {
  const { view, time } = event.target.dataset, span = timeline.to - timeline.from;
  if (view === "all") timelineMove(0, timeline.made.seconds);
  if (view === "layer") timelineLayer();
  if (time === "in") timelineZoom(1.6);
  if (time === "out") timelineZoom(1 / 1.6);
  if (time === "left") timelineMove(timeline.from - 0.4 * span);
  if (time === "right") timelineMove(timeline.from + 0.4 * span);
});
by("timeline-mode").oninput = () => { timeline.mode = by("timeline-mode").value; drawTimeline(); };
pictures.push(drawTimeline);
