"use strict";
// The chat page: talks to this server's own API and keeps nothing but the key, in this browser tab.

const $ = (id) => document.getElementById(id);
const conversation = [];
let running = null; // the AbortController of the answer in progress

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

function addMessage(role, text = "") {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  const head = document.createElement("div");
  head.className = "role";
  head.textContent = role;
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  box.append(head, body);
  $("messages").append(box);
  box.scrollIntoView({ block: "end" });
  return { box, body };
}

function addThought(shown) {
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = "Reasoning";
  const text = document.createElement("div");
  text.className = "text thought";
  details.append(summary, text);
  shown.box.insertBefore(details, shown.body);
  return text;
}

function showReading(progress) {
  $("reading").hidden = !progress;
  if (!progress) return;
  $("bar").value = progress.processed / Math.max(1, progress.total);
  const eta = progress.eta_ms === null ? "" : `, about ${(progress.eta_ms / 1000).toFixed(0)} s left`;
  const place = progress.position === null ? "" : `, ${progress.position} before it`;
  $("reading-text").textContent =
    `prompt ${progress.state}${place}: ${progress.processed} of ${progress.total} tokens${eta}`;
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  if (!controller) showReading(null);
}

// Yields the JSON of each server-sent event of a response.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      for (const line of part.split("\n")) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  }
}

function question() {
  const system = $("system").value.trim();
  const seed = $("seed").value;
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    ...(seed !== "" && { seed: Number(seed) }),
    stream: true,
    return_progress: true,
  };
}

async function ask(text) {
  conversation.push({ role: "user", content: text });
  addMessage("user", text);
  const controller = new AbortController();
  setRunning(controller);
  let shown = null;
  let thought = null;
  let answer = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(question()), signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.prompt_progress) showReading(event.prompt_progress);
      const choice = event.choices[0];
      if (!choice) continue;
      showReading(null);
      shown ??= addMessage("assistant");
      if (choice.delta.reasoning_content) {
        thought ??= addThought(shown);
        thought.textContent += choice.delta.reasoning_content;
      }
      if (choice.delta.content) {
        answer += choice.delta.content;
        shown.body.textContent = answer;
      }
      if (event.timings) showSpeed(shown, event.timings);
      $("messages").scrollTop = $("messages").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") addMessage("error", error.message);
  } finally {
    if (answer) conversation.push({ role: "assistant", content: answer });
    else if (!shown) conversation.pop();
    setRunning(null);
    refresh();
  }
}

function showSpeed(shown, t) {
  const line = document.createElement("div");
  line.className = "speed";
  line.textContent = `prompt ${t.prompt_n} tokens at ${t.prompt_per_second.toFixed(1)}/s, `
    + `answer ${t.predicted_n} at ${t.predicted_per_second.toFixed(1)}/s`;
  shown.box.append(line);
}

// ---- the panel ----

let last = null; // answer tokens and time of the previous look, for the speed

function* leaves(prefix, value) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, item] of Object.entries(value)) yield* leaves(prefix ? `${prefix} ${key}` : key, item);
  } else if (!Array.isArray(value)) {
    yield [prefix, value];
  }
}

function readable(name, value) {
  if (typeof value !== "number") return String(value);
  if (name.endsWith("bytes")) return `${(value / 2 ** 20).toFixed(1)} MiB`;
  if (/share|rate|acceptance/.test(name) && value <= 1) return `${(100 * value).toFixed(1)} %`;
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toPrecision(4);
}

// What moves is shown first; everything else of the document is behind "All".
const LIVE = ["phase", "experts hit_rate", "experts published", "handovers n", "link bytes", "n_answer_tokens"];

function list(target, rows) {
  target.replaceChildren(...rows.flatMap(([name, value]) => {
    const dt = document.createElement("dt");
    const dd = document.createElement("dd");
    dt.textContent = name.replaceAll("_", " ").replace(/^n /, "");
    dd.textContent = readable(name, value);
    return [dt, dd];
  }));
}

function showPanel(status) {
  const all = [...leaves("", status.engine)].filter(([, value]) => value !== null);
  const live = [["running", status.n_running], ["waiting", status.n_waiting]];
  const n = status.engine.n_answer_tokens;
  const now = performance.now();
  if (last && n !== undefined && now > last.now) live.push(["tokens/s", (1000 * (n - last.n)) / (now - last.now)]);
  last = n === undefined ? null : { n, now };
  list($("panel"), [...live, ...all.filter(([name]) => LIVE.includes(name))]);
  list($("all"), all.filter(([name]) => !LIVE.includes(name)));
}

async function refresh() {
  const badge = $("state");
  try {
    const response = await fetch("status", { headers: headers() });
    const status = await response.json();
    if (response.status === 401) {
      badge.textContent = "API key needed";
      badge.className = "badge bad";
      return;
    }
    if (!response.ok) throw new Error(status.error.message);
    badge.textContent = status.state === "ok" ? status.engine.phase ?? "ok" : `${status.state} ${status.reason}`;
    badge.className = status.state === "ok" ? "badge ok" : "badge bad";
    $("model").textContent = status.models[0];
    showPanel(status);
  } catch (error) {
    badge.textContent = "not reachable";
    badge.className = "badge bad";
  }
}

// ---- what a person does ----

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || running) return;
  $("input").value = "";
  ask(text);
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  $("messages").replaceChildren();
});
$("settings-open").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("settings-open").setAttribute("aria-expanded", String(!$("settings").hidden));
});
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  refresh();
});
refresh();
setInterval(refresh, 1000);
