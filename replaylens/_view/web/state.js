// What the page knows, and what of it is shown now.

const DATA = JSON.parse(document.getElementById("data").textContent);
const ITEMS = new Map();
DATA.glyphs.forEach((glyph, n) => ITEMS.set("g" + n, { key: "g" + n, first: n, inside: [], isGlyph: true, ...glyph }));
DATA.frames.forEach((frame, n) => ITEMS.set("f" + n, { key: "f" + n, first: Infinity, inside: [], isGlyph: false, layers: [], ...frame }));
const ROOT = { key: "root", inside: [] };
const itemOf = (key) => (key === "root" ? ROOT : ITEMS.get(key));

const distance = (value) => (value === undefined ? -1 : typeof value === "number" ? Math.abs(value) : Infinity);

const KEY_OF_LABEL = new Map();
for (const item of ITEMS.values()) {
  itemOf(item.frame).inside.push(item);
  if (!item.isGlyph) continue;
  for (const label of [...item.layers, ...(item.times > 1 ? [item.name] : [])]) if (!KEY_OF_LABEL.has(label)) KEY_OF_LABEL.set(label, item.key);
  for (let frame = item.frame; frame !== "root"; frame = itemOf(frame).frame) {
    const around = itemOf(frame);
    around.first = Math.min(around.first, item.first);
    around.layers.push(...item.layers);
    if (item.value !== undefined && !(distance(around.value) > distance(item.value))) around.value = item.value;
  }
}
for (const item of [ROOT, ...ITEMS.values()]) item.inside.sort((a, b) => a.first - b.first);

// What a thing is called: a module by its address, `@layer1.0`; what was drawn around layers that repeat is no module.
const nameOf = (item) => (item.isGlyph || item.roles.includes("repeat") ? item.name || item.kind : "@" + item.name);

const FRAMES_BY_NAME = new Map();
for (const item of ITEMS.values())
  for (const name of item.isGlyph ? [] : [item.name, ...item.calls]) if (!FRAMES_BY_NAME.has(name)) FRAMES_BY_NAME.set(name, item.key);

const GLYPHS_BY_MODULE = new Map([...ITEMS.values()].filter((item) => item.module).map((item) => [item.module, item.key]));

const isBuffer = (item) => item.isGlyph && item.roles.some((role) => role === "buffer" || role === "constant");
const STATE = { open: new Set(), chosen: null, label: null, buffers: true, found: null };
const BUFFERS = [...ITEMS.values()].filter(isBuffer);
STATE.buffers = BUFFERS.length <= 12;

// Modules are opened from the outside in, while what is to be seen stays a picture and no map.
(function openFirst() {
  const most = 90;
  let count = ROOT.inside.length;
  const queue = ROOT.inside.filter((item) => !item.isGlyph);
  while (queue.length) {
    const frame = queue.shift();
    const inside = frame.inside.filter((item) => STATE.buffers || !isBuffer(item));
    if (count + inside.length > most) continue;
    count += inside.length;
    STATE.open.add(frame.key);
    queue.push(...inside.filter((item) => !item.isGlyph));
  }
})();

const isShown = (key) => STATE.buffers || !isBuffer(itemOf(key));

// The frames around something, outermost first, and itself last.
function stackOf(key) {
  const found = [key];
  for (let frame = itemOf(key).frame; frame !== "root"; frame = itemOf(frame).frame) found.unshift(frame);
  return found;
}

// What stands for it in the picture: itself, or the outermost frame around it that is folded.
function seenAs(key) {
  const stack = stackOf(key);
  return stack.find((one) => one === key || !STATE.open.has(one));
}

// Open what is around something, so that it is seen.
function reveal(key) {
  let changed = false;
  if (isBuffer(itemOf(key)) && !STATE.buffers) { STATE.buffers = true; changed = true; }
  for (const frame of stackOf(key).slice(0, -1)) if (!STATE.open.has(frame)) { STATE.open.add(frame); changed = true; }
  return changed;
}

// Each pair of things between which lines are seen, with the first line's own ends, which say where it goes.
function seenArrows() {
  const found = new Map();
  for (const [tail, head, words, roles] of DATA.arrows) {
    if (!isShown(tail) || !isShown(head)) continue;
    const one = seenAs(tail), other = seenAs(head);
    if (one === other) continue;
    const key = one + ">" + other;
    const known = found.get(key);
    if (known) {
      known.count += 1;
      if (words && !known.words.includes(words)) known.words.push(words);
      known.roles = known.roles.filter((role) => role !== "internal" || roles.includes(role));
      for (const role of roles) if (role !== "internal" && !known.roles.includes(role)) known.roles.push(role);
    } else found.set(key, { tail, head, from: one, to: other, count: 1, words: words ? [words] : [], roles: [...roles] });
  }
  return [...found.values()];
}
