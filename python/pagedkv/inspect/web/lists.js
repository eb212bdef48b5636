// VirtualList: a scrolled list of any length, of which only the rows in sight exist. RequestList:
// requests of one state.
"use strict";

function element(tag, name, ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children);
  return made;
}

class VirtualList {
  // fill(row, item): shows an item in a row that make() made.
  constructor(holder, height, make, fill) {
    this.holder = holder;
    this.height = height;
    this.make = make;
    this.fill = fill;
    this.items = [];
    this.rows = [];
    this.space = element("div");
    holder.append(this.space);
    holder.addEventListener("scroll", () => this.draw());
  }

  show(items) {
    this.items = items;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.holder.scrollTop / this.height));
    const num = Math.min(this.items.length - first, Math.ceil(this.holder.clientHeight / this.height) + 1);
    const whole = `${this.items.length * this.height}px`;
    if (this.space.style.height !== whole) this.space.style.height = whole;
    while (this.rows.length < num) {
      const row = this.make();
      row.style.height = `${this.height}px`;
      this.rows.push(row);
      this.space.append(row);
    }
    this.rows.forEach((row, i) => {
      row.hidden = i >= num;
      if (row.hidden) return;
      const top = `${(first + i) * this.height}px`;
      if (row.style.top !== top) row.style.top = top;
      this.fill(row, this.items[first + i]);
    });
  }
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

class RequestList {
  constructor(holder, state, onPoint, onChoose) {
    this.state = state;
    this.list = new VirtualList(holder, 38, () => this.make(onPoint, onChoose), (row, one) => this.fill(row, one));
    this.chosen = null;
  }

  make(onPoint, onChoose) {
    const row = element("div", "row", element("div", "name"), element("div", "note"), element("div", "fill", element("u")));
    row.addEventListener("mouseenter", () => onPoint(row.lane));
    row.addEventListener("mouseleave", () => onPoint(null));
    row.addEventListener("click", () => onChoose(row.lane));
    return row;
  }

  show(run, chosen) {
    this.run = run;
    this.chosen = chosen;
    this.list.show(run.inState(this.state));
  }

  fill(row, request) {
    row.lane = request.lane;
    row.classList.toggle("chosen", request.lane === this.chosen);
    const [name, note, fill] = row.children;
    row.style.borderLeftColor = cssColor(laneColor(request.lane));
    setText(name, request.id);
    const fork = request.forked_from ? `fork of ${request.forked_from}, ` : "";
    const size = `${fork}${request.tokens} tokens in ${request.table.length} blocks`;
    const user = request.user ? `, ${request.user}` : "";
    const priority = request.priority ? `, priority ${request.priority}` : "";
    const why = request.why && request.state !== "running" ? request.why : size;
    setText(note, why + user + priority);
    note.title = request.why ?? "";
    fill.hidden = request.table.length === 0;
    const part = request.table.length ? this.run.fillOf(request) / this.run.blockSize : 0;
    const width = `${Math.round(100 * part)}%`;
    const bar = fill.firstChild;
    if (bar.style.width !== width) bar.style.width = width;
    fill.title = "how full its last block is";
  }
}
