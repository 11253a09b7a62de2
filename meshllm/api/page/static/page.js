// The views of the page, and the state of the mesh that the first one shows.
import { startChat } from "./chat.js";
import { drawMesh } from "./mesh.js";
import { headers } from "./door.js";

const views = ["mesh", "chat"];
const summary = document.getElementById("summary");

function show() {
  const chosen = views.includes(location.hash.slice(1)) ? location.hash.slice(1) : "mesh";
  for (const name of views) {
    document.getElementById(name).hidden = name !== chosen;
    const link = document.getElementById(`to-${name}`);
    if (name === chosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function watch() {
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    try {
      const reply = await fetch("/page/events", { headers: headers() });
      if (reply.status === 401) {
        summary.textContent = "needs an API key: see Chat, Settings";
      } else if (reply.ok) {
        wait = 500;
        const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let rest = ""; ; ) {
          const { done, value } = await reader.read();
          if (done) break;
          const parts = (rest + value).split("\n\n");
          rest = parts.pop();
          for (const part of parts) {
            if (part.startsWith("data: ")) drawMesh(JSON.parse(part.slice(6)), summary);
          }
        }
      }
    } catch {
      // the server is away
    }
    if (!summary.textContent.startsWith("needs")) summary.textContent = "disconnected, trying again";
    await new Promise((done) => setTimeout(done, wait));
  }
}

addEventListener("hashchange", show);
show();
startChat();
watch();
