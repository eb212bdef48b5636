// Grid: the pool on two canvases: its blocks, of which only changed ones are drawn anew, and marks
// above them: what is pointed at, and events that fade.
"use strict";

const FLASH_MS = 900;
const FLASH_COLORS = { copy: "#ff5fd2", evict: "#ff5a4d", swap: "#ffd84d" };
const STATE_COLORS = { [FREE]: [38, 43, 52], [CACHED_IDLE]: [70, 86, 110], [IN_TRANSIT]: [224, 179, 74], [DRAINING]: [120, 90, 70] };
const SHARED_COLOR = [240, 240, 245];
const UNKNOWN_COLOR = [140, 140, 150];

const LANE_COLORS = []; // made once

function laneColor(lane) {
  return (LANE_COLORS[lane] ??= makeLaneColor(lane));
}

function makeLaneColor(lane) {
  const hue = (lane * 137.508) % 360, light = 0.5 + 0.1 * (lane % 3), chroma = 0.62 * (1 - Math.abs(2 * light - 1));
  const part = (n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (light - (chroma / 2) * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [part(0), part(8), part(4)];
}

const cssColor = ([r, g, b]) => `rgb(${r},${g},${b})`;

class Grid {
  constructor(blocks, marks, onResize) {
    this.canvas = blocks;
    this.marks = marks;
    this.context = blocks.getContext("2d", { alpha: false });
    this.overlay = marks.getContext("2d");
    this.pixels = document.createElement("canvas");
    this.size = "";
    this.lit = []; // ids of blocks to show among the others
    this.told = "";
    this.box = null; // [width, height] of the canvases on the screen
    new ResizeObserver(([entry]) => {
      this.box = [entry.contentRect.width, entry.contentRect.height];
      onResize();
    }).observe(blocks);
  }

  // Cell edge, and columns, so that all blocks fit.
  layout(run) {
    const scale = window.devicePixelRatio || 1;
    const [width, height] = this.box.map((side) => Math.max(1, Math.round(side * scale)));
    const size = `${width} ${height} ${run.numBlocks}`;
    if (size === this.size) return;
    this.size = size;
    for (const one of [this.canvas, this.marks]) [one.width, one.height] = [width, height];
    let edge = Math.min(56 * scale, Math.floor(Math.sqrt((width * height) / run.numBlocks)) + 1);
    while (edge > 1 && Math.ceil(run.numBlocks / Math.floor(width / edge)) * edge > height) edge--;
    this.edge = Math.max(1, Math.floor(edge));
    this.columns = Math.max(1, Math.floor(width / this.edge));
    this.rows = Math.ceil(run.numBlocks / this.columns);
    this.isFine = this.edge < 6; // a pixel for each block, scaled up
    [this.pixels.width, this.pixels.height] = [this.columns, this.rows];
    this.image = new ImageData(this.columns, this.rows);
    this.words = new Uint32Array(this.image.data.buffer).fill(0xff261f1c);
    run.changed = null;
  }

  color(run, block) {
    const state = run.states[block];
    if (state !== REFERENCED) return STATE_COLORS[state];
    if (run.refs[block] > 1) return SHARED_COLOR;
    const owner = run.owner(block);
    return owner === null ? UNKNOWN_COLOR : laneColor(owner);
  }

  drawBlocks(run) {
    this.layout(run);
    const { context } = this;
    let ids = run.changed;
    if (ids === null) {
      context.fillStyle = "#1c1f26";
      context.fillRect(0, 0, this.canvas.width, this.canvas.height);
      ids = { length: run.numBlocks };
    }
    const all = run.changed === null;
    if (this.isFine) {
      for (let i = 0; i < ids.length; i++) {
        const block = all ? i : ids[i];
        const [r, g, b] = this.color(run, block);
        const part = 0.45 + (0.55 * run.fills[block]) / run.blockSize;
        this.words[block] = 0xff000000 | ((b * part) << 16) | ((g * part) << 8) | (r * part);
      }
      if (ids.length) {
        this.pixels.getContext("2d").putImageData(this.image, 0, 0);
        context.imageSmoothingEnabled = false;
        context.drawImage(this.pixels, 0, 0, this.columns * this.edge, this.rows * this.edge);
      }
    } else {
      for (let i = 0; i < ids.length; i++) this.drawCell(run, all ? i : ids[i]);
    }
    run.changed = [];
  }

  drawCell(run, block) {
    const { context, edge } = this, [x, y] = this.at(block);
    const inner = edge - 1, color = this.color(run, block), fill = run.fills[block] / run.blockSize;
    context.fillStyle = "#1c1f26";
    context.fillRect(x, y, edge, edge);
    context.fillStyle = cssColor(fill < 1 ? color.map((c) => c * 0.4) : color);
    context.fillRect(x, y, inner, inner);
    if (fill < 1) {
      const height = Math.round(inner * fill);
      context.fillStyle = cssColor(color);
      context.fillRect(x, y + inner - height, inner, height);
    }
    if (run.refs[block] > 1 && edge >= 12) {
      context.fillStyle = fill < 0.7 ? "#ff5fd2" : "#111";
      context.font = `600 ${Math.min(14, Math.floor(edge * 0.6))}px system-ui`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(String(run.refs[block]), x + inner / 2, y + inner / 2 + 1);
    }
  }

  at(block) {
    return [(block % this.columns) * this.edge, Math.floor(block / this.columns) * this.edge];
  }

  // The block below a pointer's place; null: none.
  blockAt(run, event) {
    const box = this.marks.getBoundingClientRect();
    const scale = this.marks.width / box.width;
    const column = Math.floor(((event.clientX - box.left) * scale) / this.edge);
    const row = Math.floor(((event.clientY - box.top) * scale) / this.edge);
    const block = row * this.columns + column;
    return column >= 0 && column < this.columns && block >= 0 && block < run.numBlocks ? block : null;
  }

  // dims: the others are darkened; otherwise these have an edge.
  light(blocks, dims) {
    const told = `${dims} ${this.size} ${blocks}`;
    if (told === this.told) return;
    this.told = told;
    this.lit = blocks;
    this.dims = dims;
    this.isStale = true;
  }

  // True while something fades.
  drawMarks(run, nowMs) {
    if (!run.flashes.length && !this.isStale) return false;
    const { overlay, edge } = this;
    overlay.clearRect(0, 0, this.marks.width, this.marks.height);
    if (this.dims && this.lit.length) {
      overlay.fillStyle = "rgba(0,0,0,0.62)";
      overlay.fillRect(0, 0, this.marks.width, this.marks.height);
      for (const block of this.lit) overlay.clearRect(...this.at(block), edge, edge);
    }
    if (!this.dims || this.lit.length === 1) {
      const out = edge < 6 || this.dims ? 2 : 0;
      overlay.strokeStyle = "#fff";
      overlay.lineWidth = edge < 12 ? 1 : 2;
      for (const block of this.lit) {
        const [x, y] = this.at(block);
        overlay.strokeRect(x + 0.5 - out, y + 0.5 - out, edge - 2 + 2 * out, edge - 2 + 2 * out);
      }
    }
    for (const one of run.flashes) {
      one.since ??= nowMs;
      overlay.globalAlpha = Math.max(0, 1 - (nowMs - one.since) / FLASH_MS);
      overlay.strokeStyle = FLASH_COLORS[one.kind];
      overlay.lineWidth = Math.max(1.5, edge / 8);
      // Inside the block, for a neighbour's mark is not to be covered; around it where it is too small.
      const inset = edge < 6 ? -3 : overlay.lineWidth / 2;
      for (const block of one.blocks) {
        const [x, y] = this.at(block);
        overlay.strokeRect(x + inset, y + inset, edge - 1 - 2 * inset, edge - 1 - 2 * inset);
      }
      if (one.blocks.length === 2) {
        const [from, to] = one.blocks.map((block) => this.at(block).map((v) => v + edge / 2));
        overlay.beginPath();
        overlay.moveTo(...from);
        overlay.lineTo(...to);
        overlay.stroke();
      }
    }
    overlay.globalAlpha = 1;
    run.flashes = run.flashes.filter((one) => nowMs - one.since < FLASH_MS);
    this.isStale = run.flashes.length > 0;
    return this.isStale;
  }
}
