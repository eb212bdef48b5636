// BlockTable: the table of one request, logical index above block id; an entry that is pointed at
// is shown in the pool.
"use strict";

const ENTRIES_PER_ROW = 8;

class BlockTable {
  constructor(holder, onPoint) {
    this.list = new VirtualList(holder, 32, () => this.make(onPoint), (row, first) => this.fill(row, first));
    this.request = null;
  }

  make(onPoint) {
    const row = element("div", "row entries");
    for (let i = 0; i < ENTRIES_PER_ROW; i++) {
      const cell = element("span", "", element("i"), element("b"));
      cell.addEventListener("mouseenter", () => onPoint(this.request, row.first + i));
      cell.addEventListener("mouseleave", () => onPoint(null, 0));
      row.append(cell);
    }
    return row;
  }

  show(run, request) {
    this.run = run;
    this.request = request;
    const firsts = [];
    for (let i = 0; request && i < request.table.length; i += ENTRIES_PER_ROW) firsts.push(i);
    this.list.show(firsts);
  }

  fill(row, first) {
    row.first = first;
    for (let i = 0; i < ENTRIES_PER_ROW; i++) {
      const cell = row.children[i], at = first + i;
      setStyle(cell, "visibility", at < this.request.table.length ? "visible" : "hidden");
      if (at >= this.request.table.length) continue;
      const block = this.request.table[at];
      const refs = block >= 0 ? this.run.refs[block] : 1;
      setText(cell.children[0], refs > 1 ? `${at} ×${refs}` : String(at));
      setText(cell.children[1], blockName(block));
    }
  }
}

function blockName(block) {
  if (block === FREED) return "·";
  return block >= 0 ? String(block) : `cpu ${-1 - block}`;
}
