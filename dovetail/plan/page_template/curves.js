// Trade-offs, such as latency against throughput: a curve each, whose points say what they were reached with.
function drawCurves() {
  by("curves-section").hidden = !DATA.curves.length;
  by("curves-section").replaceChildren(...DATA.curves.flatMap(one => {
    const told = element("p", { class: "say", "aria-live": "polite" });
    return [element("h2", {}, one.title), element("div", { class: "card" }, curveChart(one, told)), told,
      element("p", { class: "how" }, one.reading)];
  }));
}
function curveChart(one, told) {
  const width = Math.max(280, (by("curves-section").getBoundingClientRect().width || 320) - 24),
    height = width < 520 ? 260 : 320, [left, right, top, bottom] = [54, 18, 24, 34];
  const range = values => {
    const low = Math.min(...values) / 1.25, high = Math.max(...values) * 1.25;
    return [low, high > low ? high : low * 10];
  };
  const [xs, ys] = [range(one.points.map(p => p[0])), range(one.points.map(p => p[1]))];
  const x = v => left + (width - left - right) * Math.log(v / xs[0]) / Math.log(xs[1] / xs[0]);
  const y = v => top + (height - top - bottom) * (1 - Math.log(v / ys[0]) / Math.log(ys[1] / ys[0]));
  const parts = [], short = v => Number(v.toPrecision(2)).toLocaleString("en");
  const ticks = ([low, high]) => [1, 2, 5].flatMap(n => Array.from({ length: 24 },
    (_, i) => n * 10 ** (i - 12))).filter(v => v >= low && v <= high).sort((a, b) => a - b);
  const few = all => all.length > 7 ? all.filter(v => /^1/.test(v.toExponential())) : all;
  for (const v of few(ticks(xs))) parts.push(element("line",
    { class: "grid", x1: x(v), x2: x(v), y1: top, y2: height - bottom }),
    element("text", { x: x(v), y: height - bottom + 15, "text-anchor": "middle" }, short(v)));
  for (const v of few(ticks(ys))) parts.push(element("line",
    { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
    element("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, short(v)));
  parts.push(element("text", { x: left, y: 13 }, one.up),
    element("text", { x: width - right, y: height - 4, "text-anchor": "end" }, one.across),
    element("path", { class: "curve", d: "M" + one.points.map(p => `${x(p[0])} ${y(p[1])}`).join("L") }));
  for (const [a, b, name] of one.points) {
    const says = `${name}: ${a.toPrecision(3)} ${one.across}, ${Number(b.toPrecision(3)).toLocaleString("en")} ${one.up}`;
    const dot = element("circle", { class: "dot", cx: x(a), cy: y(b), r: 6, fill: "var(--c0)", tabindex: 0,
      role: "button", "aria-label": says });
    for (const kind of ["pointerenter", "focus", "click"]) dot.addEventListener(kind,
      () => { told.textContent = says; });
    parts.push(dot);
  }
  return element("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "group",
    "aria-label": one.title }, ...parts);
}
pictures.push(drawCurves);
