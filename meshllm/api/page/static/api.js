// Requests to the server, with the API key that this tab keeps, and elements of the page.
export const at = (id) => document.getElementById(id);

let secret = "";
try {
  secret = sessionStorage.getItem("key") ?? "";
} catch {
  // the storage of this browser is off
}

export const silence = 45_000; // ms, of a connection that is lost: the server sends a comment every 10 or 15 s

export const key = () => secret;

export function keep(given) {
  secret = given;
  try {
    sessionStorage.setItem("key", secret);
  } catch {
    // it lasts as long as the page
  }
  dispatchEvent(new Event("key"));
}

export function headers() {
  return key() ? { authorization: `Bearer ${key()}` } : {};
}

export async function call(path, body, signal) {
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const type = body === undefined ? {} : { "content-type": "application/json" };
  return checked(await connected(fetch(path, { ...sent, headers: { ...type, ...headers() }, signal })));
}

// A browser's word for a connection that is lost is a TypeError.
async function connected(happening) {
  try {
    return await happening;
  } catch (error) {
    throw error instanceof TypeError ? new Error("The connection to the server is lost, or it does not run") : error;
  }
}

async function checked(reply) {
  if (reply.ok) return reply;
  let message;
  try {
    message = (await reply.json()).error.message;
  } catch {
    message = `The server answered with status ${reply.status}`;
  }
  throw Object.assign(new Error(message), { status: reply.status });
}

// The objects of server-sent events, as they come; what is heard may be a comment, too.
export async function* objects(reply, heard = () => {}) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ; ) {
      const { done, value } = await connected(reader.read());
      if (done) return;
      heard();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may be lost already
  }
}

export function element(kind, text, ...classes) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  made.classList.add(...classes);
  return made;
}

export function button(text, happens, label) {
  const made = element("button", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", happens);
  return made;
}

// Shows these nodes instead of those of a parent, of which equal ones stay: with what is selected, focused or open.
export function patch(parent, made) {
  made.forEach((node, place) => {
    const shown = parent.childNodes[place];
    if (!shown) parent.append(node);
    else if (isPatched(shown, node)) patch(shown, [...node.childNodes]);
    else if (!shown.isEqualNode(node)) shown.replaceWith(node);
  });
  while (parent.childNodes.length > made.length) parent.lastChild.remove();
}

const isPatched = (shown, { tagName, className }) =>
  ["ARTICLE", "DETAILS"].includes(tagName) && shown.tagName === tagName && shown.className === className;

// A row of a table; a number is shown to the right, null as a dash.
export function row(...cells) {
  const made = element("tr");
  for (const cell of cells) {
    const box = element("td");
    box.append(cell ?? "-");
    if (typeof cell === "number") box.classList.add("number");
    made.append(box);
  }
  return made;
}

export const counted = (count, noun) => `${count.toLocaleString()} ${words(count, noun)}`;

export const words = (count, noun) => (count === 1 ? noun : `${noun}s`);

const units = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  const power = count && Math.min(Math.floor(Math.log2(count) / 10), units.length - 1);
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

export const ms = (value) => (value === null || value === undefined ? "-" : `${value.toFixed(value < 10 ? 2 : 1)} ms`);

export const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
