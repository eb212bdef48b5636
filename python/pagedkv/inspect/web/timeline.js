// Timeline: a bar for each of the last steps, decode tokens below prefill tokens, with marks where a
// step preempted, copied, evicted or swapped.
"use strict";

const STEP_WIDTH = 5;
const STEP_COLORS = { decode: "#5aa9ff", prefill: "#f0a04b", preempted: "#ff5a4d", copies: "#ff5fd2", evicted: "#ff8a80", swapped: "#ffd84d" };

class Timeline {
  constructor(canvas, onResize) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.first = 0;
    this.box = [1, 1]; // on the screen
    new ResizeObserver(([entry]) => {
      this.box = [entry.contentRect.width, entry.contentRect.height];
      onResize();
    }).observe(canvas);
  }

  draw(run) {
    const { canvas, context } = this, scale = window.devicePixelRatio || 1;
    const [width, height] = this.box.map((side) => Math.max(1, Math.round(side * scale)));
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    this.pitch = STEP_WIDTH * scale;
    context.fillStyle = "#1c1f26";
    context.fillRect(0, 0, width, height);
    this.first = Math.max(0, run.steps.length - Math.floor(width / this.pitch));
    const shown = run.steps.slice(this.first);
    const top = Math.max(1, ...shown.map((step) => step[3] + step[4]));
    const marksHeight = 16 * scale, unit = (height - marksHeight - 2) / top;
    shown.forEach(([, , , prefill, decode, , preempted, copies, swapOut, swapIn, evicted], i) => {
      const x = i * this.pitch, bar = this.pitch - 1;
      context.fillStyle = STEP_COLORS.decode;
      context.fillRect(x, height - decode * unit, bar, decode * unit);
      context.fillStyle = STEP_COLORS.prefill;
      context.fillRect(x, height - (decode + prefill) * unit, bar, prefill * unit);
      [[preempted, "preempted"], [swapOut + swapIn, "swapped"], [copies, "copies"], [evicted, "evicted"]].forEach(([number, kind], j) => {
        if (!number) return;
        context.fillStyle = STEP_COLORS[kind];
        context.fillRect(x, 4 * j * scale, bar, 3 * scale);
      });
    });
    const label = `${top} tokens`;
    context.font = `${11 * scale}px system-ui`;
    context.textAlign = "right";
    context.textBaseline = "top";
    context.fillStyle = "#1c1f26";
    const labelWidth = context.measureText(label).width + 8;
    context.fillRect(width - labelWidth, marksHeight, labelWidth, 14 * scale);
    context.fillStyle = "#c3cad6";
    context.fillText(label, width - 4, marksHeight + 2);
  }

  stepAt(run, event) {
    const box = this.canvas.getBoundingClientRect();
    const x = (event.clientX - box.left) * (this.canvas.width / box.width);
    return run.steps[this.first + Math.floor(x / this.pitch)] ?? null;
  }
}

function describeStep([id, begin, end, prefill, decode, rows, preempted, copies, swapOut, swapIn, evicted]) {
  const parts = [`step ${id}: ${rows} rows, ${prefill} prefill and ${decode} decode tokens, ${((end - begin) * 1e3).toFixed(2)} ms`];
  for (const [number, what] of [[preempted, "preempted"], [copies, "blocks copied on write"], [swapOut, "blocks swapped out"], [swapIn, "blocks swapped in"], [evicted, "cached blocks evicted"]]) {
    if (number) parts.push(`${number} ${what}`);
  }
  return parts.join(", ");
}
