// Conversations with the model, kept in this browser.
import { element, headers } from "./door.js";
import { render } from "./markdown.js";

const at = (id) => document.getElementById(id);
const kept = "meshllm-conversations";
let talks = [];
let current = 0;
let running = null;

export function startChat() {
  try {
    talks = JSON.parse(localStorage.getItem(kept)) ?? [];
  } catch {
    talks = [];
  }
  if (!Array.isArray(talks) || !talks.length) talks = [{ system: "", turns: [] }];
  current = talks.length - 1;
  at("key").value = sessionStorage.getItem("key") ?? "";
  at("key").addEventListener("change", () => sessionStorage.setItem("key", at("key").value.trim()));
  at("settings").addEventListener("submit", (happened) => happened.preventDefault());
  at("system").addEventListener("change", () => {
    talk().system = at("system").value;
    save();
  });
  at("talks").addEventListener("change", () => {
    current = Number(at("talks").value);
    draw();
  });
  at("new").addEventListener("click", () => {
    talks.push({ system: at("system").value, turns: [] });
    current = talks.length - 1;
    save();
    draw();
    at("question").focus();
  });
  at("drop").addEventListener("click", () => {
    talks.splice(current, 1);
    if (!talks.length) talks = [{ system: "", turns: [] }];
    current = Math.max(0, current - 1);
    save();
    draw();
  });
  at("ask").addEventListener("submit", (happened) => {
    happened.preventDefault();
    const text = at("question").value.trim();
    if (!text || running) return;
    at("question").value = "";
    talk().turns.push({ role: "user", content: text });
    answer();
  });
  at("question").addEventListener("keydown", (happened) => {
    if (happened.key === "Enter" && !happened.shiftKey && !happened.isComposing) {
      happened.preventDefault();
      at("ask").requestSubmit();
    }
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("again").addEventListener("click", () => {
    talk().turns.pop();
    answer();
  });
  at("edit").addEventListener("click", () => {
    talk().turns.pop();
    at("question").value = talk().turns.pop().content;
    save();
    draw();
    at("question").focus();
  });
  draw();
}

const talk = () => talks[current];

function save() {
  try {
    localStorage.setItem(kept, JSON.stringify(talks));
  } catch {
    // the storage is full or off: the conversation lasts as long as the page
  }
}

function draw() {
  const names = talks.map(({ turns }, place) => {
    const option = element("option", turns[0]?.content.slice(0, 40) || "empty");
    option.value = place;
    option.selected = place === current;
    return option;
  });
  at("talks").replaceChildren(...names);
  at("system").value = talk().system;
  at("turns").replaceChildren(...talk().turns.map(drawTurn));
  mark();
}

function drawTurn(turn) {
  const made = element("article", undefined, "turn", turn.role);
  made.setAttribute("aria-label", turn.role === "user" ? "You" : "Answer");
  if (turn.role === "user") made.append(turn.content);
  else if (turn.tokens) made.append(...turn.tokens.map(drawToken));
  else made.append(...render(turn.content));
  if (turn.error) made.append(element("p", turn.error, "error"));
  return made;
}

function drawToken({ text, share }) {
  const made = element("span", text, "token");
  made.title = `${(100 * share).toFixed(1)} %`;
  made.style.borderColor = `color-mix(in srgb, var(--warn) ${Math.round(100 * (1 - share))}%, transparent)`;
  return made;
}

function mark() {
  const hasAnswer = talk().turns.at(-1)?.role === "assistant";
  at("send").disabled = running !== null;
  at("stop").disabled = running === null;
  for (const id of ["again", "edit"]) at(id).disabled = running !== null || !hasAnswer;
  for (const id of ["talks", "new", "drop"]) at(id).disabled = running !== null;
}

async function answer() {
  const own = talk();
  const turn = { role: "assistant", content: "" };
  const asked = [...own.turns];
  own.turns.push(turn);
  running = new AbortController();
  draw();
  const shown = at("turns").lastChild;
  const began = performance.now();
  let first = 0;
  try {
    const reply = await request(own.system, asked, running.signal);
    for await (const chunk of reply) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) timing(chunk.usage.completion_tokens, first - began, performance.now() - first);
      const choice = chunk.choices[0];
      if (!choice?.delta.content) continue;
      first ||= performance.now();
      turn.content += choice.delta.content;
      const scored = choice.logprobs?.content;
      if (scored) {
        turn.tokens = [...(turn.tokens ?? []), ...scored.map((each) => ({ text: each.token, share: Math.exp(each.logprob) }))];
        shown.append(...turn.tokens.slice(shown.children.length).map(drawToken));
      } else {
        shown.replaceChildren(...render(turn.content));
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") turn.error = error.message;
  } finally {
    running = null;
    save();
    draw();
  }
}

function timing(tokens, waited, took) {
  const rate = took && tokens > 1 ? `, ${((1000 * (tokens - 1)) / took).toFixed(1)} tokens/s` : "";
  at("timing").textContent = `${tokens} tokens, first after ${(waited / 1000).toFixed(2)} s${rate}`;
}

async function request(system, turns, signal) {
  const listed = await fetch("/v1/models", { headers: headers(), signal });
  const models = await listed.json();
  if (models.error) throw new Error(models.error.message);
  if (!models.data.length) throw new Error("The mesh serves no model yet");
  const messages = turns.map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: "system", content: system });
  const body = {
    model: models.data[0].id,
    messages,
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("most").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (at("seed").value) body.seed = Number(at("seed").value);
  if (at("probable").checked) body.logprobs = true;
  const reply = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal,
  });
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  return chunks(reply.body.pipeThrough(new TextDecoderStream()).getReader());
}

async function* chunks(reader) {
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") {
        const found = JSON.parse(part.slice(6));
        yield { choices: [], ...found };
      }
    }
  }
}
