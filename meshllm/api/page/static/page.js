// The views of the page, the key, and the state of the mesh, which most views show.
import { offerModels, startChat } from "./chat.js";
import { at, headers, keep, key, objects, silence } from "./api.js";
import { drawMesh, drawModels, drawRings } from "./mesh.js";
import { drawPlan, startPlan } from "./plan.js";
import { showOwner, startOwner } from "./owner.js";

const views = ["mesh", "chat", "models", "plan", "keys"];
let connection = new AbortController();
let timer;

function show() {
  const asked = location.hash.slice(1) || "mesh";
  const chosen = views.includes(asked) ? asked : (document.body.dataset.view ?? "mesh");
  for (const name of views) {
    at(name).hidden = name !== chosen;
    const link = at(`to-${name}`);
    if (name === chosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.view = chosen;
  showOwner(chosen);
}

function status(text, kind) {
  document.title = `meshllm: ${kind}`;
  at("summary").textContent = text;
  at("summary").dataset.kind = kind;
}

function draw(mesh) {
  at("locked").hidden = true;
  status(`${mesh.state}: ${mesh.model || "no model"}`, mesh.state);
  drawMesh(mesh);
  drawModels(mesh.models);
  drawRings(mesh.rings);
  offerModels(mesh.models);
  drawPlan(mesh);
}

async function watch() {
  for (let wait = 500, why; ; wait = Math.min(2 * wait, 8000)) {
    why = "disconnected";
    while (document.hidden) await turned();
    connection = new AbortController();
    expectMore();
    try {
      const reply = await fetch("/page/events", { headers: headers(), signal: connection.signal });
      if (reply.status === 401) {
        at("locked").hidden = false;
        at("locked-why").textContent = key() ? "The server refuses this API key." : "This server needs an API key.";
        status("locked", "locked");
        await changed();
        wait = 250;
        continue;
      }
      if (reply.status === 503) why = "too many pages are open";
      if (reply.ok) {
        for await (const mesh of objects(reply, expectMore)) {
          if (mesh.error) throw new Error(mesh.error.message);
          draw(mesh);
          wait = 500;
        }
      }
    } catch {
      // the server is away, or the key has changed
    }
    clearTimeout(timer);
    if (document.hidden) continue;
    status(`${why}, trying again`, "disconnected");
    await new Promise((done) => setTimeout(done, connection.signal.aborted ? 0 : wait));
  }
}

// A connection can be lost without being closed, as when the machine slept or changed its network.
function expectMore() {
  clearTimeout(timer);
  const watched = connection;
  timer = setTimeout(() => watched.abort(), silence);
}

// A browser has six connections to a server for all its tabs: one that nobody sees leaves its own to others.
const turned = () => new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));

const changed = () => new Promise((done) => addEventListener("key", done, { once: true }));

function startKey() {
  const dialog = at("key-dialog");
  for (const opener of document.querySelectorAll("[data-opens-key]")) {
    opener.addEventListener("click", () => {
      at("key").value = key();
      dialog.showModal();
    });
  }
  at("key-form").addEventListener("submit", () => keep(at("key").value.trim()));
  at("forget").addEventListener("click", () => {
    keep("");
    dialog.close();
  });
  at("cancel-key").addEventListener("click", () => dialog.close());
  addEventListener("key", () => {
    connection.abort();
    show();
  });
}

// A link would choose a view that is not there.
document.querySelector(".skip").addEventListener("click", (happened) => {
  happened.preventDefault();
  at("main").focus();
});

startKey();
startChat();
startPlan();
startOwner();
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => document.hidden && connection.abort());
show();
watch();
