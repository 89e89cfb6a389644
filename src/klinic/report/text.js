"use strict";
// Shared by the scripts of the page. All quoted text is untrusted: it becomes text, never markup.

const element = (name, className, text) => {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};

const button = (className, text, onClick) => {
  const node = element("button", className, text);
  node.type = "button";
  node.addEventListener("click", onClick);
  return node;
};

// escapes control and invisible characters; runs of combining marks are counted
const escapeCharacter = (c) => {
  const point = c.codePointAt(0);
  const [sign, width] = point < 0x100 ? ["x", 2] : point < 0x10000 ? ["u", 4] : ["U", 8];
  return `\\${sign}${point.toString(16).padStart(width, "0")}`;
};
const visible = (text) => text
  .replace(/(\p{M}{4})(\p{M}+)/gu, (_, first, rest) => `${first}\u2026${[...rest].length} marks`)
  .replace(/\n/g, "\u21b5\n")
  .replace(/(?!\n)[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\u2028\u2029]/gu, escapeCharacter);

const ROUNDING = 1e-12; // smaller values are the rounding of sums whose terms cancel
const short = (value) => {
  if (value === null || value === undefined) return "-";
  return Math.abs(value) < ROUNDING ? "0" : fourDigits(value);
};
const fourDigits = (value) => {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
};

const unpack = async (packed) => {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
};

const colours = new Map(); // of the current theme
const cssColour = (name) => {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(name);
};
const redraws = [];
const redrawAll = () => {
  colours.clear();
  redraws.forEach((redraw) => redraw());
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
// paper is white: the canvases are drawn in the colours of print before it, and again after it
matchMedia("print").addEventListener("change", redrawAll);
addEventListener("beforeprint", redrawAll);
addEventListener("afterprint", redrawAll);
