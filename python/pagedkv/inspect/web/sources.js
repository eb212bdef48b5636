// Where frames come from: the server that sent this page (LiveSource), or the page itself, which has
// a recorded run in it (RecordedSource).
"use strict";

const MAX_WAIT_MS = 10000;

// Calls take(line) for each line of a stream of bytes.
async function readLines(stream, take) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = value.split("\n");
    parts.push(lines.shift());
    for (const rest of lines) {
      take(parts.join(""));
      parts = [rest];
    }
  }
}

class LiveSource {
  // on: {start(start), frame(frame), state(text, isOn), key(wasRefused)}
  constructor(on) {
    this.on = on;
    this.key = null; // in memory only: never in an address, nor stored
    this.waitMs = 500;
    this.connect();
  }

  useKey(key) {
    this.key = key;
    this.connect();
  }

  async connect() {
    let why = "the server ended the stream";
    try {
      const headers = this.key === null ? {} : { authorization: `Bearer ${this.key}` };
      const response = await fetch("/inspect/stream", { headers, cache: "no-store", credentials: "omit" });
      if (response.status === 401) {
        this.on.state("a key is needed", false);
        this.on.key(this.key !== null);
        return;
      }
      if (!response.ok) throw new Error(`the server answers ${response.status}`);
      await readLines(response.body, (line) => this.take(line));
    } catch (error) {
      why = error.message;
    }
    this.on.state(`not connected: ${why}`, false);
    setTimeout(() => this.connect(), this.waitMs);
    this.waitMs = Math.min(2 * this.waitMs, MAX_WAIT_MS);
  }

  take(line) {
    if (!line) return;
    this.waitMs = 500;
    const message = JSON.parse(line);
    if (message.kind === "start") {
      this.on.start(message);
      this.on.state("live", true);
    } else if (message.kind === "frame") {
      this.on.frame(message);
    }
  }
}

class RecordedSource {
  static async open(base64, on) {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const lines = [];
    await readLines(stream, (line) => lines.push(line));
    return new RecordedSource(lines, on);
  }

  constructor(lines, on) {
    this.start = JSON.parse(lines[0]);
    this.lines = lines.slice(1); // frame 0 is the run before its first step
    this.copies = new Map(); // place -> run as it was
    this.every = Math.max(16, Math.ceil(this.lines.length / 24));
    this.place = -1;
    this.run = on.start(this.start);
    this.on = on;
    on.state("recorded", true);
  }

  get last() {
    return this.lines.length - 1;
  }

  // Show the run after step `place`.
  seek(place) {
    place = Math.max(0, Math.min(this.last, place));
    if (place < this.place) {
      const from = Math.max(...[...this.copies.keys()].filter((one) => one <= place));
      this.run.restore(this.copies.get(from));
      this.place = from;
    }
    const isJump = place - this.place > 1;
    while (this.place < place) {
      this.place++;
      this.on.frame(JSON.parse(this.lines[this.place]));
      if (this.place % this.every === 0 && !this.copies.has(this.place)) this.copies.set(this.place, this.run.saved());
    }
    if (isJump) this.run.flashes = [];
  }
}
