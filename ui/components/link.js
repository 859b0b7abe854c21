/* The tab's one connection to the camera service, shared by every panel of the page, and the small helpers they share.
 *
 * This file is put before each panel's own file, so the connection itself lives on globalThis: the first panel that
 * asks makes it, the last one that leaves closes it. Nothing here turns text into markup: people, models and cameras
 * supply text, and text only ever becomes text nodes.
 */

const KEPT_DESCRIPTIONS = 60;
const KEPT_SAMPLES = 8000;
const SILENCE_LIMIT_MS = 10000; // the service speaks about once a second
const BACKOFF_MAX_MS = 8000;

class Link {
  constructor(base) {
    this.base = base;
    this.handlers = new Map();
    this.phase = "connecting"; // connecting | open | waiting
    this.attempt = 0;
    this.retryAt = 0;
    this.heardAt = 0;
    this.everOpen = false;
    this.refusal = ""; // why the service closed, in its words
    this.status = null;
    this.latency = null;
    this.samples = [];
    this.descriptions = new Map();
    this.wish = { cameras: "all", max_width_px: 640 };
    this.offsets = [];
    this.socket = null;
    this.timer = setInterval(() => this.tick(), 500);
    this.seen = () => this.sendWish();
    document.addEventListener("visibilitychange", this.seen);
    this.open();
  }

  /** Calls `handler` at each event of this kind; returns what ends that. */
  on(kind, handler) {
    if (!this.handlers.has(kind)) this.handlers.set(kind, new Set());
    this.handlers.get(kind).add(handler);
    return () => this.handlers.get(kind).delete(handler);
  }

  emit(kind, value) {
    for (const handler of this.handlers.get(kind) ?? []) {
      try {
        handler(value);
      } catch (error) {
        console.error(`framechat: ${kind}`, error);
      }
    }
  }

  /** Seconds since the epoch by the service's clock, which may differ from the browser's. */
  now() {
    return Date.now() / 1000 - (this.offsets.length ? Math.min(...this.offsets) : 0);
  }

  url(path) {
    return this.base + path;
  }

  /** What the pictures need; a hidden tab asks for none. */
  want(wish) {
    if (JSON.stringify(wish) === JSON.stringify(this.wish)) return;
    this.wish = wish;
    this.sendWish();
  }

  sendWish() {
    if (this.socket?.readyState !== WebSocket.OPEN) return;
    this.socket.send(JSON.stringify(document.hidden ? { ...this.wish, cameras: [] } : this.wish));
  }

  open() {
    this.attempt += 1;
    this.setPhase("connecting");
    let socket;
    try {
      socket = new WebSocket(this.base.replace(/^http/, "ws") + "/live");
    } catch {
      this.later();
      return;
    }
    this.socket = socket;
    this.heardAt = Date.now();
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      if (socket === this.socket) this.sendWish();
    };
    socket.onmessage = (event) => {
      if (socket !== this.socket) return;
      this.heardAt = Date.now();
      this.attempt = 0;
      this.everOpen = true;
      if (this.phase !== "open") this.setPhase("open");
      if (typeof event.data === "string") this.take(JSON.parse(event.data));
      else this.takeFrame(event.data);
    };
    socket.onclose = (event) => {
      if (socket !== this.socket) return;
      this.refusal = event.reason;
      this.later();
    };
  }

  later() {
    this.socket = null;
    const wait = Math.min(BACKOFF_MAX_MS, 500 * 2 ** Math.min(this.attempt, 5)) * (0.75 + Math.random() / 2);
    this.retryAt = Date.now() + wait;
    this.setPhase("waiting");
  }

  tick() {
    if (![...this.handlers.values()].some((set) => set.size)) {
      this.idle = (this.idle ?? 0) + 1;
      if (this.idle > 6) this.close();
      return;
    }
    this.idle = 0;
    const now = Date.now();
    if (this.phase === "waiting" && now >= this.retryAt) this.open();
    else if (this.socket && now - this.heardAt > SILENCE_LIMIT_MS) {
      const old = this.socket;
      this.later();
      old.close();
    }
    if (this.phase !== "open") this.emit("phase", this.phase);
  }

  setPhase(phase) {
    this.phase = phase;
    this.emit("phase", phase);
  }

  close() {
    clearInterval(this.timer);
    document.removeEventListener("visibilitychange", this.seen);
    const old = this.socket;
    this.socket = null;
    old?.close();
    if (globalThis.framechatLink === this) globalThis.framechatLink = undefined;
  }

  take(message) {
    if (message.type === "status") {
      this.offsets.push(Date.now() / 1000 - message.now_s);
      if (this.offsets.length > 30) this.offsets.shift();
      this.status = message;
    } else if (message.type === "latency") {
      this.latency = message;
      this.addSamples(message);
    } else if (message.type === "descriptions") {
      this.descriptions = new Map(message.items.map((item) => [item.description_id, item]));
      this.trim();
    } else if (message.type === "description") {
      this.descriptions.set(message.description_id, message);
      this.trim();
    } else if (message.type === "token") {
      const view = this.descriptions.get(message.description_id);
      if (!view) return;
      view.text += message.text;
    }
    this.emit(message.type, message);
  }

  /** The service sends the whole time line at first and then what is new; what came twice counts once. */
  addSamples(message) {
    const fresh = message.timeline ?? [];
    message.timeline = null;
    if (!fresh.length) return;
    let from = Infinity;
    for (const sample of fresh) from = Math.min(from, sample.at_s);
    const start = this.samples.findIndex((sample) => sample.at_s >= from);
    const overlap = start < 0 ? [] : this.samples.splice(start);
    const name = (sample) => `${sample.at_s} ${sample.traffic_class} ${sample.kind}`;
    const known = new Set(overlap.map(name));
    const added = overlap.concat(fresh.filter((sample) => !known.has(name(sample))));
    added.sort((a, b) => a.at_s - b.at_s);
    this.samples = this.samples.concat(added).slice(-KEPT_SAMPLES);
  }

  trim() {
    if (this.descriptions.size <= KEPT_DESCRIPTIONS) return;
    const old = [...this.descriptions.values()].sort((a, b) => a.due_s - b.due_s);
    for (const view of old.slice(0, old.length - KEPT_DESCRIPTIONS)) this.descriptions.delete(view.description_id);
  }

  takeFrame(buffer) {
    const size = new DataView(buffer).getUint32(0);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    head.jpeg = new Uint8Array(buffer, 4 + size);
    this.emit("frame", head);
  }
}

/** The tab's connection. `service` is {url: string | null, port: number}; without a URL, the page's own host. */
function getLink(service) {
  const base = service.url ?? `${location.protocol}//${location.hostname}:${service.port}`;
  if (globalThis.framechatLink?.base !== base) {
    globalThis.framechatLink?.close();
    globalThis.framechatLink = new Link(base);
  }
  return globalThis.framechatLink;
}

/** Makes an element; strings among the children become text nodes, never markup. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Changes text only where it differs, so that nothing repaints for nothing. */
function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function show(element, visible) {
  element.hidden = !visible;
}

/** 31 ms, 1.24 s, 12.4 s, 2 min 05 s; an em dash where there is no figure. */
function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms < 0) ms = 0;
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 9995) return `${(ms / 1000).toFixed(2)} s`;
  if (ms < 59950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(seconds % 60).padStart(2, "0")} s`;
  return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")} min`;
}

/** An objective as it was set: 2 s, 500 ms, 1.5 s. */
function objective(ms) {
  return ms < 1000 ? `${+ms.toFixed(1)} ms` : `${+(ms / 1000).toFixed(2)} s`;
}

function count(number) {
  return number === null || number === undefined ? "–" : number.toLocaleString("en-US");
}

function percent(fraction, digits = 0) {
  return fraction === null || fraction === undefined ? "–" : `${(fraction * 100).toFixed(digits)} %`;
}

/** The short name of a person: `street-6` on the camera "street" is P6. */
function personName(personId) {
  const number = /(?:^|\D)(\d+)$/.exec(personId);
  return number ? `P${number[1]}` : personId;
}

function clock(seconds) {
  const date = new Date(seconds * 1000);
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}

/** One sentence on a connection that is not there, or null while it is. */
function troubleWith(link) {
  if (link.phase === "open") return null;
  if (link.phase === "connecting" && link.attempt <= 1) return `Connecting to the camera service at ${link.base} …`;
  const wait = Math.max(0, Math.ceil((link.retryAt - Date.now()) / 1000));
  const next = link.phase === "waiting" ? `next try in ${wait} s` : "trying";
  const what = link.everOpen ? "Lost the camera service" : "Cannot reach the camera service";
  const attempt = link.attempt + (link.phase === "waiting" ? 1 : 0);
  const why = link.refusal ? ` ${link.refusal}.` : "";
  const mend =
    !link.everOpen && link.attempt >= 3
      ? " Is it running? Where browsers reach it under another name or port, set service.public_url."
      : "";
  return `${what} at ${link.base}: ${next} (attempt ${attempt}).${why}${mend}`;
}

/** Whether the page's theme is a dark one. */
function isDark(element) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.fillStyle = getComputedStyle(element).getPropertyValue("--st-background-color").trim() || "#ffffff";
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(pen.fillStyle.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue < 128;
}

/** The same for panels beside the one that tells the whole of it. */
function shortTrouble(link) {
  if (!troubleWith(link)) return null;
  return link.attempt > 1 || link.everOpen ? "No connection to the camera service." : "Connecting to the camera service …";
}

/**
 * A panel's entry point. Streamlit calls it again each time the panel's data or the theme changes, and calls what it
 * returns once, when the panel leaves the page: so build once, then only update.
 */
function panel(build) {
  const views = new WeakMap();
  return (component) => {
    const root = component.parentElement;
    let view = views.get(root);
    if (!view) {
      const link = getLink(component.data.service);
      const ends = [];
      view = build({
        root: root.querySelector(".panel"),
        link,
        on: (kind, handler) => ends.push(link.on(kind, handler)),
        atEnd: (handler) => ends.push(handler),
      });
      view.leave = () => {
        views.delete(root);
        for (const end of ends) end();
      };
      views.set(root, view);
    }
    root.querySelector(".panel").classList.toggle("dark", isDark(root.host ?? root));
    view.update?.(component);
    return view.leave;
  };
}
