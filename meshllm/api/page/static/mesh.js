// The mesh as a drawing, a table and a list of events.
import { element } from "./door.js";
import { render } from "./markdown.js";

const SVG = "http://www.w3.org/2000/svg";
const units = ["B", "KiB", "MiB", "GiB", "TiB"];
const loggedMost = 30;
let before = null;

export function drawMesh(mesh, summary) {
  summary.textContent = `${mesh.model || "no model"}: ${mesh.state}`;
  document.title = `meshllm: ${mesh.state}`;
  drawFigures(mesh);
  drawRing(mesh);
  drawNodes(mesh.nodes);
  document.getElementById("advice").replaceChildren(...render(mesh.advice));
  for (const line of changes(before, mesh)) log(line);
  before = mesh;
}

function drawFigures(mesh) {
  const rate = (ms) => (ms ? (1000 / ms).toFixed(1) : "-");
  const lost = mesh.losses.reduce((sum, each) => sum + each.count, 0);
  const figures = [
    [mesh.model || "-", mesh.precision ? `${mesh.layers} layers, ${mesh.precision}` : "model"],
    [rate(mesh.measured_ms), "tokens/s measured"],
    [rate(mesh.predicted_ms), "tokens/s predicted"],
    [mesh.active, "sessions"],
    [mesh.served, `answers, ${mesh.tokens} tokens`],
    [lost, "losses survived"],
  ];
  const made = figures.map(([value, name]) => {
    const box = element("div");
    box.append(element("b", value), element("span", name));
    return box;
  });
  document.getElementById("figures").replaceChildren(...made);
}

function drawRing(mesh) {
  const svg = document.getElementById("ring");
  const count = mesh.hops.length;
  const parts = [];
  const places = mesh.hops.map((_, rank) => {
    const turn = (2 * Math.PI * rank) / count - (count === 2 ? Math.PI : Math.PI / 2);
    return count === 1 ? [360, 180] : [360 + 250 * Math.cos(turn), 180 + 125 * Math.sin(turn)];
  });
  const states = new Map(mesh.nodes.map((node) => [node.name, node.state]));
  mesh.hops.forEach((hop, rank) => {
    if (count > 1) parts.push(...drawHop(places[rank], places[(rank + 1) % count], hop.wire_ms));
  });
  mesh.hops.forEach((hop, rank) => {
    const [x, y] = places[rank];
    const isAway = ["down", "left", "leaving"].includes(states.get(hop.name));
    const box = make("rect", { x: x - 70, y: y - 32, width: 140, height: 64, rx: 10, class: isAway ? "node away" : "node" });
    const time = hop.compute_ms === null ? "" : `, ${hop.compute_ms.toFixed(2)} ms`;
    parts.push(box, label(x, y - 6, short(hop.name, 15)), label(x, y + 16, `${hop.layers}${time}`, "small"));
  });
  if (!count) parts.push(label(360, 180, mesh.reason || "no ring yet"));
  svg.replaceChildren(...parts);
  const told = mesh.hops.map((hop) => `${hop.name} holds ${hop.layers}`).join(", then ");
  const why = mesh.reason ? `: ${mesh.reason}` : "";
  document.getElementById("ring-caption").textContent =
    `${mesh.state}${why}${told ? `; ${told}` : ""}`;
}

function drawHop([x1, y1], [x2, y2], ms) {
  const middle = [(x1 + x2) / 2, (y1 + y2) / 2];
  const length = Math.hypot(x2 - x1, y2 - y1);
  const [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length];
  const bend = 28;
  const control = [middle[0] + uy * bend, middle[1] - ux * bend];
  const line = make("path", { class: "hop", d: `M${x1} ${y1}Q${control[0]} ${control[1]} ${x2} ${y2}` });
  const [ax, ay] = [(x1 + 2 * control[0] + x2) / 4, (y1 + 2 * control[1] + y2) / 4];
  const arrow = make("path", {
    class: "arrow",
    d: `M${ax + 9 * ux} ${ay + 9 * uy}L${ax - 6 * ux - 6 * uy} ${ay - 6 * uy + 6 * ux}L${ax - 6 * ux + 6 * uy} ${ay - 6 * uy - 6 * ux}Z`,
  });
  const text = ms === null ? [] : [label(ax + uy * 40, ay - ux * 20 + 5, `${ms.toFixed(1)} ms`, "small")];
  return [line, arrow, ...text];
}

function drawNodes(nodes) {
  const rows = nodes.map((node) => {
    const row = element("tr");
    const state = element("td", node.reason ? `${node.state}: ${short(node.reason, 60)}` : node.state);
    if (["down", "refused"].includes(node.state)) state.classList.add("bad");
    row.append(
      element("td", node.is_self ? `${node.name} (this node)` : node.name),
      state,
      element("td", node.layers ?? "-"),
      element("td", node.memory_bytes ? bytes(node.memory_bytes) : "-", "number"),
      element("td", node.round_trip_ms === null ? "-" : `${node.round_trip_ms.toFixed(1)} ms`, "number"),
      element("td", node.path || "-"),
    );
    return row;
  });
  document.getElementById("nodes").replaceChildren(...rows);
}

function* changes(old, mesh) {
  if (!old) return;
  const states = new Map(old.nodes.map((node) => [node.name, node.state]));
  for (const node of mesh.nodes) {
    const was = states.get(node.name);
    if (was !== node.state) yield was ? `${node.name}: ${was}, now ${node.state}` : `${node.name} joined`;
  }
  if (old.epoch !== mesh.epoch || old.state !== mesh.state) {
    const held = mesh.hops.map((hop) => `${hop.name} ${hop.layers}`).join(", ");
    yield `ring ${mesh.state}${held ? `: ${held}` : ""}`;
  }
  const count = (status) => status.losses.reduce((sum, each) => sum + each.count, 0);
  const paused = (status) => status.losses.reduce((sum, each) => sum + each.paused_s, 0);
  if (count(mesh) > count(old)) {
    yield `answers survived a loss after ${(paused(mesh) - paused(old)).toFixed(1)} s`;
  }
}

function log(line) {
  const list = document.getElementById("log");
  list.prepend(element("li", `${new Date().toLocaleTimeString()} ${line}`));
  while (list.children.length > loggedMost) list.lastChild.remove();
}

function make(kind, attributes) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function label(x, y, text, kind) {
  const made = make("text", kind ? { x, y, class: kind } : { x, y });
  made.textContent = text;
  return made;
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function bytes(count) {
  const power = Math.min(Math.floor(Math.log2(count) / 10), units.length - 1);
  return `${(count / 1024 ** power).toFixed(1)} ${units[power]}`;
}
