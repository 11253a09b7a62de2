// Keys and usage, for the owner; and the notice where the owner's key is needed.
import { at, button, call, counted, key, row } from "./api.js";
import { copy } from "./markdown.js";

const owners = ["plan", "keys"];
const day = 86_400;

export function startOwner() {
  at("new-key").addEventListener("submit", (happened) => {
    happened.preventDefault();
    create();
  });
  at("by").addEventListener("change", drawUsage);
  at("copy-key").addEventListener("click", ({ target }) => copy(at("made-key").value, target));
}

export async function showOwner(view) {
  if (!owners.includes(view)) return;
  const [why, lacksKey] = key() ? await refusal() : ["This view needs an owner's key.", true];
  for (const name of owners) {
    at(`${name}-locked`).hidden = !why;
    at(`${name}-why`).textContent = why;
    at(`${name}-how`).hidden = !lacksKey;
    at(`${name}-open`).hidden = Boolean(why);
  }
  if (!why && view === "keys") await Promise.all([drawKeys(), drawUsage()]);
}

async function refusal() {
  try {
    await call("/owner/keys");
    return ["", false];
  } catch (error) {
    const lacksKey = [401, 403].includes(error.status);
    return [lacksKey ? "The key of this tab is not an owner's key." : error.message, lacksKey];
  }
}

async function reported(work) {
  at("keys-error").textContent = "";
  try {
    await work();
  } catch (error) {
    at("keys-error").textContent = error.message;
  }
}

const drawKeys = () =>
  reported(async () => {
    const { keys } = await (await call("/owner/keys")).json();
    at("key-rows").replaceChildren(...keys.map(keyRow));
  });

function keyRow(found) {
  const date = (seconds) => new Date(1000 * seconds).toLocaleDateString();
  const limits = [
    found.models.join(", "),
    found.concurrency && `${found.concurrency} at a time`,
    found.tokens_per_day && `${counted(found.tokens_per_day, "token")} a day`,
    found.trust.length && `trusts ${found.trust.join(", ")}`,
    found.deadline_s && `${found.deadline_s} s an answer`,
    found.max_reasoning !== null && `${counted(found.max_reasoning, "token")} of reasoning`,
  ].filter(Boolean);
  const revoker = found.state === "active" ? button("Revoke", () => revoke(found.name), `Revoke ${found.name}`) : "";
  return row(
    found.owner ? `${found.name} (owner)` : found.name,
    found.state,
    date(found.created_s),
    found.expires_s ? date(found.expires_s) : "never",
    limits.join("; ") || "none",
    revoker,
  );
}

function revoke(name) {
  if (!confirm(`Revoke the key ${name}? This cannot be undone.`)) return;
  reported(async () => {
    const { is_told: isTold } = await (await call("/owner/keys/revoke", { name })).json();
    await drawKeys();
    if (!isTold) throw new Error(`${name} is revoked here; other nodes are notified when the node runs`);
  });
}

const create = () =>
  reported(async () => {
    const count = (name) => (at(name).value ? Number(at(name).value) : null);
    const days = count("key-days");
    const made = await call("/owner/keys", {
      name: at("key-name").value.trim(),
      expires_s: days && Math.round(Date.now() / 1000 + days * day),
      models: at("key-models").value.split(",").map((name) => name.trim()).filter(Boolean),
      concurrency: count("key-together"),
      tokens_per_day: count("key-tokens"),
      deadline_s: count("key-seconds"),
      max_reasoning: count("key-reasoning"),
    });
    at("made-key").value = (await made.json()).key;
    at("made").hidden = false;
    at("new-key").reset();
    at("made-key").focus();
    at("made-key").select();
    await drawKeys();
  });

const drawUsage = () =>
  reported(async () => {
    const by = at("by").value;
    const { usage } = await (await call(`/owner/usage?by=${by}`)).json();
    const rows = usage.map((each) => row(each[by] || "no key", each.requests, each.errors, each.read, each.cached, each.written));
    at("usage-rows").replaceChildren(...(rows.length ? rows : [row("no requests yet", "", "", "", "", "")]));
  });
