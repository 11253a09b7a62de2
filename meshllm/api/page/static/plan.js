// Plans to try out, for the owner: what another policy, memory or number of nodes would give.
import { at, call, counted, element, ms, row } from "./api.js";
import { rate } from "./mesh.js";

const gibibyte = 2 ** 30;
let shown = null;

export function startPlan() {
  at("plan-form").addEventListener("submit", (happened) => {
    happened.preventDefault();
    predict();
  });
}

// Keeps what was typed while the same nodes are there.
export function drawPlan(mesh) {
  const basis = (status) => JSON.stringify([status.exclude, usable(status).map(({ id, name, memory_bytes: size }) => [id, name, size])]);
  const isSame = shown && basis(shown) === basis(mesh);
  if (!shown) at("policy").value = mesh.policy;
  at("members").defaultValue = mesh.members ?? "";
  shown = mesh;
  at("plan-now").textContent = `Now: ${rate(mesh.predicted)} tokens/s predicted, ${rate(mesh.measured)} measured, on ${mesh.hops.length} of ${counted(mesh.nodes.length, "node")}.`;
  if (!isSame) at("plan-nodes").replaceChildren(...usable(mesh).map((node) => nodeRow(node, !mesh.exclude.includes(node.id))));
}

const usable = (mesh) => mesh.nodes.filter(({ state }) => !["down", "left"].includes(state));

function nodeRow({ id, name, memory_bytes: memory }, isUsed) {
  const used = element("input");
  Object.assign(used, { type: "checkbox", defaultChecked: isUsed, checked: isUsed });
  used.dataset.uses = id;
  used.setAttribute("aria-label", `Use ${name}`);
  const size = element("input");
  Object.assign(size, { type: "number", min: 0, max: 65536, step: "any", value: Number((memory / gibibyte).toFixed(2)) });
  size.defaultValue = size.value;
  size.dataset.holds = id;
  size.setAttribute("aria-label", `Memory of ${name} in GiB`);
  return row(used, name, size);
}

// Null is what is in force.
function terms() {
  const fields = (name) => [...at("plan-nodes").querySelectorAll(`[data-${name}]`)];
  const changed = fields("holds").filter((field) => field.value && field.value !== field.defaultValue);
  const isChosen = fields("uses").some((field) => field.checked !== field.defaultChecked);
  const unused = fields("uses").filter((field) => !field.checked);
  return {
    policy: at("policy").value,
    members: at("members").value === at("members").defaultValue ? null : Number(at("members").value) || 0,
    exclude: isChosen ? unused.map((field) => field.dataset.uses) : null,
    memory_bytes: Object.fromEntries(changed.map((field) => [field.dataset.holds, Math.round(Number(field.value) * gibibyte)])),
  };
}

async function predict() {
  at("predict").disabled = true;
  at("plan-error").textContent = "";
  try {
    drawResult(await (await call("/owner/plan", terms())).json());
  } catch (error) {
    at("plan-error").textContent = error.message;
    at("plan-result").hidden = true;
  } finally {
    at("predict").disabled = false;
  }
}

function drawResult(found) {
  const { predicted } = found;
  const now = shown?.predicted?.ms_per_token;
  const change = now && predicted ? `, ${(now / predicted.ms_per_token).toFixed(2)} times the speed of now` : "";
  at("plan-figures").textContent = predicted
    ? `${rate(predicted)} tokens/s${change}; first token after ${ms(predicted.ttft_ms)}`
    : `No ring: ${found.reason}`;
  at("plan-stages").replaceChildren(
    ...found.stages.map(({ rank, name, node, layers }) => {
      const hop = predicted?.hops[rank];
      return row(String(rank), name || node.slice(0, 7), layers, ms(hop?.compute_ms), ms(hop?.wire_ms));
    }),
  );
  at("plan-standbys").replaceChildren(...found.standbys.map((each) => element("li", `${each.name || each.node.slice(0, 7)}: ${each.reason}`)));
  at("plan-result").hidden = false;
}
