// A part of Markdown as DOM nodes: fences, headings, lists, bold and code. Text stays text.
import { element } from "./door.js";

export function render(text) {
  const blocks = [];
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    if (line.startsWith("```")) {
      const body = [];
      for (at += 1; at < lines.length && !lines[at].startsWith("```"); at += 1) body.push(lines[at]);
      at += 1;
      const block = element("pre");
      block.append(element("code", body.join("\n")));
      block.tabIndex = 0;
      blocks.push(block);
    } else if (/^#{1,6} /.test(line)) {
      blocks.push(inline(element("h4"), line.replace(/^#+ /, "")));
      at += 1;
    } else if (/^\s*([-*]|\d+\.) /.test(line)) {
      const list = element(/^\s*\d/.test(line) ? "ol" : "ul");
      for (; at < lines.length && /^\s*([-*]|\d+\.) /.test(lines[at]); at += 1) {
        list.append(inline(element("li"), lines[at].replace(/^\s*([-*]|\d+\.) /, "")));
      }
      blocks.push(list);
    } else if (line.trim()) {
      const body = [];
      for (; at < lines.length && lines[at].trim() && !/^(```|#{1,6} |\s*([-*]|\d+\.) )/.test(lines[at]); at += 1) {
        body.push(lines[at]);
      }
      blocks.push(inline(element("p"), body.join("\n")));
    } else {
      at += 1;
    }
  }
  return blocks;
}

function inline(parent, text) {
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (part.length > 2 && part.startsWith("`")) parent.append(element("code", part.slice(1, -1)));
    else if (part.length > 4 && part.startsWith("**")) parent.append(element("strong", part.slice(2, -2)));
    else parent.append(part);
  }
  return parent;
}
