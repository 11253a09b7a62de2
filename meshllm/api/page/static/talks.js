// Conversations, each kept in this browser under a name of its own, so that tabs do not undo each other.
const prefix = "meshllm-talk-";

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

export const blank = (system = "") => ({ id: newId(), changed: Date.now(), system, turns: [] });

export function load() {
  let found;
  try {
    found = Object.keys(localStorage).filter((name) => name.startsWith(prefix)).map((name) => parse(localStorage.getItem(name)));
  } catch {
    return []; // the storage is off
  }
  return found.filter(isTalk).sort((one, other) => other.changed - one.changed);
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function isTalk(found) {
  const isTurn = (turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string";
  return typeof found?.id === "string" && Array.isArray(found.turns) && found.turns.every(isTurn);
}

// Whether it is kept: the storage may be full or off, then the conversation lasts as long as the page.
export function save(talk) {
  talk.changed = Date.now();
  try {
    localStorage.setItem(prefix + talk.id, JSON.stringify(talk));
    return true;
  } catch {
    return false;
  }
}

// As this tab or another one left it; null if it is not kept.
export const stored = (talk) => parse(localStorage.getItem(prefix + talk.id));

export function forget(talk) {
  try {
    localStorage.removeItem(prefix + talk.id);
  } catch {
    // the storage is off: there is nothing to forget
  }
}

// Whether an event of the storage may be about it; one without a name is about all.
export const isAbout = ({ key }, talk) => key === null || key === prefix + talk.id;

export const title = (talk) => talk.turns[0]?.content.trim().slice(0, 60) || "New conversation";
