// The mesh as figures, a drawing, tables and a list of events; and the models that it serves.
import { at, bytes, counted, element, ms, row, short, words } from "./api.js";
import { withCode } from "./markdown.js";

const SVG = "http://www.w3.org/2000/svg";
const loggedMost = 50;
const narrowBelow = 560; // px, and `perRank` for each rank: else ranks are drawn one below the other
const perRank = 110;
const away = ["down", "left", "leaving", "refused"];
let before = null;

new ResizeObserver(() => before && drawRing(before)).observe(at("drawing"));

export function drawMesh(mesh) {
  at("client-note").hidden = !mesh.is_client;
  for (const name of ["drawing", "nodes-box"]) at(name).hidden = mesh.is_client;
  drawFigures(mesh);
  drawRing(mesh);
  drawTimes(mesh);
  drawNodes(mesh.nodes);
  at("advice").replaceChildren(...withCode(mesh.advice));
  at("warnings").replaceChildren(...mesh.warnings.map(warning));
  for (const line of changes(before, mesh)) log(line);
  before = mesh;
}

function warning(text) {
  const made = element("li");
  made.append(...withCode(text));
  return made;
}

export function drawModels(models) {
  const rows = models.map((model) => {
    const layers = model.layers ? `, ${counted(model.layers, "layer")}` : "";
    const rings = `${model.serving} of ${counted(model.replicas, "ring")}`;
    const kind = model.replicas ? rings : "an engine";
    const count = model.count ? counted(model.count, "node") : null; // a client does not know it
    const who = model.holders.join(", ") || count;
    return row(model.name, model.precision || "unknown", model.context ? `${model.context.toLocaleString()} tokens` : "unknown", `${kind}${layers}`, who);
  });
  at("served").replaceChildren(...(rows.length ? rows : [row("no model is served yet", "", "", "", "")]));
}

export function drawRings(rings) {
  const rows = rings.map((ring) =>
    row(
      ring.is_own ? `${ring.model} (this node's)` : ring.model,
      String(ring.replica),
      ring.state,
      ring.stages.join(", ") || null,
      ring.policy || null,
      ring.speed ? rate(ring.speed) : null,
      ring.execution || null,
      ring.reason || null,
    ),
  );
  at("rings").replaceChildren(...rows);
  at("rings-box").hidden = rings.length < 2;
}

export const rate = (speed) => (speed?.ms_per_token ? (1000 / speed.ms_per_token).toFixed(1) : "-");

function drawFigures(mesh) {
  const lost = mesh.losses.reduce((sum, each) => sum + each.count, 0);
  const figures = [
    [mesh.model || "-", mesh.precision ? `${counted(mesh.layers, "layer")}, ${mesh.precision}` : "model"],
    [rate(mesh.measured), "tokens/s measured"],
    [rate(mesh.predicted), "tokens/s predicted"],
    [ms(mesh.measured?.ttft_ms), `to the first token${mesh.predicted ? `, ${ms(mesh.predicted.ttft_ms)} predicted` : ""}`],
  ];
  if (mesh.is_client) figures.splice(2, 1); // it cannot predict
  if (!mesh.is_public) {
    figures.push([mesh.active, `${words(mesh.active, "session")}${mesh.waiting ? `, ${mesh.waiting} waiting` : ""}`]);
    figures.push([mesh.served.toLocaleString(), `${words(mesh.served, "answer")}, ${counted(mesh.tokens, "token")}`]);
    figures.push([lost, lost === 1 ? "loss survived" : "losses survived"]);
  }
  if (mesh.memory) {
    const { weights, packed_weights, kv_cache, prefix_cache, kv_room, process } = mesh.memory;
    figures.push([bytes(weights + packed_weights), `of weights here; the process holds ${bytes(process)}`]);
    figures.push([bytes(kv_cache + prefix_cache), `of ${bytes(kv_room)} KV cache here`]);
  }
  const made = figures.map(([value, name]) => {
    const box = element("div");
    box.append(element("b", value), element("span", name));
    return box;
  });
  at("figures").replaceChildren(...made);
}

function drawRing(mesh) {
  const width = at("drawing").clientWidth;
  if (!width) return;
  const isNarrow = width < Math.max(narrowBelow, perRank * mesh.hops.length);
  const idle = mesh.nodes.filter((node) => node.rank === null);
  const [parts, wide, height] = isNarrow ? column(mesh, idle) : ellipse(mesh, idle);
  at("ring").setAttribute("viewBox", `0 0 ${wide} ${height}`);
  at("ring").classList.toggle("narrow", isNarrow);
  at("ring").classList.toggle("live", mesh.active > 0);
  at("ring").replaceChildren(...parts);
  const held = mesh.hops.map((hop, rank) => `${rank ? "" : "▸ "}${hop.name} ${rank ? "" : "reads prompts and "}holds layers ${hop.layers}`).join(", then ");
  const why = mesh.reason ? `: ${mesh.reason}` : "";
  const rest = idle.length ? `; without layers: ${idle.map(({ name, state }) => `${name} (${state})`).join(", ")}` : "";
  const times = mesh.hops.length ? `; times are per token, ${mesh.measured ? "measured" : "planned"}` : "";
  at("ring-caption").textContent = `Ring ${mesh.state}${why}${held ? `; ${held}` : ""}${times}${rest}`;
}

function ellipse(mesh, idle) {
  const count = mesh.hops.length;
  const scale = Math.max(1, count / 5);
  const [middle, top, low] = [380 * scale, count === 2 ? 70 : 45, count > 2 ? 135 * scale : 0];
  const places = mesh.hops.map((_, rank) => {
    const turn = (2 * Math.PI * rank) / count - (count === 2 ? Math.PI : Math.PI / 2);
    return count === 1 ? [middle, top] : [middle + 285 * scale * Math.cos(turn), top + low + low * Math.sin(turn)];
  });
  const parts = [];
  mesh.hops.forEach((hop, rank) => {
    if (count > 1) parts.push(...curve(places[rank], places[(rank + 1) % count], wire(mesh, rank)));
  });
  mesh.hops.forEach((hop, rank) => parts.push(...box(places[rank], hop, rank, mesh)));
  if (!count) parts.push(label(middle, top, "no ring yet"));
  let height = Math.max(top, ...places.map(([, y]) => y)) + (count > 1 ? 75 : 50);
  for (let at = 0; at < idle.length; at += 4, height += 80) {
    const shown = idle.slice(at, at + 4);
    shown.forEach((node, place) => parts.push(...idleBox(middle + 180 * (place - (shown.length - 1) / 2), height + 36, node)));
  }
  return [parts, 2 * middle, height];
}

function column(mesh, idle) {
  const step = 104;
  const count = mesh.hops.length;
  const parts = [];
  mesh.hops.forEach((hop, rank) => {
    const y = 40 + rank * step;
    const { time, isRelayed } = wire(mesh, rank);
    const kind = isRelayed ? "hop relayed" : "hop";
    if (rank < count - 1) {
      parts.push(make("path", { class: kind, d: `M115 ${y + 32}V${y + step - 40}` }), arrow(115, y + step - 38, 0, 1));
      parts.push(label(127, y + step / 2 + 5, time, "small start"));
    } else if (count > 1) {
      parts.push(make("path", { class: kind, d: `M195 ${y}H255Q275 ${y} 275 ${y - 20}V60Q275 40 255 40H210` }), arrow(197, 40, -1, 0));
      parts.push(label(284, y / 2 + 20, time, "small start"));
    }
  });
  mesh.hops.forEach((hop, rank) => parts.push(...box([115, 40 + rank * step], hop, rank, mesh)));
  if (!count) parts.push(label(115, 40, "no ring yet"));
  let height = count ? 90 + (count - 1) * step : 80;
  for (const node of idle) {
    parts.push(...idleBox(115, height + 36, node));
    height += 80;
  }
  return [parts, 360, height];
}

// The time of a hop, and whether it is known to pass a relay: its path is known at one end only.
function wire(mesh, rank) {
  const hop = mesh.hops[rank];
  const next = mesh.hops[(rank + 1) % mesh.hops.length];
  const ends = mesh.nodes.filter(({ id }) => id === hop.id || id === next.id);
  const other = ends.some((node) => node.is_self) && ends.find((node) => !node.is_self);
  const time = hop.measured.wire_ms ?? hop.predicted.wire_ms;
  const isRelayed = other && other.path === "relayed";
  return { time: time === null ? "" : `${time.toFixed(1)} ms${isRelayed ? " relayed" : ""}`, isRelayed };
}

function box([x, y], hop, rank, mesh) {
  const state = mesh.nodes.find(({ id }) => id === hop.id)?.state;
  const time = hop.measured.compute_ms ?? hop.predicted.compute_ms;
  const timing = time === null ? "" : `, ${time.toFixed(2)} ms`;
  return [
    make("rect", { x: x - 80, y: y - 32, width: 160, height: 64, rx: 10, class: away.includes(state) ? "node away" : "node" }),
    label(x, y - 8, `${rank ? "" : "▸ "}${short(hop.name, 15)}`, "name"),
    label(x, y + 15, away.includes(state) ? state : `${hop.layers}${timing}`, "small"),
  ];
}

function idleBox(x, y, node) {
  return [
    make("rect", { x: x - 80, y: y - 28, width: 160, height: 56, rx: 10, class: away.includes(node.state) ? "node away" : "node idle" }),
    label(x, y - 5, short(node.name, 18)),
    label(x, y + 16, node.state, "small"),
  ];
}

function curve([x1, y1], [x2, y2], { time, isRelayed }) {
  const length = Math.hypot(x2 - x1, y2 - y1);
  const [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length];
  const bend = Math.min(60, length / 6);
  const [cx, cy] = [(x1 + x2) / 2 + uy * bend, (y1 + y2) / 2 - ux * bend];
  const [mx, my] = [(x1 + 2 * cx + x2) / 4, (y1 + 2 * cy + y2) / 4];
  return [
    make("path", { class: isRelayed ? "hop relayed" : "hop", d: `M${x1} ${y1}Q${cx} ${cy} ${x2} ${y2}` }),
    arrow(mx + 8 * ux, my + 8 * uy, ux, uy),
    label(mx + uy * 18, my - ux * 20 + 5, time, `small${uy > 0.3 ? " start" : uy < -0.3 ? " end" : ""}`),
  ];
}

function arrow(x, y, ux, uy) {
  return make("path", { class: "arrow", d: `M${x} ${y}L${x - 14 * ux - 6 * uy} ${y - 14 * uy + 6 * ux}L${x - 14 * ux + 6 * uy} ${y - 14 * uy - 6 * ux}Z` });
}

function drawTimes(mesh) {
  const rows = mesh.hops.map((hop, rank) =>
    row(`${rank}`, hop.name, hop.layers, ...[hop.measured.compute_ms, hop.predicted.compute_ms, hop.measured.wire_ms, hop.predicted.wire_ms].map(number)),
  );
  at("times").replaceChildren(...rows);
  at("times-box").hidden = !rows.length;
}

function number(value) {
  const made = element("span", value === null ? "-" : value.toFixed(2), "number");
  return made;
}

function drawNodes(nodes) {
  const rows = nodes.map((node) => {
    const state = element("span", node.reason ? `${node.state}: ${node.reason}` : node.state);
    if (["down", "refused"].includes(node.state)) state.classList.add("bad");
    return row(
      node.is_self ? `${node.name} (this node)` : node.name,
      state,
      node.layers,
      node.memory_bytes ? bytes(node.memory_bytes) : null,
      node.round_trip_ms === null ? null : ms(node.round_trip_ms),
      node.path || null,
    );
  });
  at("nodes").replaceChildren(...rows);
}

function* changes(old, mesh) {
  if (!old) return;
  const states = new Map(old.nodes.map((node) => [node.id, node.state]));
  for (const node of mesh.nodes) {
    const was = states.get(node.id);
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
  const list = at("log");
  const item = element("li");
  item.append(element("time", new Date().toLocaleTimeString()), ` ${line}`);
  list.prepend(item);
  at("log-empty").hidden = true;
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
