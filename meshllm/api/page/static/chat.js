// The chat: conversations with a model, and the answers as they come.
import { at, button, call, counted, element, key, objects, patch, silence } from "./api.js";
import { copy, render } from "./markdown.js";
import { blank, forget, isAbout, load, newId, save, stored, title } from "./talks.js";

const seeds = 2 ** 32; // drawn here: the server's own are larger than the integers of JavaScript
const alternatives = 4; // beside the token that was chosen
const nearEnd = 40; // px
const unsaved = new Set(); // ids of conversations for which the storage has no room
let talks = [];
let talk = null;
let running = null;
let replaced; // by the answer that comes, unless it has no text
let offered = "";
let chosen = ""; // the model that was chosen, which may be away
let follows = true; // the end of the conversation, which is in view
let scrolled = 0; // how far it was scrolled

export function startChat() {
  talks = load();
  talk = talks[0] ?? blank();
  at("new").addEventListener("click", () => open(blank(talk.system)));
  at("drop").addEventListener("click", drop);
  at("toggle-talks").addEventListener("click", () => showTalks(at("aside").classList.toggle("open")));
  at("settings").addEventListener("submit", (happened) => happened.preventDefault());
  at("system").addEventListener("change", () => {
    talk.system = at("system").value;
    if (running) storeOwn(talk);
    else keepTalk();
  });
  at("model").addEventListener("change", () => (chosen = at("model").value));
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
  at("turns").addEventListener("scroll", follow);
  new ResizeObserver(goToEnd).observe(at("turns")); // also when the view is chosen
  addEventListener("storage", refresh);
  addEventListener("pagehide", keepPart);
  drawOther();
}

// Whether the end is followed: not from the first line that is scrolled up, as smooth scrolling begins with few pixels.
function follow() {
  const { scrollHeight, scrollTop, clientHeight } = at("turns");
  const rest = scrollHeight - scrollTop - clientHeight;
  follows = rest < 1 || (rest < nearEnd && scrollTop > scrolled);
  scrolled = scrollTop;
}

function goToEnd() {
  if (follows) at("turns").scrollTop = at("turns").scrollHeight;
}

// The page is left in the middle of an answer.
function keepPart() {
  if (!running) return;
  const turn = talk.turns.at(-1);
  if (replaced && !turn.content && !turn.reasoning) talk.turns.splice(-1, 1, replaced);
  else turn.note = "stopped";
  storeOwn(talk);
}

function sendOnEnter(field, send) {
  field.addEventListener("keydown", (happened) => {
    const isComposing = happened.isComposing || happened.keyCode === 229; // the latter in Safari
    if (happened.key === "Enter" && !happened.shiftKey && !isComposing) {
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
  const wanted = chosen || at("model").value;
  at("model").replaceChildren(...names.map((name) => element("option", name)));
  if (chosen && !names.includes(chosen)) at("model").append(away(chosen));
  if (chosen || names.includes(wanted)) at("model").value = wanted;
}

// A request for it fails by its name, instead of being answered by another model.
function away(name) {
  const made = element("option", `${name} (not served now)`);
  Object.assign(made, { value: name, disabled: true });
  return made;
}

// Another tab has changed a conversation; while an answer comes, what others changed is shown at its end.
function refresh(happened) {
  if (running) return;
  reload();
  if (isAbout(happened, talk)) drawOther();
  else drawTalks();
}

function reload() {
  talks = [...talks.filter(({ id }) => unsaved.has(id)), ...load().filter(({ id }) => !unsaved.has(id))];
  talk = talks.find(({ id }) => id === talk.id) ?? talk;
}

function open(chosen) {
  running?.abort();
  talk = chosen;
  follows = true;
  showTalks(false);
  at("turns").replaceChildren();
  drawOther();
  at("question").focus();
}

function showTalks(isOpen) {
  at("aside").classList.toggle("open", isOpen);
  at("toggle-talks").setAttribute("aria-expanded", isOpen);
}

function drop() {
  if (talk.turns.length && !confirm("Delete this conversation? This cannot be undone.")) return;
  running?.abort();
  forget(talk);
  talks = talks.filter((each) => each !== talk);
  open(talks[0] ?? blank());
}

function keepTalk() {
  if (!talks.includes(talk)) talks.unshift(talk);
  store(talk);
  drawTalks();
  mark();
}

function store(kept) {
  if (save(kept)) unsaved.delete(kept.id);
  else unsaved.add(kept.id);
}

// Stores a conversation at the end of an answer, in which another tab may have deleted it, or gone on with it.
function storeOwn(own) {
  if (!unsaved.has(own.id)) {
    const kept = stored(own);
    if (!kept) return;
    if (kept.changed !== own.changed) own.id = newId(); // both are kept
  }
  store(own);
}

// Draws a conversation in place of another; its system prompt is left alone after that, as it may be edited.
function drawOther() {
  at("system").value = talk.system ?? "";
  draw();
}

function draw() {
  drawTalks();
  patch(at("turns"), talk.turns.map((turn, place) => drawTurn(turn, place)));
  goToEnd();
  mark();
}

function drawTalks() {
  const items = talks.map((each) => {
    const made = element("li");
    const opener = button(title(each), () => open(each));
    opener.dir = "auto";
    if (each === talk) opener.setAttribute("aria-current", "true");
    made.append(opener);
    return made;
  });
  at("talks").replaceChildren(...items);
}

function mark() {
  const focused = document.activeElement;
  at("stop").hidden = running === null;
  at("send").hidden = running !== null;
  at("turns").setAttribute("aria-busy", running !== null);
  at("empty").hidden = talk.turns.length > 0;
  at("storage").hidden = !unsaved.has(talk.id);
  if (focused === at("send") && running) at("stop").focus();
  if (focused === at("stop") && !running) at("question").focus();
}

function drawTurn(turn, place) {
  const made = element("article", undefined, "turn", turn.role);
  made.setAttribute("aria-label", turn.role === "user" ? "You" : "Answer");
  made.append(...content(turn));
  if (turn.error) made.append(element("p", turn.error, "error"));
  if (!running || turn !== talk.turns.at(-1)) made.append(actions(turn, place));
  return made;
}

function content(turn) {
  const made = [];
  if (turn.role === "user") {
    made.push(element("div", turn.content, "text"));
    made[0].dir = "auto";
    return made;
  }
  if (turn.reasoning) {
    const box = element("details");
    box.append(element("summary", "Reasoning"), ...render(turn.reasoning));
    made.push(box);
  }
  return [...made, ...(turn.tokens && at("probable").checked ? [drawTokens(turn.tokens)] : render(turn.content))];
}

// They name the place of a turn: equal ones stay when the turn changes.
function actions(turn, place) {
  const made = element("div", undefined, "actions");
  made.append(button("Copy", ({ target }) => copy(talk.turns[place].content, target)));
  if (turn.role === "user" && !running) made.append(button("Edit", () => edit(place)));
  if (turn.role === "assistant" && place === talk.turns.length - 1) made.append(button("Regenerate", () => again(place)));
  if (turn.note) made.append(element("span", turn.note, "quiet"));
  return made;
}

function ask(text) {
  talk.turns.push({ role: "user", content: text });
  answer();
}

function again(place) {
  if (running) return;
  const [before] = talk.turns.splice(place);
  answer(before);
}

// Edits a question in its place; sending it removes what came after.
function edit(place) {
  if (running) return;
  const shown = at("turns").children[place];
  const form = element("form", undefined, "edit");
  const field = element("textarea");
  field.value = talk.turns[place].content;
  field.dir = "auto";
  field.setAttribute("aria-label", "Edit the message");
  const bar = element("div", undefined, "bar");
  const send = element("button", "Send", "main");
  const cancel = () => {
    draw();
    shown.querySelector(".actions button:last-of-type").focus();
  };
  bar.append(send, button("Cancel", cancel));
  form.append(field, bar);
  form.addEventListener("submit", (happened) => {
    happened.preventDefault();
    if (!field.value.trim() || running) return;
    talk.turns.splice(place);
    ask(field.value.trim());
    at("question").focus();
  });
  form.addEventListener("keydown", (happened) => {
    if (happened.key === "Escape" && !happened.isComposing) cancel();
  });
  sendOnEnter(field, () => form.requestSubmit());
  shown.replaceChildren(form);
  field.focus();
}

// One focusable line of tokens: arrow keys go through them, the line below tells of each.
function drawTokens(tokens) {
  const box = element("div", undefined, "tokens");
  const line = element("div", undefined, "line");
  const details = element("p", "Point at a token, or use the arrow keys.", "quiet");
  details.setAttribute("role", "status");
  line.tabIndex = 0;
  line.setAttribute("role", "group");
  line.setAttribute("aria-label", "Tokens with their probability");
  line.append(...tokens.map(drawToken));
  let chosen = -1;
  const choose = (place) => {
    line.children[chosen]?.classList.remove("chosen");
    chosen = Math.max(0, Math.min(tokens.length - 1, place));
    line.children[chosen]?.classList.add("chosen");
    details.textContent = describe(tokens[chosen]);
  };
  line.addEventListener("keydown", (happened) => {
    if (happened.key === "ArrowRight") choose(chosen + 1);
    if (happened.key === "ArrowLeft") choose(chosen - 1);
  });
  line.addEventListener("pointerover", ({ target }) => {
    const place = [...line.children].indexOf(target);
    if (place >= 0) choose(place);
  });
  box.append(line, details);
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

// Answers the last question; the answer before returns if there is no other.
async function answer(before) {
  const own = talk;
  const turn = { role: "assistant", content: "" };
  const asked = own.turns.map(({ role, content }) => ({ role, content }));
  own.turns.push(turn);
  running = new AbortController();
  replaced = before;
  follows = true;
  keepTalk();
  draw();
  const isCurrent = () => talk === own;
  const paint = painter(turn, isCurrent);
  const clock = { began: performance.now(), first: 0 };
  const asking = running;
  let timer;
  const hear = () => {
    clearTimeout(timer);
    timer = setTimeout(() => asking.abort(new Error("The connection to the server is lost")), silence);
  };
  try {
    hear();
    const reply = await request(own.system, asked, asking.signal);
    for await (const chunk of objects(reply, hear)) {
      if (chunk.error) throw new Error(chunk.error.message);
      take(turn, chunk, clock);
      paint();
    }
    if (!clock.isDone) throw new Error("The server ended before the answer did");
  } catch (error) {
    if (error.name === "AbortError") turn.note = note(turn, clock, "stopped");
    else turn.error = error.message;
  } finally {
    clearTimeout(timer);
    running = null;
    if (before && !turn.content && !turn.reasoning && !clock.isDone) own.turns.splice(-1, 1, { ...before, error: turn.error });
    if (talks.includes(own)) storeOwn(own);
    reload();
    draw();
  }
}

function take(turn, chunk, clock) {
  const delta = chunk.choices?.[0]?.delta ?? {};
  if (delta.content || delta.reasoning_content) clock.first ||= performance.now();
  turn.content += delta.content ?? "";
  if (delta.reasoning_content) turn.reasoning = (turn.reasoning ?? "") + delta.reasoning_content;
  const scored = chunk.choices?.[0]?.logprobs?.content;
  if (scored) turn.tokens = [...(turn.tokens ?? []), ...scored.map(scoredToken)];
  if (chunk.choices?.[0]?.finish_reason) clock.isDone = true;
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
    tokens && counted(tokens, "token"),
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
      if (!isCurrent() || running === null) return;
      patch(at("turns").lastElementChild, content(turn));
      goToEnd();
    });
  };
}

async function request(system, turns, signal) {
  if (!at("model").value) throw new Error("No model is served yet, or the server is locked or away");
  const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  const body = {
    model: at("model").value,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p"]) {
    if (at(name).value) body[name] = Number(at(name).value);
  }
  if (at("most").value) body.max_tokens = Number(at("most").value);
  body.seed = at("seed").value ? Number(at("seed").value) : Math.floor(Math.random() * seeds);
  if (at("probable").checked) Object.assign(body, { logprobs: true, top_logprobs: alternatives + 1 });
  return call("/v1/chat/completions", body, signal);
}
