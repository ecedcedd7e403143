"use strict";
// Positions of what is shown. Which item is in which row, and in which order, is in the data; here is only how far apart
// they stand, for that depends on which modules are open.

const GAP = { across: 16, down: 30, pad: 14, title: 24, way: 6 };

const isWay = (item) => item[0] === "~" || item[0] === "^";

// Rows without what is not shown; `up` and `down` are the places of each item's neighbours in the rows beside it.
function shownRows([rows, links], isShown) {
  const kept = rows.map((row) => row.map((item) => isShown(item.replace(/^[~^]/, ""))));
  const places = kept.map((row) => { let n = 0; return row.map((keep) => (keep ? n++ : -1)); });
  const found = rows.map((row, r) => row.filter((_, n) => kept[r][n]).map((item) => ({ item, up: [], down: [] })));
  links.forEach((between, r) => {
    for (const [one, other] of between) {
      const a = places[r][one], b = places[r + 1][other];
      if (a < 0 || b < 0) continue;
      found[r][a].down.push(b);
      found[r + 1][b].up.push(a);
    }
  });
  return found;
}

// Where each box of each row stands, by Brandes and Koepf: boxes are put into straight columns, each below one of the two
// middle ones that it is linked to; this is done four times, from above and from below, from the left and from the right,
// and the middle of the four is taken. The ways of lines go first, so that a long line is straight.
function placeAcross(rows) {
  const crossed = crossedLinks(rows);
  const tries = [];
  for (const isDown of [true, false])
    for (const isLeft of [true, false]) {
      const columns = inColumns(rows, crossed, isDown, isLeft);
      tries.push(packed(rows, columns, isLeft));
    }
  const widths = tries.map((centres) => extent(rows, centres));
  const narrowest = widths.reduce((best, one) => (one.right - one.left < best.right - best.left ? one : best));
  tries.forEach((centres, n) => {
    const shift = n % 2 ? narrowest.right - widths[n].right : narrowest.left - widths[n].left;
    for (const row of centres) row.forEach((_, at) => { row[at] += shift; });
  });
  const found = rows.map((row, r) => row.map((_, n) => {
    const four = tries.map((centres) => centres[r][n]).sort((one, other) => one - other);
    return (four[1] + four[2]) / 2;
  }));
  const { left, right } = extent(rows, found);
  const widest = Math.max(...rows.map((row) => row.reduce((sum, box) => sum + box.w + GAP.across, 0)));
  return right - left > 4 * widest ? relaxed(rows) : found;
}

const apartFrom = (one, other) => (one.w + other.w) / 2 + (isWay(one.item) && isWay(other.item) ? GAP.way : GAP.across);

// Where straight columns would take too much room, for lines cross too often: each box near the mean of what it is linked
// to, down and up again. It is narrow, and its lines bend.
function relaxed(rows) {
  const distances = rows.map((row) => row.slice(1).map((box, n) => apartFrom(row[n], box)));
  const centres = rows.map((row, r) => {
    let x = 0;
    const found = row.map((_, n) => (x += n ? distances[r][n - 1] : 0));
    return found.map((one) => one - x / 2);
  });
  const move = (r, beside, side) => {
    const wanted = rows[r].map((box, n) => {
      const linked = box[side].map((place) => centres[beside][place]);
      return linked.length ? linked.reduce((sum, one) => sum + one, 0) / linked.length : centres[r][n];
    });
    centres[r] = spread(wanted, distances[r]);
  };
  for (let sweep = 0; sweep < 6; sweep++) {
    for (let r = 1; r < rows.length; r++) move(r, r - 1, "up");
    for (let r = rows.length - 2; r >= 0; r--) move(r, r + 1, "down");
  }
  return centres;
}

// Centres as near to `wanted` as can be, by least squares, in this order and at these distances at least: neighbours that
// would overlap move together, to the mean of what they want.
function spread(wanted, distances) {
  const groups = [], shifts = [];
  wanted.forEach((want, n) => {
    shifts.push(n ? shifts[n - 1] + distances[n - 1] : 0);
    let group = { at: want - shifts[n], count: 1 };
    while (groups.length && groups[groups.length - 1].at > group.at) {
      const last = groups.pop(), count = last.count + group.count;
      group = { at: (last.at * last.count + group.at * group.count) / count, count };
    }
    groups.push(group);
  });
  return groups.flatMap(({ at, count }) => Array(count).fill(at)).map((at, n) => at + shifts[n]);
}

function extent(rows, centres) {
  let left = Infinity, right = -Infinity;
  rows.forEach((row, r) => row.forEach((box, n) => {
    left = Math.min(left, centres[r][n] - box.w / 2);
    right = Math.max(right, centres[r][n] + box.w / 2);
  }));
  return left > right ? { left: 0, right: 0 } : { left, right };
}

// The links that cross a straight part of a way: they are the ones to bend.
function crossedLinks(rows) {
  const found = new Set();
  for (let r = 0; r + 1 < rows.length; r++) {
    const links = rows[r].flatMap((box, n) => box.down.map((place) => [n, place]));
    const straight = links.filter(([n, place]) => isWay(rows[r][n].item) && isWay(rows[r + 1][place].item));
    for (const [n, place] of links)
      if (straight.some(([one, other]) => (one - n) * (other - place) < 0) && !(isWay(rows[r][n].item) && isWay(rows[r + 1][place].item)))
        found.add(`${r},${n},${place}`);
  }
  return found;
}

// For each box the one at the head of its column, as [row, place].
function inColumns(rows, crossed, isDown, isLeft) {
  const head = rows.map((row, r) => row.map((_, n) => [r, n]));
  const step = isDown ? 1 : -1;
  for (let r = isDown ? 1 : rows.length - 2; rows[r]; r += step) {
    const beside = r - step, used = new Set();
    let border = isLeft ? -1 : Infinity;
    const places = rows[r].map((_, n) => n);
    for (const n of isLeft ? places : places.reverse()) {
      const linked = [...(isDown ? rows[r][n].up : rows[r][n].down)].sort((one, other) => one - other);
      const middle = (linked.length - 1) / 2;
      const middles = linked.length ? [...new Set([Math.floor(middle), Math.ceil(middle)])] : [];
      for (const m of isLeft ? middles : middles.reverse()) {
        const other = linked[m];
        const link = isDown ? `${beside},${other},${n}` : `${r},${n},${other}`;
        if (crossed.has(link) || used.has(other) || (isLeft ? other <= border : other >= border)) continue;
        head[r][n] = head[beside][other];
        used.add(border = other);
        break;
      }
    }
  }
  return head;
}

// Columns as near to the left as can be (or to the right), then each back towards what it could stand beside.
function packed(rows, head, isLeft) {
  const columns = new Map(), order = [];
  const sign = isLeft ? 1 : -1;
  const columnOf = (r, n) => {
    const key = head[r][n].join();
    if (!columns.has(key)) { columns.set(key, { before: new Map(), after: new Map(), x: null }); order.push(key); }
    return columns.get(key);
  };
  rows.forEach((row, r) => row.forEach((box, n) => {
    const column = columnOf(r, n);
    const m = n - sign;
    if (!row[m]) return;
    const other = columnOf(r, m);
    const apart = apartFrom(box, row[m]);
    column.before.set(other, Math.max(apart, column.before.get(other) || 0));
    other.after.set(column, Math.max(apart, other.after.get(column) || 0));
  }));
  const sorted = [], seen = new Set();
  for (const key of order) { // what stands before comes before; without recursion, for columns can be many
    const stack = [columns.get(key)];
    while (stack.length) {
      const column = stack[stack.length - 1];
      const next = seen.has(column) ? null : [...column.before.keys()].find((one) => !seen.has(one));
      if (next) stack.push(next);
      else { stack.pop(); if (!seen.has(column)) { seen.add(column); sorted.push(column); } }
    }
  }
  for (const column of sorted) column.x = Math.max(0, ...[...column.before].map(([other, apart]) => other.x + apart));
  for (const column of sorted.reverse())
    if (column.after.size) column.x = Math.max(column.x, Math.min(...[...column.after].map(([other, apart]) => other.x - apart)));
  return rows.map((row, r) => row.map((_, n) => sign * columnOf(r, n).x));
}

// The content of one frame: where each item lies in it, and how large it is. `world` says what is shown and open, and
// how large things are.
function layout(key, world) {
  const rows = shownRows(world.rows(key), world.isShown);
  const places = new Map();
  const [least, title] = key === "root" ? [0, 0] : [world.titleWidth(key) + 2 * GAP.pad, GAP.title];
  for (const row of rows)
    for (const box of row) {
      box.inner = !isWay(box.item) && world.isOpen(box.item) ? layout(box.item, world) : null;
      [box.w, box.h] = isWay(box.item) ? [GAP.way, 0] : box.inner ? [box.inner.w, box.inner.h] : world.size(box.item);
    }
  const centres = placeAcross(rows);
  const { left, right } = extent(rows, centres);
  let y = title + GAP.pad;
  const width = Math.max(right - left + 2 * GAP.pad, least);
  const shift = (width - (right - left)) / 2 - left;
  rows.forEach((row, r) => {
    if (!row.length) return;
    const height = Math.max(...row.map((box) => box.h));
    row.forEach((box, n) => {
      const x = centres[r][n] + shift;
      const place = { x: x - box.w / 2, y, w: box.w, h: box.h, row: r, order: n, bottom: y + height, inner: box.inner };
      if (isWay(box.item)) (places.get(box.item) || places.set(box.item, new Map()).get(box.item)).set(r, place);
      else places.set(box.item, place);
    });
    y += height + GAP.down;
  });
  return { w: width, h: y - GAP.down + GAP.pad, places, last: rows.length - 1 };
}
