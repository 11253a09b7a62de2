// A part of Markdown as DOM nodes, which are made of text only: no HTML is ever parsed.
import { button, element } from "./api.js";

const starts = /^(#{1,6} |>|\s*([-*+]|\d{1,9}[.)]) |\s*([-*_])(\s*\3){2,}\s*$)/;
const opening = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})(.*)$/; // of fenced code
const item = /^(\s*)([-*+]|\d{1,9}[.)]) (.*)$/;
const rule = /^\s*([-*_])(\s*\1){2,}\s*$/;
const depthMost = 8; // of lists and quotes

export function render(text, depth = 0) {
  const blocks = [];
  const lines = text.split(/\r\n?|\n/);
  for (let at = 0; at < lines.length; ) {
    const [made, next] = block(lines, at, depth);
    if (made) blocks.push(made);
    if (made && !depth && !made.dir) made.dir = "auto"; // what is in it has the same direction
    at = next;
  }
  return blocks;
}

function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (opening.test(line)) return fence(lines, at);
  if (/^#{1,6} /.test(line)) return [inline(element("h4"), line.replace(/^#+ /, "")), at + 1];
  if (rule.test(line)) return [element("hr"), at + 1];
  if (depth < depthMost && line.startsWith(">")) return quote(lines, at, depth);
  if (depth < depthMost && item.test(line)) return list(lines, at, depth);
  if (line.includes("|") && /^[\s|:-]*-[\s|:-]*$/.test(lines[at + 1] ?? "")) return table(lines, at);
  const body = [line];
  for (at += 1; at < lines.length && lines[at].trim() && !starts.test(lines[at]) && !opening.test(lines[at]); at += 1) body.push(lines[at]);
  return [inline(element("p"), body.join("\n")), at];
}

const closing = (mark) => (line) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");

function fence(lines, at) {
  const [, margin, mark, about] = opening.exec(lines[at]);
  const language = about.trim().slice(0, 20);
  const isClosing = closing(mark);
  const body = [];
  for (at += 1; at < lines.length && !isClosing(lines[at]); at += 1) body.push(unindented(lines[at], margin.length));
  const code = body.join("\n");
  const made = element("div", undefined, "code");
  made.dir = "ltr";
  const shown = element("pre");
  shown.append(element("code", code));
  shown.tabIndex = 0;
  const bar = element("div", undefined, "bar");
  bar.append(element("span", language), button("Copy", (happened) => copy(code, happened.target), "Copy code"));
  made.append(bar, shown);
  return [made, at + 1];
}

const unindented = (line, most) => line.slice(Math.min(most, line.search(/\S|$/)));

export async function copy(text, shown) {
  const label = (shown.dataset.label ??= shown.textContent);
  shown.textContent = (await isCopied(text)) ? "Copied" : "Not allowed";
  setTimeout(() => (shown.textContent = label), 1500);
}

// Over HTTP from another machine a page has no clipboard, but may copy what is selected.
async function isCopied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const field = element("textarea", text, "hidden");
    document.body.append(field);
    field.focus({ preventScroll: true });
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    focused?.focus({ preventScroll: true });
    return isDone;
  }
}

function quote(lines, at, depth) {
  const body = [];
  for (; at < lines.length && lines[at].startsWith(">"); at += 1) body.push(lines[at].replace(/^> ?/, ""));
  const made = element("blockquote");
  made.append(...render(body.join("\n"), depth + 1));
  return [made, at];
}

function list(lines, at, depth) {
  const [, margin, mark] = item.exec(lines[at]);
  const made = element(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) made.start = Number.parseInt(mark, 10);
  while (at < lines.length) {
    const found = item.exec(lines[at]);
    if (!found || found[1].length !== margin.length) break;
    const first = lines.slice(at + 1).find((line) => line.trim()) ?? "";
    const inset = Math.min(margin.length + found[2].length + 1, first.search(/\S|$/));
    const inner = [];
    let isClosing; // of the code that is open
    for (at += 1; at < lines.length && /^\s*$|^\s{2,}/.test(lines[at]) && (isClosing || !isNext(lines, at, margin)); at += 1) {
      const line = unindented(lines[at], inset);
      inner.push(line);
      if (isClosing) isClosing = isClosing(line) ? undefined : isClosing;
      else if (opening.test(line)) isClosing = closing(opening.exec(line)[2]);
    }
    const entry = inline(element("li"), found[3]);
    entry.append(...render(inner.join("\n"), depth + 1));
    made.append(entry);
  }
  return [made, at];
}

// Whether a line is another item of the same list, or a blank line that ends it.
function isNext(lines, at, margin) {
  if (!lines[at].trim()) return !/^\s{2,}\S/.test(lines[at + 1] ?? "");
  const found = item.exec(lines[at]);
  return found !== null && found[1].length <= margin.length;
}

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
  const made = element("table");
  const head = element("tr");
  head.append(...cells(lines[at]).map((text) => inline(element("th"), text.trim())));
  made.append(head);
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) {
    const line = element("tr");
    line.append(...cells(lines[at]).map((text) => inline(element("td"), text.trim())));
    made.append(line);
  }
  const box = element("div", undefined, "scroll");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table");
  box.append(made);
  return [box, at];
}

// A line whose only markup is code, as parts of it are names that others chose.
export function withCode(text) {
  const shown = text.split(/(`[^`\n]+`)/);
  return shown.map((part) => (part.startsWith("`") && part.length > 2 ? element("code", part.slice(1, -1)) : part));
}

const parts = /(`[^`\n]+`|\*\*[^*\n]+\*\*|(?<![\w*])\*[^*\s][^*\n]*\*(?!\w)|\[[^\][\n]{1,300}\]\([^()\s]+\))/;

function inline(parent, text) {
  for (const part of text.split(parts)) {
    if (part.length > 2 && part.startsWith("`")) parent.append(element("code", part.slice(1, -1)));
    else if (part.length > 4 && part.startsWith("**")) parent.append(element("strong", part.slice(2, -2)));
    else if (part.length > 2 && part.startsWith("*") && part.endsWith("*")) parent.append(element("em", part.slice(1, -1)));
    else parent.append(link(part) ?? part);
  }
  return parent;
}

// A link shows where it leads: its text may say something else.
function link(part) {
  const found = /^\[([^\]]+)\]\((https?:\/\/[^()\s]+)\)$/.exec(part);
  if (!found) return null;
  const [, text, target] = found;
  const made = element("a", text === target ? target : `${text} (${target})`);
  made.href = target;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  return made;
}
