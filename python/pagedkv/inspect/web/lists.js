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
    // Kept, since asking for them makes the browser lay out all that was changed before.
    this.scrolled = 0;
    this.inSight = 0;
    holder.addEventListener("scroll", () => {
      this.scrolled = holder.scrollTop;
      this.draw();
    });
    new ResizeObserver(([entry]) => {
      this.inSight = entry.contentRect.height;
      this.scrolled = holder.scrollTop;
      this.draw();
    }).observe(holder);
  }

  show(items) {
    this.items = items;
    this.draw();
  }

  draw() {
    const whole = this.items.length * this.height;
    setStyle(this.space, "height", `${whole}px`);
    // A list that has become shorter is scrolled back by the browser.
    const scrolled = Math.min(this.scrolled, Math.max(0, whole - this.inSight));
    const first = Math.floor(scrolled / this.height);
    const num = Math.min(this.items.length - first, Math.ceil(this.inSight / this.height) + 1);
    while (this.rows.length < num) {
      const row = this.make();
      row.style.height = `${this.height}px`;
      this.rows.push(row);
      this.space.append(row);
    }
    this.rows.forEach((row, i) => {
      const isHidden = i >= num;
      if (row.isHidden !== isHidden) row.hidden = row.isHidden = isHidden;
      if (isHidden) return;
      setStyle(row, "top", `${(first + i) * this.height}px`);
      this.fill(row, this.items[first + i]);
    });
  }
}

// What a node has already is not set again; it is remembered, since asking the node costs more.
function setText(node, text) {
  if (node.shown === text) return;
  node.shown = text;
  node.textContent = text;
}

function setStyle(node, name, value) {
  node.styled ??= {};
  if (node.styled[name] === value) return;
  node.styled[name] = value;
  node.style[name] = value;
}

// Ids that a server makes up begin alike and, of forks, end differently.
function shortName(id) {
  return id.length <= 34 ? id : `${id.slice(0, 14)}…${id.slice(-18)}`;
}

class RequestList {
  constructor(holder, state, onPoint, onChoose) {
    this.state = state;
    this.list = new VirtualList(holder, 38, () => this.make(onPoint, onChoose), (row, one) => this.fill(row, one));
    this.chosen = null;
  }

  make(onPoint, onChoose) {
    const row = element("div", "row", element("div", "name"), element("div", "note"), element("div", "fill", element("u")));
    row.children[2].title = "how full its last block is";
    row.addEventListener("mouseenter", () => onPoint(row.lane));
    row.addEventListener("mouseleave", () => onPoint(null));
    row.addEventListener("click", () => onChoose(row.lane));
    return row;
  }

  // requests: in order of turn.
  show(run, requests, chosen) {
    this.run = run;
    this.chosen = chosen;
    this.list.show(requests);
  }

  fill(row, request) {
    row.lane = request.lane;
    const isChosen = request.lane === this.chosen;
    if (row.isChosen !== isChosen) row.classList.toggle("chosen", (row.isChosen = isChosen));
    const [name, note, fill] = row.children;
    setStyle(row, "borderLeftColor", cssColor(laneColor(request.lane)));
    setText(name, shortName(request.id));
    const parts = [request.why ?? `${request.tokens} tokens in ${request.table.length} blocks`];
    if (request.user) parts.push(request.user);
    if (request.priority) parts.push(`priority ${request.priority}`);
    if (request.forked_from) parts.push(`fork of ${shortName(request.forked_from)}`);
    setText(note, parts.join(", "));
    setStyle(fill, "visibility", request.table.length ? "visible" : "hidden");
    const part = request.table.length ? this.run.fillOf(request) / this.run.blockSize : 0;
    setStyle(fill.firstChild, "width", `${Math.round(100 * part)}%`);
  }
}
