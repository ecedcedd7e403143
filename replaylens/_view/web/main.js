// What a person does: choose, fold, search, move.

const tree = document.getElementById("tree");
const search = document.getElementById("search");
const results = document.getElementById("results");
const byId = (id) => document.getElementById(id);

// -- choosing and folding ---------------------------------------------------------------------------------------------

function choose(key, { label = null, focus = false } = {}) {
  const item = key && itemOf(key);
  STATE.chosen = key;
  STATE.label = item && item.isGlyph ? label || item.layers[0] : null;
  if (key && reveal(key)) { byId("buffers").checked = STATE.buffers; redraw(); } else mark();
  if (key) show(key);
  showCard();
  showTree();
  if (focus) focusOn(key);
  try { history.replaceState(null, "", key ? "#" + encodeURIComponent(STATE.label || nameOf(item)) : "#"); } catch { /* a page in a frame may not */ }
}

function focusOn(key) {
  const one = key && svg.querySelector(`[data-key="${seenAs(key)}"]`);
  if (one) one.focus({ preventScroll: true });
}

function toggle(key, isOpen = !STATE.open.has(key)) {
  if (isOpen) STATE.open.add(key); else STATE.open.delete(key);
  const held = document.activeElement;
  const inside = held && (svg.contains(held) ? "svg" : tree.contains(held) ? "tree" : held.id === "card-toggle" ? "card" : "");
  redraw(key);
  showTree(inside === "tree" ? key : null);
  showCard();
  if (inside === "svg") focusOn(STATE.chosen || key);
  if (inside === "card") byId("card-toggle").focus();
}

function toggleAll(isOpen) {
  for (const item of ITEMS.values()) if (!item.isGlyph) { if (isOpen) STATE.open.add(item.key); else STATE.open.delete(item.key); }
  redraw();
  showTree();
  showCard();
  if (STATE.chosen) show(STATE.chosen); else fit(isOpen ? 0.25 : 0.5);
}

// -- the list of modules ----------------------------------------------------------------------------------------------

function showTree(focused = null) {
  const held = focused || (tree.contains(document.activeElement) ? document.activeElement.dataset.key : null);
  const most = 400; // of one module: more are found by searching
  const rowsOf = (items, level) => {
    const shown = items.filter((item) => isShown(item.key));
    const rows = shown.slice(0, most).map((item) => row(item, level));
    if (shown.length > most) rows.push(el("li", { role: "none" }, el("small", {}, `and ${shown.length - most} more: search for them`)));
    return rows;
  };
  const row = (item, level) => {
    const isOpen = STATE.open.has(item.key);
    const made = el("li", { role: "treeitem", "aria-level": level, "aria-selected": item.key === STATE.chosen, "data-key": item.key, tabindex: -1 });
    const dot = el("span", { class: "dot" });
    if (item.isGlyph) dot.style.background = colourOf(item.value) || colourOfRole(item);
    made.append(el("div", { class: "row" }, el("span", { class: "twist", "aria-hidden": "true" }, item.isGlyph ? "" : isOpen ? "\u25be" : "\u25b8"), item.isGlyph ? dot : "",
      el("span", {}, within(nameOf(item), item)), el("small", {}, item.isGlyph ? item.module && within("@" + item.module, item) : item.kind)));
    if (!item.isGlyph) {
      made.setAttribute("aria-expanded", isOpen);
      if (isOpen) made.append(el("ul", { role: "group", class: "inside" }, ...rowsOf(item.inside, level + 1)));
    }
    return made;
  };
  const scrolled = tree.parentNode.scrollTop;
  tree.replaceChildren(...rowsOf(ROOT.inside, 1));
  tree.parentNode.scrollTop = scrolled;
  const current = tree.querySelector(`[data-key="${held || STATE.chosen}"]`) || tree.querySelector('[role="treeitem"]');
  if (current) current.tabIndex = 0;
  if (held && current) current.focus({ preventScroll: true });
  const chosen = tree.querySelector('[aria-selected="true"] > .row');
  if (chosen) scrollTo(tree.parentNode, chosen);
}

// Scroll one panel, and not the page around it, until something in it is seen.
function scrollTo(panel, one) {
  const outer = panel.getBoundingClientRect(), inner = one.getBoundingClientRect();
  if (inner.top < outer.top) panel.scrollTop -= outer.top - inner.top;
  else if (inner.bottom > outer.bottom) panel.scrollTop += inner.bottom - outer.bottom;
}

// A module's address as it is called in the module around it: `@attn` in `@h.0`.
function within(name, item) {
  const around = item.frame === "root" ? "" : "@" + itemOf(item.frame).name.replace(/:\d+$/, "") + ".";
  return around && name.startsWith(around) ? "@" + name.slice(around.length) : name;
}

function colourOfRole(item) {
  const role = ["edited", "added", "removed", "changed", "boolean", "input", "output", "buffer", "rerun", "parameters"].find((one) => item.roles.includes(one));
  return role ? `var(--${role})` : "var(--glyph)";
}

tree.addEventListener("click", (event) => {
  const row = event.target.closest('[role="treeitem"]');
  if (!row) return;
  if (event.target.closest(".twist") && !itemOf(row.dataset.key).isGlyph) return toggle(row.dataset.key);
  choose(row.dataset.key);
});
tree.addEventListener("dblclick", (event) => {
  const row = event.target.closest('[role="treeitem"]');
  if (row && !event.target.closest(".twist") && !itemOf(row.dataset.key).isGlyph) toggle(row.dataset.key);
});
tree.addEventListener("keydown", (event) => {
  const row = event.target.closest('[role="treeitem"]');
  if (!row || event.altKey || event.ctrlKey || event.metaKey) return;
  const all = [...tree.querySelectorAll('[role="treeitem"]')], at = all.indexOf(row), item = itemOf(row.dataset.key);
  const go = (other) => { if (other) { row.tabIndex = -1; other.tabIndex = 0; other.focus(); } };
  const isFolded = !item.isGlyph && !STATE.open.has(item.key);
  const act = {
    ArrowDown: () => go(all[at + 1]), ArrowUp: () => go(all[at - 1]), Home: () => go(all[0]), End: () => go(all.at(-1)),
    ArrowRight: () => { if (isFolded) toggle(item.key, true); else if (!item.isGlyph) go(all[at + 1]); },
    ArrowLeft: () => { if (!item.isGlyph && !isFolded) toggle(item.key, false); else go(row.parentNode.closest('[role="treeitem"]')); },
    Enter: () => choose(item.key), " ": () => choose(item.key),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});

// -- searching --------------------------------------------------------------------------------------------------------

const ENTRIES = [...ITEMS.values()].map((item) => {
  const names = item.isGlyph ? [item.name, ...(item.times > 1 ? item.layers : [])] : [item.name, nameOf(item)];
  const around = stackOf(item.key).slice(0, -1).map((key) => itemOf(key).name);
  const more = [item.kind, item.module || "", item.note || "", around.at(-1) || ""];
  return { item, name: names[0].toLowerCase(), kind: item.kind.toLowerCase(), text: [...names, ...more].join(" ").toLowerCase() };
});

function findAll(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return [];
  const score = ({ name, kind, item }) => {
    const [first] = wanted;
    if (name === first || item.module === first) return 0;
    return name.startsWith(first) ? 1 : kind === first ? 2 : name.includes(first) ? 3 : 4;
  };
  return ENTRIES.filter(({ text }) => wanted.every((word) => text.includes(word)))
    .map((entry, n) => [score(entry), n, entry.item]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , item]) => item);
}

let shownResults = [], current = -1;
function showResults() {
  const most = 60, found = findAll(search.value);
  shownResults = found.slice(0, most);
  current = found.length ? 0 : -1;
  STATE.found = found.length ? new Set(found.map((item) => item.key)) : null;
  mark();
  results.replaceChildren(...shownResults.map((item, n) => el("li", { role: "option", id: "result-" + n, class: "choice", "aria-selected": n === current, "data-key": item.key },
    el("span", {}, nameOf(item)), el("small", {}, [item.kind, item.module && "@" + item.module, item.shape].filter(Boolean).join("  ")))));
  if (found.length > most) results.append(el("li", {}, el("small", {}, `and ${found.length - most} more`)));
  if (!found.length && search.value.trim()) results.append(el("li", {}, el("small", {}, "Nothing has this name.")));
  setResults(Boolean(search.value.trim()));
}

function setResults(isOpen) {
  results.hidden = !isOpen;
  search.setAttribute("aria-expanded", isOpen);
  if (isOpen && current >= 0) search.setAttribute("aria-activedescendant", "result-" + current);
  else search.removeAttribute("aria-activedescendant");
}

function pick(n) {
  const item = shownResults[n];
  if (!item) return;
  setResults(false);
  STATE.found = null;
  choose(item.key, { focus: true });
}

search.addEventListener("input", showResults);
search.addEventListener("focus", () => { if (search.value.trim()) showResults(); });
search.addEventListener("blur", () => setTimeout(() => setResults(false), 150));
search.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    if (!shownResults.length) return;
    current = (current + (event.key === "ArrowDown" ? 1 : -1) + shownResults.length) % shownResults.length;
    [...results.querySelectorAll(".choice")].forEach((one, n) => { one.setAttribute("aria-selected", n === current); if (n === current) scrollTo(results, one); });
    setResults(true);
  } else if (event.key === "Enter") { event.preventDefault(); pick(current); }
  else if (event.key === "Escape") { search.value = ""; STATE.found = null; setResults(false); mark(); }
});
results.addEventListener("mousedown", (event) => {
  const one = event.target.closest(".choice");
  if (one) { event.preventDefault(); pick([...results.querySelectorAll(".choice")].indexOf(one)); }
});

// -- moving -----------------------------------------------------------------------------------------------------------

const pointers = new Map();
let dragged = false;
svg.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  pointers.set(event.pointerId, [event.clientX, event.clientY]);
  dragged = false;
});
svg.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (!before) return;
  const now = [event.clientX, event.clientY];
  if (pointers.size === 2) {
    const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    const apart = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]);
    const frame = svg.getBoundingClientRect();
    zoom(apart(now) / Math.max(1, apart(before)), (now[0] + other[0]) / 2 - frame.left, (now[1] + other[1]) / 2 - frame.top);
  } else if (dragged || Math.hypot(now[0] - before[0], now[1] - before[1]) > 3) {
    if (!dragged) { dragged = true; svg.setPointerCapture(event.pointerId); svg.classList.add("dragging"); }
    VIEW.x += now[0] - before[0];
    VIEW.y += now[1] - before[1];
    moveView();
  } else return;
  pointers.set(event.pointerId, now);
});
for (const name of ["pointerup", "pointercancel"]) svg.addEventListener(name, (event) => {
  pointers.delete(event.pointerId);
  svg.classList.remove("dragging");
});
svg.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (event.shiftKey) { VIEW.x -= event.deltaY || event.deltaX; return moveView(); }
  const frame = svg.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - frame.left, event.clientY - frame.top);
}, { passive: false });
svg.addEventListener("click", (event) => {
  if (dragged) { dragged = false; return; }
  const twist = event.target.closest("[data-twist]"), one = event.target.closest(".thing");
  if (twist) return toggle(twist.dataset.twist);
  if (one) choose(one.dataset.key, { focus: true }); else choose(null);
});
svg.addEventListener("dblclick", (event) => {
  const one = event.target.closest(".thing");
  if (one && !event.target.closest("[data-twist]") && !itemOf(one.dataset.key).isGlyph) toggle(one.dataset.key);
});

// From one thing to another by the arrow keys: along the data, or to what stands beside it.
function step(key, direction) {
  const { boxes, arrows } = DRAWN.world ? { boxes: DRAWN.world.boxes, arrows: DRAWN.arrows } : {};
  const box = boxes.get(key);
  const middle = (one) => one.x + one.w / 2;
  const nearest = (keys) => keys.sort((a, b) => Math.abs(middle(boxes.get(a)) - middle(box)) - Math.abs(middle(boxes.get(b)) - middle(box)))[0];
  if (direction === "ArrowUp") return nearest(arrows.filter((arrow) => arrow.to === key).map((arrow) => arrow.from));
  if (direction === "ArrowDown") {
    if (box.isOpen) return itemOf(key).inside.map((item) => item.key).find((inner) => boxes.has(inner));
    return nearest(arrows.filter((arrow) => arrow.from === key).map((arrow) => arrow.to));
  }
  const sign = direction === "ArrowRight" ? 1 : -1;
  const beside = itemOf(itemOf(key).frame).inside.map((item) => item.key)
    .filter((other) => boxes.has(other) && sign * (middle(boxes.get(other)) - middle(box)) > 1 && Math.abs(boxes.get(other).row - box.row) < 1);
  return nearest(beside);
}

svg.addEventListener("keydown", (event) => {
  const one = event.target.closest(".thing");
  if (!one || event.altKey || event.ctrlKey || event.metaKey) return;
  const key = one.dataset.key;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    if (STATE.chosen === key && !itemOf(key).isGlyph) toggle(key); else choose(key, { focus: true });
  } else if (event.key.startsWith("Arrow")) {
    event.preventDefault();
    const next = step(key, event.key);
    if (next) choose(next, { focus: true });
  }
});
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input") || event.altKey || event.ctrlKey || event.metaKey) return;
  const act = {
    "/": () => search.focus(), "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), 0: () => fit(),
    Escape: () => choose(null),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});

// -- around the picture -----------------------------------------------------------------------------------------------

const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("replaylens-theme", theme); } catch { /* a page from a file may have no storage */ }
}
try { const kept = localStorage.getItem("replaylens-theme"); if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept; } catch { /* as above */ }

byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
byId("unfold").addEventListener("click", () => toggleAll(true));
byId("fold").addEventListener("click", () => toggleAll(false));
byId("closer").addEventListener("click", () => zoom(1.25));
byId("farther").addEventListener("click", () => zoom(0.8));
byId("fit").addEventListener("click", () => fit());
byId("buffers").checked = STATE.buffers;
byId("buffers-label").hidden = !BUFFERS.length;
byId("buffers").addEventListener("change", (event) => { STATE.buffers = event.target.checked; redraw(STATE.chosen); showTree(); });

function showLegend() {
  const legend = byId("legend"), over = DATA.overlay;
  if (over) {
    const [low, high] = over.span, isSigned = low < 0, size = isSigned ? Math.max(-low, high) : high;
    legend.append(el("div", {}, over.legend), el("div", { class: "scale " + (isSigned ? "signed" : "plain") }), el("div", { class: "ends" }, el("small", {}, number(isSigned ? -size : 0)), el("small", {}, number(size))));
  }
  const roles = new Set([...ITEMS.values()].flatMap((item) => item.roles || []));
  const keys = ["input", "output", "parameters", "buffer", "boolean", "edited", "rerun", "added", "removed", "changed"].filter((role) => roles.has(role));
  const words = { parameters: "has parameters", boolean: "condition", rerun: "ran again", added: "only here", removed: "only in the other", changed: "another operation or shape" };
  legend.append(el("div", { class: "keys" }, ...keys.map((role) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = `var(--${role})`;
    return el("span", {}, swatch, words[role] || role);
  })));
}

function bytes(size) {
  const units = ["B", "KB", "MB", "GB"];
  let n = 0;
  for (; size >= 1024 && n < 3; n++) size /= 1024;
  return `${n ? size.toFixed(1) : size} ${units[n]}`;
}

function begin() {
  const [tensors, tensorBytes, parameters, parameterBytes] = DATA.totals;
  byId("title").textContent = (DATA.module ? `${DATA.module} of ` : "") + (DATA.model || "program");
  byId("totals").textContent = `${whole(tensors)} tensors (${bytes(tensorBytes)}), ` + (parameters ? `${whole(parameters)} parameters (${bytes(parameterBytes)})` : "no parameters");
  showLegend();
  drawAll();
  fit(0.75);
  showTree();
  showCard();
  let wanted = "";
  try { wanted = decodeURIComponent(location.hash.slice(1)); } catch { /* no name */ }
  const key = KEY_OF_LABEL.get(wanted) || FRAMES_BY_NAME.get(wanted.replace(/^@/, ""));
  if (key) choose(key, { label: itemOf(key).layers.includes(wanted) ? wanted : null });
  document.documentElement.dataset.ready = "yes";
}
begin();
