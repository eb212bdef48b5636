// Wires the parts together. Everything is drawn at most once in a frame of the browser, and only
// after something has changed. `pagedkv` is for whoever wants the numbers from outside.
"use strict";

const byId = (id) => document.getElementById(id);
const percent = (part) => `${(100 * part).toFixed(1)} %`;
const LISTED = ["running", "waiting", "swapped", "pinned"];

const page = {
  run: null,
  isDirty: false,
  chosen: null, // lane of the request whose table is shown
  pointed: null, // what the pointer is at: {lane} or {block} or {step}
  drawMs: [], // of the last frames
  hits: [], // [queries, hits] of the last frames
};

const redraw = () => (page.isDirty = true);
const grid = new Grid(byId("blocks"), byId("marks"), redraw);
const timeline = new Timeline(byId("steps"), redraw);
const lists = LISTED.map((state) => new RequestList(byId(`list-${state}`), state, (lane) => point(lane === null ? null : { lane }), choose));
const table = new BlockTable(byId("table"), (request, logical) => point(request ? { block: request.table[logical], logical, lane: request.lane } : null));

function point(at) {
  page.pointed = at;
  page.isDirty = true;
}

function choose(lane) {
  page.chosen = lane === page.chosen ? null : lane;
  page.isDirty = true;
}

function lit() {
  const at = page.pointed, { run } = page;
  if (at?.block !== undefined) return at.block >= 0 ? [at.block] : [];
  const request = run.requests.get(at?.lane ?? page.chosen);
  return request ? request.table.filter((block) => block >= 0) : [];
}

const STATE_NAMES = ["free", "cached, idle", "referenced", "in transit", "draining"];

function describeBlock(run, block, at) {
  if (block === FREED) return `logical ${at.logical}: given back behind its sliding window`;
  const before = at.logical === undefined ? "" : `logical ${at.logical} → `;
  if (block < 0) return `${before}CPU block ${-1 - block}`;
  const holders = run.holdersOf(block).map(([request, logical]) => `${request.id}[${logical}]`);
  const some = holders.slice(0, 6).join(", ") + (holders.length > 6 ? ` and ${holders.length - 6} more` : "");
  const fill = run.fills[block] < run.blockSize ? `, ${run.fills[block]} of ${run.blockSize} tokens` : "";
  return `${before}block ${block}: ${STATE_NAMES[run.states[block]]}, ref count ${run.refs[block]}${fill}${some ? `; held by ${some}` : ""}`;
}

function describe() {
  const at = page.pointed, { run } = page;
  if (at?.step) return describeStep(at.step);
  if (at?.block !== undefined) return describeBlock(run, at.block, at);
  const request = run.requests.get(at?.lane ?? page.chosen);
  if (!request) return "Point at a block, a request, or an entry of a block table.";
  const limits = request.prompt_len === undefined ? "" : `, prompt of ${request.prompt_len}, at most ${request.max_tokens} to generate`;
  const why = request.why ? `; ${request.why}` : "";
  return `${request.id} (${request.state}): ${request.tokens} tokens in ${request.table.length} blocks${limits}${why}`;
}

// Label, value and part of 1 (for a bar) of each number that the header shows.
function numbers(run) {
  const s = run.statistics, [firstQueries, firstHits] = page.hits[0] ?? [0, 0];
  const queries = s.prefix_cache_queries - firstQueries, hits = s.prefix_cache_hits - firstHits;
  const lasts = [...run.requests.values()].filter((one) => one.table.length && one.state !== "pinned");
  const fill = lasts.reduce((sum, one) => sum + run.fillOf(one), 0) / (lasts.length * run.blockSize || 1);
  const total = s.prefix_cache_hits / Math.max(1, s.prefix_cache_queries);
  return [
    ["step", String(run.steps.at(-1)?.[0] ?? 0)],
    ["block occupancy", percent(s.block_occupancy), s.block_occupancy],
    ["token occupancy", percent(s.token_occupancy), s.token_occupancy],
    ["last blocks' fill", lasts.length ? percent(fill) : "–", fill],
    ["referenced / shared", `${s.num_referenced} / ${s.num_shared}`],
    ["cached / free", `${s.num_cached_idle} / ${s.num_free}`],
    ["hit rate", percent(total), total],
    ["hit rate, recent", queries > 0 ? percent(hits / queries) : "–", queries > 0 ? hits / queries : 0],
    ["evicted / copied", `${s.num_evictions} / ${s.num_copies}`],
    ["swapped out / in", `${s.num_swapped_out} / ${s.num_swapped_in}`],
    ["CPU blocks", `${s.num_cpu_blocks - s.num_cpu_free} of ${s.num_cpu_blocks}`],
  ];
}

const shownNumbers = [];

function drawNumbers(run) {
  if (!("num_free" in run.statistics)) return;
  numbers(run).forEach(([label, value, part], i) => {
    if (!shownNumbers[i]) {
      const bar = element("u"), text = element("dd");
      byId("numbers").append(element("div", "", element("dt", "", label), text, ...(part === undefined ? [] : [element("i", "", bar)])));
      shownNumbers[i] = { bar, text };
    }
    setText(shownNumbers[i].text, value);
    if (part !== undefined) setStyle(shownNumbers[i].bar, "width", `${(100 * part).toFixed(1)}%`);
  });
}

function drawEvents(run) {
  const holder = byId("events"), newest = run.events.slice(-4).reverse();
  while (holder.children.length < newest.length) holder.append(element("li"));
  [...holder.children].forEach((item, i) => setText(item, newest[i]?.text ?? ""));
}

function draw(nowMs) {
  const { run } = page;
  if (run && grid.box && (page.isDirty || grid.isStale)) {
    const began = performance.now();
    if (page.isDirty) {
      page.isDirty = false;
      grid.drawBlocks(run);
      grid.light(lit(), page.pointed !== null);
      drawNumbers(run);
      drawEvents(run);
      for (const list of lists) {
        const requests = run.byState()[list.state];
        setText(byId(`num-${list.state}`), String(requests.length));
        setStyle(byId(`list-${list.state}`), "display", requests.length ? "block" : "none");
        list.show(run, requests, page.chosen);
      }
      const request = run.requests.get(page.chosen) ?? null;
      table.show(run, request);
      setText(byId("whose"), request ? shortName(request.id) : "click a request");
      byId("prompt").hidden = request?.prompt === undefined;
      setText(byId("prompt"), request?.prompt ?? "");
      setText(byId("told"), describe());
      timeline.draw(run);
    }
    grid.drawMarks(run, nowMs);
    page.drawMs.push(performance.now() - began);
    if (page.drawMs.length > 1000) page.drawMs.shift();
  }
  requestAnimationFrame(draw);
}

const on = {
  start(start) {
    page.run = new Run(start);
    page.chosen = page.pointed = null;
    page.hits = [];
    setText(byId("model"), `${start.model} · ${start.num_blocks} blocks of ${start.block_size} tokens`);
    byId("ask").hidden = true;
    page.isDirty = true;
    return page.run;
  },
  frame(frame) {
    const began = performance.now();
    page.run.apply(frame);
    page.applyMs = performance.now() - began;
    if (frame.statistics) {
      page.hits.push([frame.statistics.prefix_cache_queries, frame.statistics.prefix_cache_hits]);
      if (page.hits.length > 100) page.hits.shift();
    }
    page.isDirty = true;
  },
  state(text, isOn) {
    setText(byId("link"), text);
    byId("link").className = isOn ? "" : "off";
  },
  key(wasRefused) {
    byId("ask").hidden = false;
    setText(byId("refused"), wasRefused ? "not the key" : "");
    byId("key").focus();
  },
};

function legend(holder, pairs) {
  for (const [color, text] of pairs) {
    const swatch = element("span", "key");
    swatch.style.background = color;
    holder.append(swatch, text);
  }
}

async function main() {
  legend(byId("legend"), [
    [cssColor(laneColor(0)), "a request's own"], [cssColor(SHARED_COLOR), "shared (ref count)"],
    [cssColor(STATE_COLORS[CACHED_IDLE]), "cached, idle"], [cssColor(STATE_COLORS[FREE]), "free"],
    [cssColor(STATE_COLORS[IN_TRANSIT]), "in transit"], [cssColor(STATE_COLORS[DRAINING]), "draining"],
    [FLASH_COLORS.copy, "copy-on-write"], [FLASH_COLORS.evict, "evicted"], [FLASH_COLORS.swap, "swapped"],
  ]);
  legend(byId("steplegend"), Object.entries(STEP_COLORS).map(([name, color]) => [color, name]));
  const marks = byId("marks");
  marks.addEventListener("mousemove", (event) => {
    const block = page.run && grid.blockAt(page.run, event);
    point(block === null ? null : { block });
  });
  marks.addEventListener("mouseleave", () => point(null));
  marks.addEventListener("click", (event) => {
    const owner = page.run?.holdersOf(grid.blockAt(page.run, event) ?? -1)[0];
    if (owner) choose(owner[0].lane);
  });
  byId("steps").addEventListener("mousemove", (event) => point(page.run && { step: timeline.stepAt(page.run, event) }));
  byId("steps").addEventListener("mouseleave", () => point(null));
  requestAnimationFrame(draw);
  const recording = byId("recording");
  if (recording) await play(JSON.parse(recording.textContent));
  else {
    const source = new LiveSource(on);
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      source.useKey(byId("key").value);
      byId("key").value = "";
    });
  }
}

async function play(base64) {
  const source = await RecordedSource.open(base64, on), slider = byId("slider");
  let timer = null;
  const show = (place) => {
    source.seek(place);
    slider.value = source.place;
    setText(byId("place"), `after step ${source.place} of ${source.last}, ${source.run.timeS.toFixed(3)} s`);
    page.isDirty = true;
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    setText(byId("play"), "Play");
  };
  slider.max = source.last;
  slider.addEventListener("input", () => show(Number(slider.value)));
  byId("play").addEventListener("click", () => {
    if (timer !== null) return stop();
    if (source.place === source.last) show(0);
    setText(byId("play"), "Stop");
    timer = setInterval(() => (source.place < source.last ? show(source.place + 1) : stop()), 100);
  });
  byId("player").hidden = false;
  globalThis.pagedkv.seek = show;
  show(0);
}

globalThis.pagedkv = {
  page,
  // Everything that the page knows, to be compared with what is so.
  state() {
    const { run } = page;
    const requests = [...run.requests.values()].map(({ id, state, why, tokens, table: blocks }) => ({ id, state, why: why ?? null, tokens, table: blocks }));
    return { statistics: run.statistics, queues: run.queues, states: [...run.states], refs: [...run.refs], holders: [...run.holders], fills: [...run.fills], requests };
  },
};
main();
