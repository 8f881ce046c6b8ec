// Memory bars: what one device holds, by kind, against what a plan may fill.
const kindColour = (kinds, kind) => / free/.test(kind) ? "var(--rule)"
  : `var(${KINDS[kinds.indexOf(kind) % KINDS.length]})`;
function drawMemory() {
  const kinds = [...new Set(DATA.plans.flatMap(one => one.memory.filter(([,
    size]) => size > 0).map(([kind]) => kind)))];
  const total = one => one.memory.reduce((sum, [, size]) => sum + size, 0);
  const room = DATA.roofs ? DATA.roofs.memory : 0;
  const most = Math.max(room, ...DATA.plans.map(one => Math.max(total(one), one.limit || 0)));
  const rows = DATA.plans.flatMap((one, i) => {
    const choose = () => choosePlan(i);
    const name = element("button", { type: "button", class: "name", "aria-pressed": String(i === state.plan) },
      one.title);
    name.onclick = choose;
    const pieces = one.memory.filter(([, size]) => size > 0).map(([kind, size]) => element("span", {
      style: `width:${100 * size / most}%;background:${kindColour(kinds, kind)}`,
        title: `${kind}: ${heldText(size)}` }));
    const track = element("div", { class: "track", role: "img", style: room ? `width:${100 * room / most}%` : undefined,
      "aria-label": one.memory.map(([kind, size]) => `${kind} ${heldText(size)}`).join(", ") },
      element("div", { class: "fill", style: room ? `width:${100 * most / room}%` : undefined }, ...pieces));
    if (one.limit) track.append(element("div",
      { class: "limit", style: `left:${100 * one.limit / (room || most)}%`,
      title: `to plan with: ${heldText(one.limit)}` }));
    track.onclick = choose;
    const of = one.limit ? ` of ${heldText(one.limit)} to plan with (${shareText(total(one) / one.limit)})` : "";
    const has = room ? `, ${heldText(room)} there` : "";
    return [name, element("div", { class: "bar" }, track,
      element("div", { class: "sum" }, `${heldText(total(one))}${of}${has}, estimated`))];
  });
  const here = new Map(plan().memory);
  const legend = kinds.map(kind => swatch(kindColour(kinds, kind),
    `${kind}${here.get(kind) ? " " + heldText(here.get(kind)) : ""}`));
  by("memory").replaceChildren(element("div", { class: "bars" }, ...rows),
    element("div", { class: "legend" }, ...legend));
}
pictures.push(drawMemory);
