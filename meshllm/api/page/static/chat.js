// The chat: conversations with a model, and the answers as they come.
import { at, button, call, element, key, objects } from "./door.js";
import { copy, render } from "./markdown.js";
import { blank, forget, load, save, title } from "./talks.js";

const seeds = 2 ** 32; // drawn here: the server's own are larger than the integers of JavaScript
const alternatives = 4; // beside the token that was chosen
let talks = [];
let talk = null;
let running = null;
let offered = "";

export function startChat() {
  talks = load();
  talk = talks[0] ?? blank();
  at("new").addEventListener("click", () => open(blank(talk.system)));
  at("drop").addEventListener("click", drop);
  at("toggle-talks").addEventListener("click", () => showTalks(at("aside").classList.toggle("open")));
  at("settings").addEventListener("submit", (happened) => happened.preventDefault());
  at("system").addEventListener("change", () => {
    talk.system = at("system").value;
    keepTalk();
  });
  at("ask").addEventListener("submit", (happened) => {
    happened.preventDefault();
    const text = at("question").value.trim();
    if (!text || running) return;
    at("question").value = "";
    ask(text);
  });
  sendOnEnter(at("question"), () => at("ask").requestSubmit());
  at("stop").addEventListener("click", () => running?.abort());
  at("probable").addEventListener("change", draw);
  addEventListener("storage", refresh);
  draw();
}

function sendOnEnter(field, send) {
  field.addEventListener("keydown", (happened) => {
    if (happened.key === "Enter" && !happened.shiftKey && !happened.isComposing) {
      happened.preventDefault();
      send();
    }
  });
}

// Offers the models that this key may use, once others are served or the key is another.
export async function offerModels(served) {
  const basis = JSON.stringify([key(), served.map(({ name }) => name)]);
  if (basis === offered) return;
  offered = basis;
  let names;
  try {
    names = (await (await call("/v1/models")).json()).data.map((each) => each.id);
  } catch {
    offered = ""; // the server is away: the next state of the mesh will try again
    return;
  }
  const chosen = at("model").value;
  at("model").replaceChildren(...names.map((name) => element("option", name)));
  if (names.includes(chosen)) at("model").value = chosen;
}

// Another tab has changed its conversations.
function refresh() {
  if (running) return;
  talks = load();
  talk = talks.find(({ id }) => id === talk.id) ?? talk;
  draw();
}

function open(chosen) {
  running?.abort();
  talk = chosen;
  showTalks(false);
  draw();
  at("question").focus();
}

function showTalks(isOpen) {
  at("aside").classList.toggle("open", isOpen);
  at("toggle-talks").setAttribute("aria-expanded", isOpen);
}

function drop() {
  running?.abort();
  forget(talk);
  talks = talks.filter((each) => each !== talk);
  open(talks[0] ?? blank());
}

function keepTalk() {
  if (!talks.includes(talk)) talks.unshift(talk);
  at("storage").hidden = save(talk);
  drawTalks();
}

function draw() {
  at("system").value = talk.system ?? "";
  drawTalks();
  at("turns").replaceChildren(...talk.turns.map((turn, place) => drawTurn(turn, place)));
  at("turns").scrollTop = at("turns").scrollHeight;
  mark();
}

function drawTalks() {
  const items = talks.map((each) => {
    const made = element("li");
    const opener = button(title(each), () => open(each));
    if (each === talk) opener.setAttribute("aria-current", "true");
    made.append(opener);
    return made;
  });
  at("talks").replaceChildren(...items);
}

function mark() {
  at("stop").hidden = running === null;
  at("send").hidden = running !== null;
  at("turns").setAttribute("aria-busy", running !== null);
  at("empty").hidden = talk.turns.length > 0;
}

function drawTurn(turn, place) {
  const made = element("article", undefined, "turn", turn.role);
  made.setAttribute("aria-label", turn.role === "user" ? "You" : "Answer");
  made.append(...content(turn));
  if (turn.error) made.append(element("p", turn.error, "error"));
  if (!running || turn !== talk.turns.at(-1)) made.append(actions(turn, place, made));
  return made;
}

function content(turn) {
  if (turn.role === "user") return [element("div", turn.content, "text")];
  const made = [];
  if (turn.reasoning) {
    const box = element("details");
    box.append(element("summary", "Reasoning"), ...render(turn.reasoning));
    made.push(box);
  }
  return [...made, ...(turn.tokens && at("probable").checked ? [drawTokens(turn.tokens)] : render(turn.content))];
}

function actions(turn, place, shown) {
  const made = element("div", undefined, "actions");
  made.append(button("Copy", (happened) => copy(turn.content, happened.target)));
  if (turn.role === "user") made.append(button("Edit", () => edit(turn, place, shown)));
  else if (place === talk.turns.length - 1) made.append(button("Regenerate", () => again(place)));
  if (turn.note) made.append(element("span", turn.note, "quiet"));
  return made;
}

function ask(text) {
  talk.turns.push({ role: "user", content: text });
  answer();
}

function again(place) {
  if (running) return;
  talk.turns.splice(place);
  answer();
}

// Edits a question in its place; sending it removes what came after.
function edit(turn, place, shown) {
  if (running) return;
  const form = element("form", undefined, "edit");
  const field = element("textarea");
  field.value = turn.content;
  field.setAttribute("aria-label", "Edit the message");
  const bar = element("div", undefined, "bar");
  const send = element("button", "Send", "main");
  bar.append(send, button("Cancel", draw));
  form.append(field, bar);
  form.addEventListener("submit", (happened) => {
    happened.preventDefault();
    if (!field.value.trim() || running) return;
    talk.turns.splice(place);
    ask(field.value.trim());
  });
  sendOnEnter(field, () => form.requestSubmit());
  shown.replaceChildren(form);
  field.focus();
}

// One focusable line of tokens: arrow keys go through them, the line below tells of each.
function drawTokens(tokens) {
  const box = element("div", undefined, "tokens");
  const line = element("div", undefined, "line");
  const told = element("p", "Point at a token, or use the arrow keys.", "quiet");
  told.setAttribute("role", "status");
  line.tabIndex = 0;
  line.setAttribute("role", "group");
  line.setAttribute("aria-label", "Tokens with their probability");
  line.append(...tokens.map(drawToken));
  let chosen = -1;
  const choose = (place) => {
    line.children[chosen]?.classList.remove("chosen");
    chosen = Math.max(0, Math.min(tokens.length - 1, place));
    line.children[chosen]?.classList.add("chosen");
    told.textContent = describe(tokens[chosen]);
  };
  line.addEventListener("keydown", (happened) => {
    if (happened.key === "ArrowRight") choose(chosen + 1);
    if (happened.key === "ArrowLeft") choose(chosen - 1);
  });
  line.addEventListener("pointerover", ({ target }) => {
    const place = [...line.children].indexOf(target);
    if (place >= 0) choose(place);
  });
  box.append(line, told);
  return box;
}

function drawToken({ text, share }) {
  const made = element("span", text, "token");
  made.style.borderColor = `color-mix(in srgb, var(--warn) ${Math.round(100 * (1 - share))}%, transparent)`;
  return made;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

function describe({ text, share, others }) {
  const rest = others.map((each) => `${JSON.stringify(each.text)} ${percent(each.share)}`).join(", ");
  return `${JSON.stringify(text)} ${percent(share)}${rest ? `; instead of ${rest}` : ""}`;
}

async function answer() {
  const own = talk;
  const turn = { role: "assistant", content: "" };
  const asked = own.turns.map(({ role, content }) => ({ role, content }));
  own.turns.push(turn);
  running = new AbortController();
  keepTalk();
  draw();
  const isCurrent = () => talk === own;
  const paint = painter(turn, isCurrent);
  const clock = { began: performance.now(), first: 0 };
  try {
    const reply = await request(own.system, asked, running.signal);
    for await (const chunk of objects(reply)) {
      if (chunk.error) throw new Error(chunk.error.message);
      take(turn, chunk, clock);
      paint();
    }
  } catch (error) {
    if (error.name === "AbortError") turn.note = note(turn, clock, "stopped");
    else turn.error = error.message;
  } finally {
    running = null;
    if (talks.includes(own)) save(own);
    if (isCurrent()) draw();
  }
}

function take(turn, chunk, clock) {
  const delta = chunk.choices?.[0]?.delta ?? {};
  if (delta.content || delta.reasoning_content) clock.first ||= performance.now();
  turn.content += delta.content ?? "";
  if (delta.reasoning_content) turn.reasoning = (turn.reasoning ?? "") + delta.reasoning_content;
  const scored = chunk.choices?.[0]?.logprobs?.content;
  if (scored) turn.tokens = [...(turn.tokens ?? []), ...scored.map(scoredToken)];
  if (chunk.choices?.[0]?.finish_reason === "length") turn.cut = true;
  if (chunk.meshllm) turn.seed = chunk.meshllm.seed;
  if (chunk.usage) turn.note = note(turn, clock, turn.cut ? "cut at its longest" : "", chunk.usage.completion_tokens);
}

function scoredToken({ token, logprob, top_logprobs: top }) {
  const others = top.filter((each) => each.token !== token).slice(0, alternatives);
  return { text: token, share: Math.exp(logprob), others: others.map((each) => ({ text: each.token, share: Math.exp(each.logprob) })) };
}

function note(turn, { began, first }, word, tokens) {
  const took = performance.now() - first;
  const parts = [
    word,
    tokens && `${tokens} tokens`,
    first && `first after ${((first - began) / 1000).toFixed(2)} s`,
    tokens > 1 && first && `${((1000 * (tokens - 1)) / took).toFixed(1)} tokens/s`,
    turn.seed !== undefined && `seed ${turn.seed}`,
  ];
  return parts.filter(Boolean).join(", ");
}

// Draws the answer at most once a frame, and follows its end while that is in view.
function painter(turn, isCurrent) {
  let isWaiting = false;
  return () => {
    if (isWaiting || !isCurrent()) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      const list = at("turns");
      if (!isCurrent() || running === null) return;
      const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      list.lastElementChild.replaceChildren(...content(turn));
      if (isAtEnd) list.scrollTop = list.scrollHeight;
    });
  };
}

async function request(system, turns, signal) {
  if (!at("model").value) throw new Error("No model is served yet, or the server is locked or away");
  const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  const body = {
    model: at("model").value,
    messages,
    max_tokens: Number(at("most").value) || 512,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p"]) {
    if (at(name).value) body[name] = Number(at(name).value);
  }
  body.seed = at("seed").value ? Number(at("seed").value) : Math.floor(Math.random() * seeds);
  if (at("probable").checked) Object.assign(body, { logprobs: true, top_logprobs: alternatives + 1 });
  return call("/v1/chat/completions", body, signal);
}
