// The card of what was chosen: a layer, or a module. All that comes from the model is written as text.

const card = document.getElementById("card");

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) made.addEventListener(event, handler);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const number = (value) => (value === null || value === undefined ? "not finite" : typeof value === "number" ? String(+value.toPrecision(5)) : String(value));
const whole = (count) => count.toLocaleString("en");
const section = (title, ...content) => (content.length ? [el("h3", {}, title), ...content] : []);

function link(text, key, label) {
  return el("button", { type: "button", class: "link", on: { click: () => choose(key, { label, focus: true }) } }, text);
}

// Layers by their labels, as links where the picture has them.
function links(labels) {
  const most = 60;
  const shown = labels.slice(0, most).map((label) => (KEY_OF_LABEL.has(label) ? link(label, KEY_OF_LABEL.get(label), label) : el("span", {}, label)));
  return el("div", { class: "links" }, ...shown, labels.length > most ? `and ${labels.length - most} more` : "");
}

// A module's call, `features.6:1`, as a link to its frame, or to the layer that is all of it.
function callsAround(call) {
  const found = [];
  for (let at = call; at >= 0; at = DATA.calls[at][1]) found.push(DATA.calls[at][0]);
  return found.reverse();
}

function moduleLink(call) {
  const bare = call.replace(/:\d+$/, "");
  const key = FRAMES_BY_NAME.get(call) || FRAMES_BY_NAME.get(bare) || GLYPHS_BY_MODULE.get(call) || GLYPHS_BY_MODULE.get(bare);
  const name = call.replace(/:1$/, "");
  return key ? link(name, key) : el("span", {}, name);
}

function table(rows) {
  return el("table", {}, ...rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value))));
}

function histogram(found) {
  const counts = found.histogram || [];
  const top = Math.max(...counts, 1), width = 240 / Math.max(1, counts.length);
  const said = `Histogram of ${found.count} numbers from ${number(found.least)} to ${number(found.greatest)}`;
  const picture = draw("svg", { class: "histogram", viewBox: "0 0 240 62", preserveAspectRatio: "none", role: "img", "aria-label": said });
  counts.forEach((count, n) => {
    const height = count ? Math.max(1, (60 * count) / top) : 0;
    picture.append(draw("rect", { x: n * width + 0.5, y: 61 - height, width: Math.max(0.5, width - 1), height }, draw("title", {}, String(count))));
  });
  return el("div", {}, picture, el("div", { class: "ends" }, el("small", {}, number(found.least)), el("small", {}, number(found.greatest))));
}

function statistics(found, n, many) {
  const rows = [["mean", number(found.mean)], ["std", number(found.std)], ["least", number(found.least)], ["greatest", number(found.greatest)], ["zeros", `${(100 * (found.zeros || 0)).toFixed(1)} %`]];
  if (found.nans) rows.push(["NaN", el("span", { class: "warning" }, String(found.nans))]);
  if (found.infinities) rows.push(["infinite", el("span", { class: "warning" }, String(found.infinities))]);
  return section(many > 1 ? `Value, tensor ${n}: ${whole(found.count)} numbers` : `Value: ${whole(found.count)} numbers`, table(rows), found.histogram && found.histogram.length ? histogram(found) : "");
}

const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function shade(byte, isPattern) {
  if (!isPattern) return [byte, byte, byte];
  const at = (byte / 255) * (VIRIDIS.length - 1), n = Math.min(VIRIDIS.length - 2, Math.floor(at));
  return VIRIDIS[n].map((low, c) => Math.round(low + (VIRIDIS[n + 1][c] - low) * (at - n)));
}

// Small pictures: feature maps in grey, patterns of attention in colours.
function pictures(found) {
  const bytes = Uint8Array.from(atob(found.data), (letter) => letter.charCodeAt(0));
  const size = found.rows * found.columns;
  const figures = found.names.map((name, n) => {
    const canvas = el("canvas", { width: found.columns, height: found.rows, role: "img", "aria-label": `picture ${name}` });
    const context = canvas.getContext("2d"), image = context.createImageData(found.columns, found.rows);
    for (let p = 0; p < size; p++) image.data.set([...shade(bytes[n * size + p], found.is_pattern), 255], 4 * p);
    context.putImageData(image, 0, 0);
    return el("figure", {}, canvas, el("figcaption", {}, name));
  });
  const range = `${found.is_pattern ? "dark" : "black"} ${number(found.low)}, ${found.is_pattern ? "yellow" : "white"} ${number(found.high)}; ${found.rows} x ${found.columns} shown`;
  return section(found.title, el("div", { class: "strip" }, ...figures), el("small", {}, range));
}

// What a sweep or a run found at this layer, as bars.
function findings(label) {
  const found = DATA.overlay && DATA.overlay.details && DATA.overlay.details[label];
  if (!found) return [];
  const most = 64;
  const top = Math.max(...found.map(([, value]) => Math.abs(value) || 0), 1e-30);
  const rows = found.slice(0, most).map(([name, value]) => {
    const meter = el("div", { class: "meter" + (value < 0 ? " negative" : "") });
    meter.style.width = typeof value === "number" ? `${(100 * Math.abs(value)) / top}%` : "100%";
    return el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, number(value)), el("td", {}, meter));
  });
  return section(DATA.overlay.legend, el("table", { class: "bars" }, ...rows), found.length > most ? el("small", {}, `and ${found.length - most} more`) : "");
}

function layerCard(item, label) {
  const found = DATA.cards[label] || {};
  const out = [el("h2", {}, label), el("p", {}, [found.kind, item.kind !== found.kind && item.kind, item.times > 1 ? `drawn for ${item.layers.length} layers` : ""].filter(Boolean).join(", "))];
  if (item.layers.length > 1) out.push(...section("Drawn as one", el("div", { class: "links" }, ...item.layers.map((one) => link(one, item.key, one)))));
  if (typeof item.value !== "undefined") out.push(table([[DATA.overlay.legend.replace(/:.*/, ""), number(item.value)]]));
  if (found.note) out.push(el("p", {}, found.note));
  out.push(...(found.gives ? section("Gives", ...found.gives.map((text) => el("p", { class: "mono" }, text))) : []));
  out.push(...(found.pictures ? pictures(found.pictures) : []));
  (found.statistics || []).forEach((one, n, all) => out.push(...statistics(one, n, all.length)));
  if (found.missing) out.push(el("p", {}, found.missing));
  out.push(...findings(label));
  if (found.call !== undefined) out.push(...section("In modules", el("div", { class: "links" }, ...callsAround(found.call).map(moduleLink))));
  if (found.gives_module) out.push(...section("Output of modules", el("div", { class: "links" }, ...found.gives_module.map(moduleLink))));
  out.push(...section("Parents", found.parents ? links(found.parents) : el("p", {}, "none")));
  out.push(...section("Children", found.children ? links(found.children) : el("p", {}, "none")));
  if (found.parameters) out.push(...section("Parameters", table(found.parameters)));
  if (found.source) out.push(...section("Source", el("p", {}, el("small", {}, found.source[0])), el("code", {}, found.source[1])));
  if (found.code) out.push(...section("As it runs", el("code", {}, found.code)));
  return out;
}

function moduleCard(item) {
  const count = item.layers.length, isOpen = STATE.open.has(item.key);
  const toggleIt = el("button", { type: "button", id: "card-toggle", on: { click: () => toggle(item.key) } }, isOpen ? "Fold" : "Unfold");
  const inside = item.inside.map((one) => link(nameOf(one), one.key));
  const most = 80;
  return [
    el("h2", {}, nameOf(item)), el("p", {}, `${item.kind}${item.times > 1 ? `, ${item.times} calls` : ""}, ${count} layer${count === 1 ? "" : "s"}`), toggleIt,
    ...(item.value !== undefined && DATA.overlay ? [table([[DATA.overlay.legend.replace(/:.*/, "") + " (the greatest inside)", number(item.value)]])] : []),
    ...section("Inside", el("div", { class: "links" }, ...inside.slice(0, most), inside.length > most ? `and ${inside.length - most} more` : "")),
  ];
}

function programCard() {
  return [
    el("h2", {}, DATA.model || "Program"), el("p", {}, "Choose a layer or a module, in the graph, in the list, or by searching."),
    ...section("Keys", table([["/", "search"], ["arrow keys", "follow the data; in the list, unfold and fold"], ["Enter", "choose; unfold or fold a module"], ["+  -  0", "zoom, show everything"], ["drag, wheel", "pan, zoom"], ["Esc", "let go"]])),
  ];
}

function showCard() {
  const item = STATE.chosen && itemOf(STATE.chosen);
  card.replaceChildren(...(item ? (item.isGlyph ? layerCard(item, STATE.label) : moduleCard(item)) : programCard()).filter((one) => one !== ""));
  card.scrollTop = 0;
}
