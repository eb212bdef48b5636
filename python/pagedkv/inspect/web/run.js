// Run: what is known of a run, by the frames that were applied. Draws nothing.
"use strict";

const FREED = -(2 ** 31); // entry of a table whose block was given back behind a sliding window
const FREE = 0, CACHED_IDLE = 1, REFERENCED = 2, IN_TRANSIT = 3, DRAINING = 4;
const MAX_STEPS_KEPT = 1200;
const MAX_EVENTS_KEPT = 60;

function unpacked(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  const view = new DataView(bytes.buffer), ints = new Int32Array(bytes.length >> 2);
  for (let i = 0; i < ints.length; i++) ints[i] = view.getInt32(4 * i, true);
  return ints;
}

class Run {
  constructor(start) {
    this.start = start;
    this.numBlocks = start.num_blocks;
    this.blockSize = start.block_size;
    this.steps = []; // rows of the last ones; kept when a full frame comes
    this.events = []; // {kind, text}, the newest last
    this.forget();
  }

  forget() {
    const n = this.numBlocks;
    this.states = new Uint8Array(n);
    this.refs = new Int32Array(n); // as the manager counts
    this.holders = new Int32Array(n); // entries of tables that name the block
    this.laneSums = new Float64Array(n); // sum of lane + 1 of these: the owner, where it is one
    this.lasts = new Int32Array(n); // tables whose last block it is
    this.fills = new Int32Array(n).fill(this.blockSize); // tokens in it, where it is one
    this.requests = new Map(); // lane -> request, with tokens, table
    this.order = null; // requests by state
    this.statistics = {};
    this.queues = { running: 0, waiting: 0, swapped: 0, pinned: 0 };
    this.timeS = 0;
    this.changed = null; // ids of blocks to draw anew; null: all
    this.flashes = [];
    this.version = 0;
  }

  apply(frame) {
    if (frame.full) this.forget();
    this.version++;
    if (frame.time_s !== undefined) this.timeS = frame.time_s;
    if (frame.gone || frame.requests) this.order = null;
    for (const lane of frame.gone ?? []) this.drop(lane);
    for (const parts of frame.requests ?? []) {
      const known = this.requests.get(parts.lane);
      if (known) Object.assign(known, parts);
      else this.requests.set(parts.lane, { tokens: 0, table: [], ...parts });
    }
    if (frame.sequences) this.applySequences(unpacked(frame.sequences));
    if (frame.entries) this.applyEntries(unpacked(frame.entries));
    for (const request of this.grown ?? []) this.markLast(request);
    this.grown = null;
    if (frame.blocks) this.applyBlocks(unpacked(frame.blocks));
    if (frame.statistics) this.statistics = frame.statistics;
    if (frame.queues) this.queues = frame.queues;
    this.applyHistory(frame);
  }

  drop(lane) {
    const request = this.requests.get(lane);
    this.cut(request, 0);
    this.unmarkLast(request);
    this.requests.delete(lane);
  }

  applySequences(rows) {
    this.grown = [];
    for (let i = 0; i < rows.length; i += 3) {
      const request = this.requests.get(rows[i]);
      request.tokens = rows[i + 1];
      this.cut(request, rows[i + 2]);
      this.grown.push(request);
    }
  }

  cut(request, length) {
    for (let j = length; j < request.table.length; j++) this.hold(request.table[j], request.lane, -1);
    if (request.table.length > length) request.table.length = length;
  }

  applyEntries(rows) {
    for (let i = 0; i < rows.length; i += 3) {
      const lane = rows[i], logical = rows[i + 1], block = rows[i + 2];
      const table = this.requests.get(lane).table;
      if (logical < table.length) this.hold(table[logical], lane, -1);
      table[logical] = block;
      this.hold(block, lane, 1);
    }
  }

  hold(block, lane, by) {
    if (block < 0) return;
    this.holders[block] += by;
    this.laneSums[block] += by * (lane + 1);
    this.touch(block);
  }

  touch(block) {
    if (this.changed) this.changed.push(block);
  }

  markLast(request) {
    const last = request.table.length - 1, block = request.table[last];
    if (request.last !== block) this.unmarkLast(request);
    if (last < 0 || block < 0) return;
    if (request.last === undefined) this.lasts[block]++;
    request.last = block;
    this.fills[block] = this.fillOf(request);
    this.touch(block);
  }

  unmarkLast(request) {
    const block = request.last;
    if (block === undefined) return;
    request.last = undefined;
    this.lasts[block]--;
    if (this.lasts[block] === 0) this.fills[block] = this.blockSize;
    this.touch(block);
  }

  fillOf(request) {
    const full = (request.table.length - 1) * this.blockSize;
    return Math.max(0, Math.min(this.blockSize, request.tokens - full));
  }

  applyBlocks(rows) {
    for (let i = 0; i < rows.length; i += 3) {
      const block = rows[i];
      this.states[block] = rows[i + 1];
      this.refs[block] = rows[i + 2];
      this.touch(block);
    }
  }

  applyHistory(frame) {
    if (frame.steps) {
      this.steps.push(...frame.steps);
      if (this.steps.length > MAX_STEPS_KEPT) this.steps.splice(0, this.steps.length - MAX_STEPS_KEPT);
    }
    const told = [];
    for (const [from, to] of frame.copies ?? []) {
      this.flash("copy", from, to);
      told.push({ kind: "copy", text: `copy-on-write: block ${from} to block ${to}` });
    }
    for (const [block, cpu] of frame.evicted ?? []) {
      this.flash("evict", block);
      const where = cpu < 0 ? "given up" : `moved to CPU block ${cpu}`;
      told.push({ kind: "evict", text: `evicted: cached block ${block}, ${where}` });
    }
    for (const [block, cpu] of frame.swap_out ?? []) {
      this.flash("swap", block);
      told.push({ kind: "swap", text: `swap out: block ${block} to CPU block ${cpu}` });
    }
    for (const [cpu, block] of frame.swap_in ?? []) {
      this.flash("swap", block);
      told.push({ kind: "swap", text: `swap in: CPU block ${cpu} to block ${block}` });
    }
    for (const one of frame.preempted ?? []) {
      const way = one.swaps ? "swapped out" : "to be computed again";
      told.push({ kind: "preempt", text: `preempted: ${one.id}, ${way} (${one.why})` });
    }
    for (const one of frame.ended ?? []) told.push({ kind: "end", text: `ended: ${one.id} (${one.reason})` });
    if (told.length) this.events = this.events.concat(told).slice(-MAX_EVENTS_KEPT);
  }

  flash(kind, ...blocks) {
    if (this.flashes.length < 2048) this.flashes.push({ kind, blocks, since: null });
  }

  // The lane that alone holds a block; null: none, or several do.
  owner(block) {
    return this.holders[block] === 1 ? this.laneSums[block] - 1 : null;
  }

  // [[request, logical index], ...] of all tables that name the block.
  holdersOf(block) {
    const found = [];
    if (this.holders[block] > 0) {
      for (const request of this.requests.values()) {
        const at = request.table.indexOf(block);
        if (at >= 0) found.push([request, at]);
      }
    }
    return found;
  }

  // state -> its requests in order of turn.
  byState() {
    if (this.order === null) {
      this.order = { running: [], waiting: [], swapped: [], pinned: [] };
      for (const request of this.requests.values()) this.order[request.state].push(request);
      for (const some of Object.values(this.order)) some.sort((a, b) => a.rank - b.rank || a.seq - b.seq);
    }
    return this.order;
  }

  // A copy to come back to; it shares nothing that changes.
  saved() {
    return this.copyOf(this);
  }

  restore(copy) {
    Object.assign(this, this.copyOf(copy));
    this.changed = this.order = null;
    this.flashes = [];
    this.version++;
  }

  copyOf({ states, refs, holders, laneSums, lasts, fills, requests, statistics, queues, timeS, steps, events }) {
    const own = [...requests].map(([lane, one]) => [lane, { ...one, table: one.table.slice() }]);
    return {
      states: states.slice(), refs: refs.slice(), holders: holders.slice(), laneSums: laneSums.slice(),
      lasts: lasts.slice(), fills: fills.slice(),
      requests: new Map(own), steps: steps.slice(), events, statistics, queues, timeS,
    };
  }
}
