// The graph as SVG: made anew whenever something is folded, moved by one transform when it is panned and zoomed.

const SVG = "http://www.w3.org/2000/svg";
const svg = document.getElementById("picture");
const VIEW = { x: 0, y: 0, scale: 1 };
let DRAWN = { world: null, boxes: new Map(), arrows: [] };

function draw(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const ruler = document.createElement("canvas").getContext("2d");
const widths = new Map();
function widthOf(text, font) {
  const key = font + text;
  if (!widths.has(key)) { ruler.font = font; widths.set(key, ruler.measureText(text).width); }
  return widths.get(key);
}
const FONT = 'system-ui, "Segoe UI", Helvetica, Arial, sans-serif';
const cut = (text, most) => (text.length > most ? text.slice(0, most - 1) + "\u2026" : text);

// What is written on a thing: its name, then small print.
function wordsOf(item) {
  const times = item.times > 1 ? ` (x${item.times})` : "";
  if (!item.isGlyph) {
    const count = item.layers.length;
    return [cut(nameOf(item), 44) + times, cut(item.kind, 40), `${count} layer${count === 1 ? "" : "s"}`];
  }
  const module = item.module ? "@" + item.module : "";
  return [cut(item.name, 44) + times, cut(item.shape, 40), cut(module, 44), cut(item.note, 44)].filter(Boolean);
}

function sizeOf(key) {
  const [name, ...small] = wordsOf(itemOf(key));
  const width = Math.max(widthOf(name, "600 12px " + FONT), ...small.map((text) => widthOf(text, "10px " + FONT)));
  return [Math.max(48, Math.ceil(width) + 20 + (itemOf(key).isGlyph ? 0 : 18)), 22 + 12 * small.length];
}

const WORLD = {
  rows: (key) => DATA.rows[key] || [[], []],
  isShown,
  isOpen: (key) => STATE.open.has(key),
  size: sizeOf,
  titleWidth: (key) => widthOf(titleOf(itemOf(key)), "600 12px " + FONT) + 24,
};
const titleOf = (frame) => `${cut(nameOf(frame), 44)}${frame.times > 1 ? ` (x${frame.times})` : ""}  ${cut(frame.kind, 40)}`;

// Where everything that is seen lies in the picture: boxes by key, and for each frame where its content begins.
function placed() {
  const boxes = new Map(), frames = new Map();
  const visit = (key, found, x, y) => {
    frames.set(key, { ...found, x, y });
    for (const [item, place] of found.places) {
      if (isWay(item)) continue;
      const box = { x: x + place.x, y: y + place.y, w: place.w, h: place.h, row: place.row, order: place.order, bottom: y + place.bottom, isOpen: Boolean(place.inner) };
      boxes.set(item, box);
      if (place.inner) visit(item, place.inner, box.x, box.y);
    }
  };
  const whole = layout("root", WORLD);
  visit("root", whole, 0, 0);
  return { boxes, frames, w: whole.w, h: whole.h };
}

// The way of a line: out of the frames around its tail, past what lies between, into the frames around its head.
function pointsOf(arrow, { boxes, frames }) {
  const from = boxes.get(arrow.from), to = boxes.get(arrow.to);
  if (!from || !to) return [];
  const up = stackOf(arrow.from), down = stackOf(arrow.to);
  let shared = 0;
  while (up[shared] === down[shared]) shared++;
  if (to.y < from.y + from.h) { // back, around what stands in between
    const between = [...boxes.values()].filter((box) => !box.isOpen && box.y < from.y + from.h && box.y + box.h > to.y);
    const side = Math.max(...between.map((box) => box.x + box.w)) + 14;
    return [[from.x + from.w / 2, from.y + from.h], [side, from.y + from.h], [side, to.y], [to.x + to.w / 2, to.y]];
  }
  const points = [[from.x + from.w / 2, from.y + from.h]];
  const pass = (frame, way, first, last) => {
    const inside = frames.get(frame);
    const places = inside.places.get(way);
    for (let row = first; places && row <= last; row++) {
      const place = places.get(row);
      if (place) points.push([inside.x + place.x + place.w / 2, inside.y + place.y], [inside.x + place.x + place.w / 2, inside.y + place.bottom]);
    }
  };
  const toRowEnd = (key) => { // straight to the end of its row: what stands beside it may be taller
    const { bottom } = boxes.get(key), [x, y] = points[points.length - 1];
    if (bottom > y) points.push([x, bottom]);
  };
  const around = (stack, n) => (n ? stack[n - 1] : "root");
  for (let n = up.length - 1; n > shared; n--) {
    toRowEnd(up[n]);
    pass(around(up, n), "~" + up[n], boxes.get(up[n]).row + 1, frames.get(around(up, n)).last);
  }
  toRowEnd(up[shared]);
  const [one, other] = [boxes.get(up[shared]), boxes.get(down[shared])];
  if (one.row < other.row) pass(around(up, shared), "~" + up[shared], one.row + 1, other.row - 1);
  for (let n = shared + 1; n < down.length; n++) pass(around(down, n), "^" + arrow.tail, 0, boxes.get(down[n]).row - 1);
  points.push([to.x + to.w / 2, to.y]);
  return points;
}

function pathOf(points) {
  let path = `M${points[0].map(Math.round)}`;
  if (points.at(-1)[1] < points[0][1]) {
    const [[a, b], [side], , [c, d]] = points.map((point) => point.map(Math.round));
    return `${path}C${a},${b + 26} ${side},${b + 26} ${side},${b - 8}L${side},${d + 8}C${side},${d - 26} ${c},${d - 26} ${c},${d}`;
  }
  for (let n = 1; n < points.length; n++) {
    const [[a, b], [c, d]] = [points[n - 1], points[n]];
    const bend = d > b ? (d - b) / 2 : 40;
    path += Math.abs(a - c) < 0.5 && d >= b ? `L${Math.round(c)},${Math.round(d)}` : `C${Math.round(a)},${Math.round(b + bend)} ${Math.round(c)},${Math.round(d - bend)} ${Math.round(c)},${Math.round(d)}`;
  }
  return path;
}

// The colour of a number, as a mixture of the page's own colours, so that it goes with light and dark.
function colourOf(value) {
  if (!DATA.overlay || value === undefined) return null;
  if (typeof value !== "number") return `var(${value === "-inf" ? "--cold" : "--hot"})`; // not finite: as far as can be
  const [low, high] = DATA.overlay.span;
  const size = low < 0 ? Math.max(-low, high) : high;
  const share = size ? Math.min(1, Math.abs(value) / size) : 0;
  return `color-mix(in oklab, var(${value < 0 ? "--cold" : "--hot"}) ${Math.round(80 * share)}%, var(--glyph))`;
}

function thing(item, box) {
  const roles = (item.roles || []).map((role) => "role-" + role).join(" ");
  const isRound = item.isGlyph && !item.roles.includes("module") && !item.roles.includes("collapsed");
  const kind = item.isGlyph ? "glyph" : box.isOpen ? "frame" : "glyph folded";
  const made = draw("g", { class: `thing ${kind} ${roles}`, "data-key": item.key, tabindex: -1, role: "button", "aria-label": spoken(item) });
  const shape = draw("rect", { class: "box", x: box.x, y: box.y, width: box.w, height: box.h, rx: box.isOpen ? 6 : isRound ? Math.min(18, box.h / 2) : 3 });
  const colour = box.isOpen ? null : colourOf(item.value);
  if (colour) { shape.style.fill = colour; made.classList.add("valued"); }
  made.append(shape);
  const middle = box.x + box.w / 2 + (item.isGlyph ? 0 : 9);
  if (box.isOpen) made.append(draw("text", { x: box.x + 26, y: box.y + 17, class: "bold" }, titleOf(item)));
  else {
    if (!item.isGlyph) made.insertBefore(draw("rect", { class: "box", x: box.x + 3, y: box.y + 3, width: box.w, height: box.h, rx: 3 }), shape);
    wordsOf(item).forEach((text, n) => made.append(draw("text", { x: middle, y: box.y + 15 + 12 * n, "text-anchor": "middle", class: n ? "small" : "bold" }, text)));
  }
  if (!item.isGlyph) {
    const [x, y] = [box.x + 8, box.y + 6];
    const sign = draw("g", { class: "twist-sign", "data-twist": item.key }, draw("rect", { class: "twister", x, y, width: 13, height: 13, rx: 2 }),
      draw("path", { d: `M${x + 3},${y + 6.5}h7` + (box.isOpen ? "" : "m-3.5,-3.5v7"), stroke: "var(--ink)", fill: "none" }));
    sign.append(draw("title", {}, box.isOpen ? "Fold" : "Unfold"));
    made.append(sign);
  }
  return made;
}

const spoken = (item) => (item.isGlyph
  ? [item.name, item.kind, item.shape, item.module && "module " + item.module].filter(Boolean).join(", ")
  : `module ${item.name}, ${item.kind}, ${item.layers.length} layers, ${STATE.open.has(item.key) ? "unfolded" : "folded"}`);

function drawAll() {
  const world = placed();
  const frames = draw("g", { class: "frames" }), lines = draw("g", { class: "lines" }), glyphs = draw("g", { class: "glyphs" }), texts = draw("g", { class: "texts" });
  for (const [key, box] of world.boxes) (box.isOpen ? frames : glyphs).append(thing(itemOf(key), box));
  const arrows = seenArrows();
  for (const arrow of arrows) {
    arrow.points = pointsOf(arrow, world);
    if (!arrow.points.length) continue;
    const roles = arrow.roles.map((role) => "role-" + role).join(" ");
    arrow.line = draw("path", { class: `arrow ${roles}`, d: pathOf(arrow.points), "marker-end": "url(#tip)", "data-from": arrow.from, "data-to": arrow.to });
    lines.append(arrow.line);
    if (arrow.roles.includes("if")) texts.append(draw("text", { class: "word bold", x: arrow.points.at(-1)[0] + 5, y: arrow.points.at(-1)[1] - 7 }, "IF"));
  }
  const tip = (id) => draw("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto" }, draw("path", { d: "M0,0L8,4L0,8z" }));
  const near = draw("g", { class: "near-words" });
  const all = draw("g", { id: "all" }, frames, lines, glyphs, texts, near);
  svg.replaceChildren(draw("defs", {}, tip("tip"), tip("tip-near")), all);
  DRAWN = { world, arrows, near, all };
  mark();
  moveView();
}

// What was chosen, what was found, and the lines of what was chosen.
function mark() {
  const seen = STATE.chosen && seenAs(STATE.chosen);
  const found = STATE.found && new Set([...STATE.found].map(seenAs));
  let first = null;
  for (const one of svg.querySelectorAll(".thing")) {
    const key = one.dataset.key;
    one.classList.toggle("chosen", key === seen);
    one.classList.toggle("found", Boolean(found && found.has(key)));
    one.classList.toggle("faded", Boolean(found && found.size && !found.has(key) && !one.classList.contains("frame")));
    one.setAttribute("tabindex", key === seen ? 0 : -1);
    first = first || one;
  }
  if (!seen && first) first.setAttribute("tabindex", 0);
  DRAWN.near.replaceChildren();
  for (const arrow of DRAWN.arrows) {
    if (!arrow.line) continue;
    const near = seen && (arrow.from === seen || arrow.to === seen);
    arrow.line.classList.toggle("near", Boolean(near));
    arrow.line.setAttribute("marker-end", near ? "url(#tip-near)" : "url(#tip)");
    if (!near) continue;
    arrow.line.parentNode.append(arrow.line);
    const text = arrow.words.join("; ");
    const [[a, b], [c, d]] = arrow.points.slice(-2); // in the middle of the last stretch: at the head all of them meet
    if (text) DRAWN.near.append(draw("text", { class: "word", x: (a + c) / 2 + 4, y: (b + d) / 2 + 4 }, cut(text, 40)));
  }
}

function moveView() {
  if (DRAWN.all) DRAWN.all.setAttribute("transform", `translate(${VIEW.x},${VIEW.y}) scale(${VIEW.scale})`);
}

function zoom(factor, x = svg.clientWidth / 2, y = svg.clientHeight / 2) {
  const scale = Math.min(4, Math.max(0.02, VIEW.scale * factor));
  VIEW.x = x - ((x - VIEW.x) * scale) / VIEW.scale;
  VIEW.y = y - ((y - VIEW.y) * scale) / VIEW.scale;
  VIEW.scale = scale;
  moveView();
}

// Everything, or where it begins, if all of it were smaller than `least`.
function fit(least = 0.02) {
  const { w, h, boxes } = DRAWN.world, [width, height] = [svg.clientWidth, svg.clientHeight];
  VIEW.scale = Math.max(least, Math.min(1.2, width / w, height / h));
  const first = [...boxes].find(([key]) => itemOf(key).isGlyph);
  const middle = w * VIEW.scale > width && first ? first[1].x + first[1].w / 2 : w / 2;
  VIEW.x = width / 2 - middle * VIEW.scale;
  VIEW.y = Math.max(0, Math.min(20, (height - h * VIEW.scale) / 2));
  moveView();
}

// Bring something into sight, where it is not.
function show(key) {
  const box = DRAWN.world.boxes.get(seenAs(key));
  if (!box) return;
  if (VIEW.scale < 0.5) VIEW.scale = 0.9;
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  const top = box.isOpen ? box.y + 12 : box.y + box.h / 2;
  const [x, y] = [VIEW.x + (box.x + box.w / 2) * VIEW.scale, VIEW.y + top * VIEW.scale];
  if (x < 60 || x > width - 60) VIEW.x += width / 2 - x;
  if (y < 40 || y > height - 40) VIEW.y += height / 2 - y;
  moveView();
}

// Draw again, and keep one thing where it is under the user's eyes.
function redraw(anchor) {
  const at = (key) => DRAWN.world && key && DRAWN.world.boxes.get(seenAs(key));
  const before = at(anchor);
  drawAll();
  const after = at(anchor);
  if (!before || !after) return;
  VIEW.x += (before.x + before.w / 2 - after.x - after.w / 2) * VIEW.scale;
  VIEW.y += (before.y - after.y) * VIEW.scale;
  moveView();
}
