/* Latency of both traffic classes: percentiles against their objectives, a time line on which stalls stand out, and
 * what the model server says of itself. TTFT and ITL are never mixed. */

const SPAN_S = 120;
const LOW_MS = 5;
const HIGH_MS = 30000;
const TICKS_MS = [10, 100, 1000, 10000];
const MAIN = ["chat", "camera"];

/** Where a value lies between LOW_MS and HIGH_MS on a logarithmic scale, 0 to 1. */
function place(ms) {
  const share = Math.log(Math.max(LOW_MS, Math.min(HIGH_MS, ms)) / LOW_MS) / Math.log(HIGH_MS / LOW_MS);
  return Math.max(0, Math.min(1, share));
}

class Row {
  constructor(name, kind) {
    this.kind = kind;
    this.cells = { p50_ms: h("td"), p95_ms: h("td"), p99_ms: h("td") };
    this.verdict = h("td", { class: "slo" });
    this.track = h("div", { class: "track" });
    this.marks = {};
    for (const mark of ["p50_ms", "p95_ms", "p99_ms"]) {
      this.marks[mark] = h("i", { class: `mark ${mark}` });
      this.track.append(this.marks[mark]);
    }
    this.slo = h("i", { class: "objective" });
    this.range = h("i", { class: "range" });
    this.track.append(this.range, this.slo);
    this.root = h(
      "tr",
      { "data-class": name, "data-figure": kind },
      h("th", { scope: "row", title: kind === "ttft" ? "Time to first token: from the moment the request was due" : "Inter-token latency: each gap between two tokens is a sample" }, kind.toUpperCase()),
      ...Object.values(this.cells),
      h("td", { class: "tracks", "aria-hidden": "true" }, this.track),
      this.verdict,
    );
  }

  update(figures, objective_ms, which) {
    for (const [name, cell] of Object.entries(this.cells)) {
      const value = figures[name];
      put(cell, duration(value));
      const judged = name === which;
      cell.className = judged ? (value !== null && value > objective_ms ? "judged bad" : "judged") : "";
      this.marks[name].style.left = `${place(value ?? LOW_MS) * 100}%`;
      show(this.marks[name], value !== null);
    }
    show(this.range, figures.p50_ms !== null);
    if (figures.p50_ms !== null) {
      this.range.style.left = `${place(figures.p50_ms) * 100}%`;
      this.range.style.width = `${(place(figures.p99_ms) - place(figures.p50_ms)) * 100}%`;
    }
    this.slo.style.left = `${place(objective_ms) * 100}%`;
    this.track.title = `${count(figures.count)} samples, highest ${duration(figures.max_ms)}; objective: ${which.slice(0, 3)} at most ${objective(objective_ms)}`;
    const value = figures[which];
    const missed = value !== null && value > objective_ms;
    const sign = value === null ? "" : missed ? " ✕" : " ✓";
    put(this.verdict, `${which.slice(0, 3)} ≤ ${objective(objective_ms)}${sign}`);
    this.verdict.className = `slo ${value === null ? "soft" : missed ? "bad" : "good"}`;
    this.verdict.title = value === null ? "no sample yet" : missed ? "objective missed in this window" : "objective met in this window";
  }
}

class Group {
  constructor(name) {
    this.name = name;
    this.load = h("span", { class: "load soft" });
    this.head = h("tr", { class: "class" }, h("th", { scope: "rowgroup", colspan: "6" }, h("i", { class: `dot ${name}`, "aria-hidden": "true" }), h("span", { class: "word" }, name), this.load));
    this.ttft = new Row(name, "ttft");
    this.itl = new Row(name, "itl");
    this.root = h("tbody", { "data-class": name }, this.head, this.ttft.root, this.itl.root);
  }

  update(view) {
    const skipped = Object.values(view.skipped).reduce((a, b) => a + b, 0);
    const parts = [`${view.in_flight} in flight`, `${view.waiting} waiting`, `${count(view.done)} done`];
    const failures = Object.entries(view.failures ?? {}).map(([why, number]) => `${number} failed: ${why}`);
    if (view.failed) parts.push(`${count(view.failed)} failed`);
    if (view.cancelled) parts.push(`${count(view.cancelled)} cancelled`);
    if (skipped) parts.push(`${count(skipped)} skipped`);
    parts.push(`${count(view.stalls)} ${view.stalls === 1 ? "stall" : "stalls"}`);
    put(this.load, parts.join(" · "));
    const left = Object.entries(view.skipped).map(([why, number]) => `${number} skipped: ${why}`);
    this.load.title = [...failures, ...left].join("\n");
    this.ttft.update(view.ttft, view.ttft_slo_p95_ms, "p95_ms");
    this.itl.update(view.itl, view.itl_slo_p99_ms, "p99_ms");
    show(this.root, MAIN.includes(view.traffic_class) || view.in_flight + view.waiting + view.done + view.ttft.count > 0);
  }
}

function rate(tokens) {
  return tokens === null || tokens === undefined ? "–" : `${tokens < 9.95 ? tokens.toFixed(1) : Math.round(tokens)} tokens/s`;
}

/** A figure of the server with its name and, for a share, a bar. */
function fact(name, title, withBar = false) {
  const value = h("b", {}, "–");
  const fill = withBar ? h("i") : null;
  const root = h("div", { class: "fact", title }, h("span", { class: "soft small" }, name), value, withBar ? h("div", { class: "fill", "aria-hidden": "true" }, fill) : null);
  return {
    root,
    set(text, share = null) {
      put(value, text);
      if (fill) fill.style.width = `${Math.round((share ?? 0) * 100)}%`;
    },
  };
}

class TimeLine {
  constructor(link, root) {
    this.link = link;
    this.root = root;
    this.canvas = h("canvas", { role: "img", "aria-label": "Time line of every TTFT and ITL sample of both classes" });
    this.stage = h("div", { class: "timeline" }, this.canvas);
  }

  colour(name) {
    return getComputedStyle(this.root).getPropertyValue(name).trim();
  }

  paint(classes) {
    const area = this.stage.getBoundingClientRect();
    if (area.width < 40 || area.height < 40) return;
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    const [width, height] = [Math.round(area.width), Math.round(area.height)];
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const size = Math.max(10, Math.min(18, parseFloat(getComputedStyle(this.root).fontSize) * 0.8));
    const plot = { left: size * 3.6, right: width - size * 0.5, top: 2, bottom: height - size * 1.5 };
    const now = this.link.now();
    const lanes = classes.map((view, index) => {
      const high = (plot.bottom - plot.top) / classes.length;
      return { view, top: plot.top + index * high + 3, bottom: plot.top + (index + 1) * high - 3 };
    });
    const x = (at) => plot.right - ((now - at) / SPAN_S) * (plot.right - plot.left);
    pen.font = `${size}px sans-serif`;
    const text = this.colour("--st-text-color");
    const line = this.colour("--line") || "rgb(128 128 128 / 25%)";
    this.paintTime(pen, plot, height, size, x, now, text);
    let stalls = 0;
    for (const lane of lanes) stalls += this.paintLane(pen, plot, lane, size, x, now, text, line);
    this.canvas.setAttribute("aria-label", `Time line of the last ${SPAN_S} seconds: every TTFT and ITL sample of ${classes.map((c) => c.traffic_class).join(" and ")}; ${stalls} stalls`);
    this.canvas.dataset.samples = this.link.samples.length;
  }

  paintTime(pen, plot, height, size, x, now, text) {
    pen.textBaseline = "bottom";
    pen.fillStyle = text;
    pen.globalAlpha = 0.65;
    for (let back = 0; back <= SPAN_S; back += 30) {
      const at = x(now - back);
      pen.textAlign = back === 0 ? "right" : back === SPAN_S ? "left" : "center";
      pen.fillText(back === 0 ? "now" : `−${back} s`, at, height);
      pen.globalAlpha = 0.12;
      pen.fillRect(at, plot.top, 1, plot.bottom - plot.top);
      pen.globalAlpha = 0.65;
    }
    pen.globalAlpha = 1;
  }

  paintLane(pen, plot, lane, size, x, now, text, line) {
    const { view, top, bottom } = lane;
    const y = (ms) => bottom - place(ms) * (bottom - top);
    pen.fillStyle = text;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    let lastLabel = Infinity;
    for (const tick of TICKS_MS) {
      const at = y(tick);
      pen.globalAlpha = 0.12;
      pen.fillRect(plot.left, at, plot.right - plot.left, 1);
      pen.globalAlpha = 0.65;
      if (lastLabel - at > size * 1.1 && at > top + size / 3) {
        pen.fillText(tick < 1000 ? `${tick} ms` : `${tick / 1000} s`, plot.left - 5, at);
        lastLabel = at;
      }
    }
    pen.globalAlpha = 1;
    pen.fillStyle = line;
    pen.fillRect(plot.left, bottom + 2, plot.right - plot.left, 1);

    const colour = this.colour(`--${view.traffic_class}`) || this.colour("--document");
    const bad = this.colour("--bad");
    const level = y(view.itl_slo_p99_ms);
    pen.save();
    pen.beginPath();
    pen.rect(plot.left, top - 3, plot.right - plot.left + 4, bottom - top + 6);
    pen.clip();
    let stalls = 0;
    for (const sample of this.link.samples) {
      if (sample.traffic_class !== view.traffic_class || now - sample.at_s > SPAN_S) continue;
      const at = x(sample.at_s);
      if (sample.kind === "itl" && sample.stall) {
        // A stall is a time without a token: it covers the time it took.
        stalls += 1;
        const from = x(sample.at_s - sample.value_ms / 1000);
        const wide = Math.max(3, at - from);
        pen.fillStyle = bad;
        pen.globalAlpha = 0.22;
        pen.fillRect(at - wide, top, wide, bottom - top);
        pen.globalAlpha = 1;
        pen.fillRect(at - wide, y(sample.value_ms) - 2, wide, 4);
      } else if (sample.kind === "itl") {
        pen.fillStyle = colour;
        pen.globalAlpha = 0.8;
        pen.fillRect(at - 1, y(sample.value_ms) - 1, 2.4, 2.4);
        pen.globalAlpha = 1;
      }
    }
    const d = size * 0.36;
    for (const sample of this.link.samples) {
      if (sample.kind !== "ttft" || sample.traffic_class !== view.traffic_class || now - sample.at_s > SPAN_S) continue;
      const [at, high] = [x(sample.at_s), y(sample.value_ms)];
      pen.beginPath();
      pen.moveTo(at, high - d);
      pen.lineTo(at + d, high);
      pen.lineTo(at, high + d);
      pen.lineTo(at - d, high);
      pen.closePath();
      pen.lineWidth = 1.8;
      pen.strokeStyle = sample.value_ms > view.ttft_slo_p95_ms ? bad : colour;
      pen.stroke();
    }
    pen.restore();
    pen.strokeStyle = bad;
    pen.lineWidth = 1.2;
    pen.setLineDash([5, 4]);
    pen.beginPath();
    pen.moveTo(plot.left, level);
    pen.lineTo(plot.right, level);
    pen.stroke();
    pen.setLineDash([]);
    pen.textAlign = "left";
    pen.textBaseline = "top";
    pen.font = `600 ${size}px sans-serif`;
    const wide = pen.measureText(view.traffic_class).width;
    pen.globalAlpha = 0.85;
    pen.fillStyle = this.colour("--st-secondary-background-color");
    pen.fillRect(plot.left + 1, top - 2, wide + 8, size * 1.2);
    pen.globalAlpha = 1;
    pen.fillStyle = colour;
    pen.fillText(view.traffic_class, plot.left + 5, top);
    pen.font = `${size}px sans-serif`;
    return stalls;
  }
}

export default panel(({ root, link, on, atEnd }) => {
  root.classList.add("box");
  const facts = {
    running: fact("Running", "Requests the model server is working on"),
    waiting: fact("Waiting", "Requests waiting inside the model server"),
    kv: fact("KV cache", "Share of the key-value cache in use", true),
    budget: fact("Step budget", "The most tokens one step of the engine may process"),
    chunk: fact("Long prefill", "The most tokens of one long prompt that a step may take"),
    hits: fact("Prefix · picture hits", "Share of prompt tokens found in the prefix cache, and of pictures found in the multimodal cache"),
    preempted: fact("Preemptions", "Requests put back for want of cache, since the server started"),
    step: fact("Tokens a step", "Tokens the engine processed in a step, lately"),
    prefill: fact("Prefill", "Prompt tokens the engine processed a second, lately"),
    decode: fact("Decode", "Tokens the engine wrote a second, lately"),
  };
  const strip = h("div", { class: "facts", "aria-label": "The model server's own figures" }, ...Object.values(facts).map((item) => item.root));
  const groups = new Map();
  const note = h("span", { class: "soft small" });
  const head = h("thead", {}, h("tr", {}, h("td"), h("th", { scope: "col" }, "p50"), h("th", { scope: "col" }, "p95"), h("th", { scope: "col" }, "p99"), h("td", { class: "tracks" }, scale()), h("th", { scope: "col", class: "slo" }, "SLO")));
  const table = h("table", {}, head);
  const timeline = new TimeLine(link, root);
  const stall = h("span", { class: "newest" });
  const legend = h(
    "div",
    { class: "legend small soft" },
    h("span", {}, h("i", { class: "gap chat" }), h("i", { class: "gap camera" }), "ITL, each gap"),
    h("span", {}, h("i", { class: "first" }), "TTFT"),
    h("span", {}, h("i", { class: "stall" }), "stall: a gap above its objective"),
    h("span", {}, h("i", { class: "dashed" }), "ITL objective"),
    stall,
    note,
  );
  const empty = h("div", { class: "quiet", role: "status" });
  const body = h("div", { class: "content" }, h("div", { class: "figures" }, table), h("div", { class: "chart" }, timeline.stage, legend));
  root.append(strip, body, empty);

  function scale() {
    const track = h("div", { class: "track scale" });
    for (const tick of TICKS_MS) {
      const mark = h("span", {}, tick < 1000 ? `${tick} ms` : `${tick / 1000} s`);
      mark.style.left = `${place(tick) * 100}%`;
      track.append(mark);
    }
    return track;
  }

  function shownClasses() {
    const classes = link.latency?.classes ?? [];
    const order = (view) => (MAIN.includes(view.traffic_class) ? MAIN.indexOf(view.traffic_class) : 9);
    return [...classes].sort((a, b) => order(a) - order(b));
  }

  function drawTable() {
    const classes = shownClasses();
    for (const view of classes) {
      let group = groups.get(view.traffic_class);
      if (!group) {
        group = new Group(view.traffic_class);
        groups.set(view.traffic_class, group);
        table.append(group.root);
      }
      group.update(view);
    }
    if (link.latency) put(note, `figures of the last ${Math.round(link.latency.window_s / 60)} min`);
    drawStall();
    drawState();
    drawLine();
  }

  /** The newest stall and what caused it; its other parts are in the tooltip. */
  function drawStall() {
    const newest = link.latency?.stalls?.[0];
    show(stall, Boolean(newest));
    if (!newest) return;
    put(stall, `newest stall: ${newest.traffic_class} ${(newest.duration_ms / 1000).toFixed(2)} s, ${newest.cause}`);
    stall.title = newest.parts.join("\n");
  }

  function drawState() {
    const trouble = shortTrouble(link);
    show(body, Boolean(link.latency));
    show(empty, !link.latency);
    if (!link.latency) put(empty, trouble ?? "Waiting for the first figures …");
    root.dataset.stale = trouble ? "yes" : "no";
  }

  function drawLine() {
    if (document.hidden || !link.latency) return;
    const active = shownClasses().filter((view) => MAIN.includes(view.traffic_class) || view.ttft.count > 0);
    timeline.paint(active);
  }

  function drawFacts() {
    const { engine, server } = link.status;
    facts.running.set(count(engine.running));
    facts.waiting.set(count(engine.waiting));
    facts.kv.set(percent(engine.kv_cache_usage, 1), engine.kv_cache_usage);
    const budget = server.max_num_scheduled_tokens ?? server.max_num_batched_tokens;
    facts.budget.set(budget === null ? "–" : `${count(budget)} tokens`);
    const chunk = server.long_prefill_token_threshold;
    facts.chunk.set(chunk ? `≤ ${count(chunk)} tokens` : "–");
    facts.step.set(engine.tokens_per_step === null ? "–" : engine.tokens_per_step.toFixed(0));
    facts.prefill.set(rate(engine.prompt_tokens_per_s));
    facts.decode.set(rate(engine.generation_tokens_per_s));
    facts.hits.set(`${percent(engine.prefix_cache_hit_rate)} · ${percent(engine.multimodal_cache_hit_rate)}`);
    facts.preempted.set(count(engine.preemptions));
  }

  const timer = setInterval(drawLine, 250);
  const watcher = new ResizeObserver(drawLine);
  watcher.observe(timeline.stage);
  atEnd(() => {
    clearInterval(timer);
    watcher.disconnect();
  });
  on("latency", drawTable);
  on("status", drawFacts);
  on("phase", drawState);
  drawState();
  if (link.latency) drawTable();
  if (link.status) drawFacts();
  return { update: drawLine };
});
