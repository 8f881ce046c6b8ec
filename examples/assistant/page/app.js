// The page of the assistant. Text of users and models reaches the document by textContent alone.

const MAX_SIDE = 1024; // pixels of a photo as sent
const RETRY_MS = 5000; // until a model that does not answer is asked again
const NUTRIENTS = [["protein_g", "Protein", 4], ["carbohydrate_g", "Carbs", 4], ["fat_g", "Fat", 9]]; // kcal per gram
const $ = (id) => document.getElementById(id);

let models = [];
let chosen = localStorage.getItem("model");
let shownDay = ""; // empty: today, also after midnight
let picture = null; // the photo to send, as a Blob
let answering = null; // the AbortController of the answer that is being written
let known = null; // ids of the entries on show, to mark new ones

// --- small helpers ---------------------------------------------------------------------------------------------------

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function alertUser(sentence) {
  $("alert").textContent = sentence;
  $("alert").hidden = !sentence;
}

async function request(path, options = {}) {
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The assistant does not answer. Is it still running?");
  }
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  throw new Error(body.error || `The assistant answered with status ${reply.status}.`);
}

// --- the conversation ------------------------------------------------------------------------------------------------

function addMessage(role) {
  $("empty").hidden = true;
  const message = make("div", `message ${role}`);
  $("log").append(message);
  return message;
}

function addUser(text, source) {
  const message = addMessage("user");
  if (source) {
    const image = make("img");
    image.alt = "A photo of a meal";
    image.src = source;
    image.addEventListener("load", scrollDown);
    message.append(image);
  }
  if (text) message.append(make("p", "", text));
}

// An answer on the page: cards of tool calls, text, and who wrote it.
class Answer {
  constructor() {
    this.element = addMessage("assistant");
    this.paragraph = null;
    this.dots = null;
  }

  wait() {
    this.dots = make("p", "said");
    this.dots.append(make("span", "wait"));
    this.dots.firstChild.append(make("i"), make("i"), make("i"));
    this.dots.setAttribute("aria-label", "The model is writing");
    this.element.append(this.dots);
  }

  rest() {
    this.dots?.remove();
    this.dots = null;
  }

  addText(text) {
    this.rest();
    if (!this.paragraph) {
      text = text.trimStart();
      if (!text) return;
      this.paragraph = make("p", "said");
      this.element.append(this.paragraph);
    }
    this.paragraph.append(document.createTextNode(text));
  }

  addCall(call) {
    this.rest();
    this.paragraph = null;
    const failed = call.result.startsWith("error");
    const card = make("details", failed ? "call failed" : "call");
    card.append(make("summary", "", describe(call, failed)));
    card.append(make("pre", "", `${call.name}(${call.arguments})\n${call.result}`));
    this.element.append(card);
  }

  end(model, stopped) {
    this.rest();
    if (!this.element.firstChild && !stopped) this.addText("(The model wrote nothing.)");
    const by = [model, stopped ? "stopped" : ""].filter(Boolean).join(" · ");
    if (by) this.element.append(make("p", "by", by));
  }
}

function describe(call, failed) {
  if (failed) return `${call.name}: ${call.result.replace(/^error: (ToolError: )?/, "")}`;
  const result = JSON.parse(call.result);
  switch (call.name) {
    case "log_meal": return `Logged ${result.food} · ${round(result.grams)} g · ${round(result.kcal)} kcal`;
    case "delete_entry": return `Deleted ${result.deleted.food} · ${round(result.deleted.grams)} g`;
    case "day_summary": return `Read the diary · ${round(result.totals.kcal)} kcal`;
    case "search_food": return `Looked up ${result.map((food) => food.name).join(", ") || "a food, and found none"}`;
    default: return call.name;
  }
}

function showConversation(messages) {
  for (const old of document.querySelectorAll(".message")) old.remove();
  $("empty").hidden = messages.length > 0;
  let answer = null;
  messages.forEach((message, i) => {
    if (message.role === "user") {
      addUser(message.text, message.picture && `/api/pictures/${message.picture}`);
      answer = null;
      return;
    }
    answer ??= new Answer();
    if (message.text) answer.addText(message.text);
    message.calls.forEach((call) => answer.addCall(call));
    if (messages[i + 1]?.role !== "assistant") answer.end(message.model, message.stopped);
  });
  scrollDown();
}

function scrollDown() {
  $("log").scrollTop = $("log").scrollHeight;
}

function isAtEnd() {
  return $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
}

// --- sending ---------------------------------------------------------------------------------------------------------

async function send(text) {
  await ready; // the conversation and the models are known
  if (answering || !chosen || (!text && !picture)) return;
  alertUser("");
  const photo = picture;
  const model = chosen;
  answering = new AbortController();
  showAnswering(true);
  try {
    const body = { text, model, picture: photo ? await base64(photo) : "" };
    const headers = { "content-type": "application/json" };
    const reply = await request("/api/messages", {
      method: "POST", headers, body: JSON.stringify(body), signal: answering.signal,
    });
    $("text").value = "";
    grow();
    setPicture(null);
    addUser(text, photo && URL.createObjectURL(photo));
    await receive(reply, model);
  } catch (error) {
    if (error.name !== "AbortError") alertUser(error.message);
  }
  answering = null;
  showAnswering(false);
}

async function receive(reply, model) {
  const answer = new Answer();
  answer.wait();
  scrollDown();
  let stopped = true;
  let failed = false;
  try {
    for await (const event of events(reply.body)) {
      const follow = isAtEnd();
      if (event.type === "text") answer.addText(event.text);
      if (event.type === "call") {
        answer.addCall(event.call);
        answer.wait();
      }
      if (event.type === "error") {
        alertUser(event.message);
        failed = true;
      }
      if (event.type === "done") stopped = failed;
      if (follow) scrollDown();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw new Error("The connection broke while the answer was written.");
  } finally {
    answer.end(model, stopped);
    scrollDown();
  }
}

// Yield the JSON of server-sent events. EventSource itself cannot send a message.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}

function showAnswering(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("fresh").disabled = on;
}

// --- photos ----------------------------------------------------------------------------------------------------------

// Draw the photo on a canvas: a smaller JPEG, upright, without EXIF and so without the place.
async function shrink(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    throw new Error("This browser cannot read the photo. Use a JPEG or PNG file.");
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.88));
}

async function attach(file) {
  if (!file) return;
  const reason = models.find((model) => model.label === chosen)?.no_images;
  try {
    if (reason) throw new Error(reason);
    setPicture(await shrink(file));
    alertUser("");
  } catch (error) {
    alertUser(error.message);
  }
}

function setPicture(blob) {
  picture = blob;
  const image = $("preview").querySelector("img");
  if (image.src) URL.revokeObjectURL(image.src);
  if (blob) image.src = URL.createObjectURL(blob);
  else image.removeAttribute("src");
  $("preview").hidden = !blob;
  $("file").value = "";
}

function base64(blob) {
  return new Promise((done) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.readAsDataURL(blob);
  });
}

// --- models ----------------------------------------------------------------------------------------------------------

function showModels(found) {
  models = found;
  if (!models.some((model) => model.label === chosen)) chosen = models[0]?.label;
  $("models").replaceChildren(...(models.length > 1 ? models.map(modelSwitch) : []));
  const model = models.find(({ label }) => label === chosen);
  $("file").disabled = Boolean(model?.no_images);
  $("plate").hidden = Boolean(model?.no_images);
  $("attach").title = model?.no_images || "Add a photo";
  $("hint").textContent = model?.error || model?.no_images || "";
  $("hint").hidden = !$("hint").textContent;
  if (model?.error) setTimeout(() => refreshModels(), RETRY_MS);
}

function modelSwitch(model) {
  const label = make("label");
  const input = make("input");
  Object.assign(input, { type: "radio", name: "model", value: model.label, checked: model.label === chosen });
  input.addEventListener("change", () => {
    chosen = model.label;
    localStorage.setItem("model", chosen);
    if (picture && model.no_images) setPicture(null);
    alertUser("");
    showModels(models);
    $("models").querySelector(":checked").focus();
  });
  label.title = model.error || model.name;
  label.append(input, make("span", "", model.label));
  return label;
}

async function refreshModels() {
  try {
    showModels((await (await request("/api/state")).json()).models);
  } catch (error) {
    alertUser(error.message);
  }
}

// --- the day ---------------------------------------------------------------------------------------------------------

const round = (number) => Math.round(number).toLocaleString("en");

function showDay(day) {
  const isToday = day.day === day.today;
  $("date").textContent = isToday ? "Today" : new Date(`${day.day}T12:00`).toDateString();
  $("date").dataset.day = day.day;
  $("after").disabled = isToday;
  $("kcal").textContent = round(day.totals.kcal);
  $("toggle").dataset.kcal = `${isToday ? "Today" : "Day"}: ${round(day.totals.kcal)} kcal`;
  showToggle();
  $("bar").replaceChildren(...NUTRIENTS.map(([name, , energy]) => {
    const part = make("i", name);
    part.style.flexGrow = day.totals[name] * energy;
    return part;
  }));
  $("bar").setAttribute("aria-label", NUTRIENTS.map(([n, title]) => `${title} ${day.totals[n]} g`).join(", "));
  $("totals").replaceChildren(...NUTRIENTS.map(([name, title]) => {
    const group = make("div", name);
    group.append(make("dt", "", title), make("dd", "", `${round(day.totals[name])} g`));
    return group;
  }));
  const ids = new Set(day.entries.map((entry) => `${day.day} ${entry.id}`));
  $("entries").replaceChildren(...day.entries.map((entry) => {
    const row = mealRow(entry);
    if (known && !known.has(`${day.day} ${entry.id}`)) row.className = "new";
    return row;
  }));
  known = ids;
  $("none").hidden = day.entries.length > 0;
}

function mealRow(entry) {
  const row = make("tr");
  const food = make("td", "", entry.food);
  food.append(make("small", "", entry.time));
  row.append(food);
  for (const name of ["grams", "kcal", ...NUTRIENTS.map(([each]) => each)]) row.append(make("td", "", round(entry[name])));
  const remove = make("button", "quiet", "✕");
  remove.type = "button";
  remove.setAttribute("aria-label", `Delete ${entry.food}`);
  remove.addEventListener("click", async () => {
    remove.disabled = true;
    try {
      await request(`/api/meals/${entry.id}`, { method: "DELETE" });
    } catch (error) {
      alertUser(error.message);
    }
  });
  row.append(make("td"));
  row.lastChild.append(remove);
  return row;
}

async function refreshDay() {
  try {
    showDay(await (await request(`/api/day${shownDay && `?day=${shownDay}`}`)).json());
  } catch (error) {
    alertUser(error.message);
  }
}

function moveDay(days) {
  const date = new Date(`${$("date").dataset.day}T12:00Z`);
  date.setUTCDate(date.getUTCDate() + days);
  shownDay = date.toISOString().slice(0, 10);
  known = null;
  refreshDay();
}

function showToggle() {
  const open = document.body.classList.contains("day");
  $("toggle").textContent = open ? "Conversation" : $("toggle").dataset.kcal;
  $("toggle").setAttribute("aria-expanded", open);
}

// --- events of the page ----------------------------------------------------------------------------------------------

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("text").value.trim());
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send($("text").value.trim());
});
$("text").addEventListener("input", grow);
$("stop").addEventListener("click", () => answering?.abort());
$("file").addEventListener("change", () => attach($("file").files[0]));
$("preview").querySelector("button").addEventListener("click", () => setPicture(null));
$("before").addEventListener("click", () => moveDay(-1));
$("after").addEventListener("click", () => moveDay(1));
for (const idea of document.querySelectorAll(".idea:not(#plate)")) idea.addEventListener("click", () => send(idea.textContent));
$("plate").addEventListener("click", async () => {
  try {
    attach(await (await request("/api/plate")).blob());
  } catch (error) {
    alertUser(error.message);
  }
});
$("toggle").addEventListener("click", () => {
  document.body.classList.toggle("day");
  showToggle();
});
$("fresh").addEventListener("click", async () => {
  try {
    const reply = await request("/api/conversations", { method: "POST" });
    showConversation((await reply.json()).messages);
    alertUser("");
  } catch (error) {
    alertUser(error.message);
  }
});
document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((each) => each.type.startsWith("image/"));
  if (!file) return;
  event.preventDefault();
  attach(file);
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  $("composer").classList.add("over");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) $("composer").classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("composer").classList.remove("over");
  attach(event.dataTransfer.files[0]);
});

// --- the start -------------------------------------------------------------------------------------------------------

async function start() {
  try {
    const state = await (await request("/api/state")).json();
    showConversation(state.messages);
    showModels(state.models);
    showDay(state.day);
  } catch (error) {
    alertUser(error.message);
  }
}

const live = new EventSource("/api/events");
live.addEventListener("changed", refreshDay);
let lost = false;
live.addEventListener("error", () => {
  lost = true;
  if (!answering) alertUser("The assistant does not answer. Is it still running?");
});
live.addEventListener("open", () => {
  if (lost) alertUser("");
  lost = false;
  refreshDay();
});
const ready = start();
