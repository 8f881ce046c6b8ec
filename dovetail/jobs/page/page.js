const by = id => document.getElementById(id);
const COLOURS = { success: "--good", preemption: "--warn", unavailable: "--warn", stopped: "--warn", "": "--run" };
let chosen = location.hash.slice(1), log = { key: "", position: 0 };

// Everything that comes from a job is inserted as text, never as markup.
function element(name, attributes, text) {
  const svg = ["rect", "text", "polyline", "line"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function age(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "m"]])
    if (seconds >= size) return (seconds / size).toFixed(seconds < 10 * size ? 1 : 0) + " " + unit;
  return Math.max(0, seconds).toFixed(0) + " s";
}
async function get(path, options) {
  const answer = await fetch(path, options).catch(() => { throw new Error("no answer: `dovetail job web` is no longer running"); });
  if (!answer.ok && answer.headers.get("Content-Type") !== "application/json")
    throw new Error("the token of this page is no longer valid: open the address that `dovetail job web` printed");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}
async function jobs() {
  const found = await get("/api/jobs");
  by("counts").textContent = Object.entries(found.counts).map(([status, n]) => n + " " + status).join(", ");
  by("jobs").replaceChildren(...found.jobs.map(job => {
    const row = element("tr", { class: job.id === chosen ? "chosen" : "", tabindex: 0 });
    const cells = { id: job.id, user: job.user, name: job.name, accelerator: job.accelerator || "cpu", where: job.where, host: job.host };
    for (const [kind, cell] of Object.entries(cells)) row.append(element("td", { class: kind + (cell ? "" : " empty") }, cell || "-"));
    row.append(element("td", { class: "status " + job.status }, job.status));
    const numbers = { attempts: job.attempts, age: age(found.now - job.created), ran: job.seconds && age(job.seconds), $: job.dollars && job.dollars.toFixed(2) };
    for (const [label, cell] of Object.entries(numbers)) row.append(element("td", { class: "n" + (cell ? "" : " empty"), "data-label": label }, cell || "-"));
    row.onclick = () => choose(job.id);
    row.onkeydown = event => { if (event.key === "Enter") choose(job.id); };
    return row;
  }));
}
function choose(id) { chosen = location.hash = id; log = { key: "", position: 0 }; by("attempt").replaceChildren(); refresh(); }
async function one() {
  if (!chosen) return;
  const found = await get("/api/jobs/" + chosen), job = found.job;
  by("one").hidden = false;
  by("name").textContent = `${job.name} (${job.id}): ${job.status}`;
  by("cancel").hidden = !found.may_cancel;
  const kills = job.wanted !== "run", who = `${job.name} (${job.id}) of ${job.user}`;
  by("cancel").textContent = kills ? "Kill at once…" : "Cancel…";
  by("really").textContent = kills ? "Kill the job" : "Cancel the job";
  by("question").textContent = kills ? `Kill ${who} at once? Work that is not saved is lost.`
    : `Cancel ${who}? It gets SIGTERM and has ${found.grace} s to save and end. \`dovetail job resume\` continues it from what it saved.`;
  by("detail").textContent = [job.detail, `${age(job.seconds)} running`, `$${job.dollars.toFixed(2)}`].filter(Boolean).join(" · ");
  by("events").textContent = found.events.map(e => new Date(e.at * 1000).toLocaleTimeString() + (e.number ? ` #${e.number} ` : " ") + e.what).join("\n");
  by("spec").textContent = found.spec;
  timeline(found); curve(found.curve); choices(found);
}
function timeline(found) {
  const rows = found.attempts, begin = Math.min(...rows.map(r => r.created), found.now), height = 24 * rows.length + 20;
  const width = by("timeline").clientWidth, left = width < 600 ? 84 : 150, right = width - (width < 600 ? 100 : 170), wide = width >= 600;
  const end = Math.max(...rows.map(r => r.ended || found.now), begin + 1), at = time => left + (time - begin) / (end - begin) * (right - left);
  by("timeline").setAttribute("height", height);
  const parts = rows.flatMap((row, i) => {
    const y = 24 * i, over = row.ended || found.now, colour = COLOURS[row.outcome] || "--bad";
    const name = `#${row.number} ${wide ? row.where : row.zone || row.where}`;
    const says = `${row.outcome || row.state || row.phase}${row.exit_code === null ? "" : " (exit " + row.exit_code + ")"}`;
    const bars = [element("rect", { x: at(row.created), y: y + 4, width: Math.max(1, at(over) - at(row.created)), height: 14, fill: "#8885" })];
    if (row.started) bars.push(element("rect", { x: at(row.started), y: y + 4, width: Math.max(1, at(over) - at(row.started)), height: 14, fill: `var(${colour})` }));
    return [element("text", { x: 0, y: y + 15 }, name), ...bars, element("text", { x: right + 6, y: y + 15 }, says)];
  });
  const clock = time => wide ? new Date(time * 1000).toLocaleString() : new Date(time * 1000).toLocaleTimeString();
  parts.push(element("text", { x: left, y: height - 4 }, clock(begin)));
  parts.push(element("text", { x: right, y: height - 4, "text-anchor": "end" }, clock(end)));
  by("timeline").replaceChildren(...parts);
}
function curve(points) {
  by("curves").hidden = points.length < 2;
  if (points.length < 2) return;
  const steps = points.map(p => p[0]), losses = points.map(p => p[1]), low = Math.min(...losses), high = Math.max(...losses);
  const right = by("curve").clientWidth - 8;
  const x = step => 45 + (step - steps[0]) / (steps.at(-1) - steps[0] || 1) * (right - 45), y = loss => 165 - (loss - low) / (high - low || 1) * 150;
  by("curve").replaceChildren(
    element("line", { x1: 45, y1: 165, x2: right, y2: 165, stroke: "var(--rule)" }),
    element("polyline", { points: points.map(p => `${x(p[0])},${y(p[1])}`).join(" "), fill: "none", stroke: "var(--good)", "stroke-width": 2 }),
    element("text", { x: 0, y: 18 }, high.toFixed(3)), element("text", { x: 0, y: 168 }, low.toFixed(3)),
    element("text", { x: 45, y: 184 }, "step " + steps[0]), element("text", { x: right, y: 184, "text-anchor": "end" }, "step " + steps.at(-1)));
}
function choices(found) {
  for (const [id, count, word] of [["attempt", found.attempts.length, "attempt "], ["rank", found.processes, "rank "]]) {
    const select = by(id), first = id === "attempt" ? 1 : 0;
    if (select.options.length === count) continue;
    select.replaceChildren(...Array.from({ length: count }, (_, i) => element("option", { value: i + first }, word + (i + first))));
    if (id === "attempt") select.value = count;
  }
}
async function logs() {
  if (!chosen || !by("attempt").value) return;
  const key = [chosen, by("attempt").value, by("rank").value].join("/"), box = by("log");
  if (key !== log.key) { log = { key, position: 0 }; box.textContent = ""; }
  const part = await get(`/api/jobs/${chosen}/logs?attempt=${by("attempt").value}&rank=${by("rank").value}&since=${log.position}`);
  if (!part.text) return;
  const follows = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  box.append(part.text);
  log.position = part.position;
  if (follows) box.scrollTop = box.scrollHeight;
}
async function refresh() {
  let trouble = "";
  for (const step of [jobs, one, logs]) await step().catch(error => { trouble = error.message; });
  by("trouble").textContent = trouble;
}
by("attempt").onchange = by("rank").onchange = refresh;
addEventListener("resize", refresh);
by("cancel").onclick = () => by("ask").showModal();
by("keep").onclick = () => by("ask").close();
by("really").onclick = async () => {
  by("ask").close();
  // pages of other origins cannot send this header
  await get(`/api/jobs/${chosen}/cancel`, { method: "POST", headers: { "X-Dovetail": "jobs" } }).catch(error => alert(error.message));
  refresh();
};
refresh();
setInterval(refresh, 1500);
