/* What the model says of each person, as it says it, with the stages the time went to. */

const SHOWN = 40;
const STAGE_WORDS = {
  waiting: "waiting",
  reading: "reading the picture",
  writing: "writing",
  done: "",
  failed: "failed",
  cancelled: "cancelled",
  skipped: "not described",
};
const STAGES = [
  ["frame", "frame age", "Frame age: from the picture's arrival to its being picked"],
  ["queue", "waiting", "Waiting: from being picked to being sent to the model server"],
  ["prefill", "to first token", "From being sent to the first token: the server's queue, the picture's encoding and the prompt's prefill"],
  ["decode", "writing", "From the first token to the last"],
];

class Card {
  constructor(view, link) {
    this.link = link;
    // Asked for as the page's own (CORS): by address instead of by name, no two hosts count as the same site.
    this.thumb = h("img", { alt: "", class: "none", crossorigin: "anonymous", decoding: "async", width: 72, height: 96 });
    this.thumb.addEventListener("error", () => this.thumb.classList.add("none"));
    this.thumb.addEventListener("load", () => {
      this.loaded = true;
      this.thumb.classList.remove("none");
    });
    this.head = h("div", { class: "head" });
    this.who = h("span", { class: "who" });
    this.when = h("time", { class: "soft small" });
    this.state = h("span", { class: "state small" });
    this.head.append(this.who, this.state, this.when);
    this.text = h("p", { class: "text" });
    this.bar = h("div", { class: "bar", "aria-hidden": "true" });
    this.parts = STAGES.map(([name, , title]) => h("i", { class: name, title }));
    this.bar.append(...this.parts);
    this.figures = h("div", { class: "figures small soft" });
    this.root = h("article", { class: "card" }, this.thumb, h("div", { class: "body" }, this.head, this.text, this.bar, this.figures));
    this.update(view);
  }

  update(view) {
    this.view = view;
    this.root.dataset.state = view.state;
    this.root.dataset.id = view.description_id;
    put(this.who, `${view.camera} · ${personName(view.person_id)}`);
    const time = clock(view.frame_s);
    put(this.when, time);
    this.when.dateTime = new Date(view.frame_s * 1000).toISOString();
    this.root.setAttribute("aria-label", `${view.camera}, ${personName(view.person_id)}, ${time}`);
    this.showPicture(view);
    this.say();
    this.tick(this.link.now());
  }

  /** The thumbnail may come after the description was announced: asked for again at each change until it is there. */
  showPicture(view) {
    if (!view.thumbnail || this.loaded) {
      if (!this.loaded) this.thumb.classList.add("none");
      return;
    }
    if (this.askedIn === view.state) return;
    this.askedIn = view.state;
    this.thumb.alt = `${personName(view.person_id)} on ${view.camera}`;
    this.thumb.src = this.link.url(view.thumbnail);
  }

  /** What an open description is at: in the queue, with the model but without a token, or being written. */
  stage() {
    const { view } = this;
    if (view.state !== "waiting" && view.state !== "streaming") return view.state;
    if (view.text || view.ttft_ms !== null) return "writing";
    return view.sent_s === null ? "waiting" : "reading";
  }

  /** Only the text changes with each token. */
  say() {
    const { view } = this;
    this.root.dataset.stage = this.stage();
    put(this.state, STAGE_WORDS[this.stage()] ?? view.state);
    put(this.text, view.text || view.reason || "");
    this.text.classList.toggle("soft", !view.text);
    const ended = view.state === "failed" || view.state === "cancelled";
    this.text.title = view.text && ended ? view.reason : "";
  }

  tick(now) {
    const { view } = this;
    if (view.state === "skipped") return;
    const stage = this.stage();
    const open = stage === "waiting" || stage === "reading" || stage === "writing";
    const running = open ? Math.max(0, (now - view.due_s) * 1000) : null;
    const waiting = view.waiting_ms ?? (stage === "waiting" ? running : null);
    const ttft = view.ttft_ms ?? (stage === "reading" ? running : null);
    const total = view.total_ms ?? (stage === "writing" ? running : null);
    const between = (from, to) => (from === null || to === null ? 0 : Math.max(0, to - from));
    const lengths = [view.frame_age_ms ?? 0, waiting ?? 0, between(waiting, ttft), between(ttft, total)];
    this.parts.forEach((part, index) => {
      part.style.flexGrow = String(Math.round(lengths[index]));
    });
    const figures = [`frame ${duration(view.frame_age_ms)}`];
    figures.push(waiting === null ? "never sent" : `waited ${duration(waiting)}`);
    this.figures.title = view.prompt_tokens
      ? `${count(view.prompt_tokens)} prompt tokens (${count(view.cached_tokens)} cached), ${count(view.completion_tokens)} written; ${view.model}`
      : "";
    if (view.ttft_ms !== null) figures.push(`TTFT ${duration(view.ttft_ms)}`);
    else if (open) figures.push(`no token for ${duration(running)}`);
    if (view.total_ms !== null) figures.push(`last token ${duration(view.total_ms)}`);
    put(this.figures, figures.map((text) => text.replaceAll(" ", "\u00a0")).join(" · "));
  }
}

export default panel(({ root, link, on, atEnd }) => {
  const cards = new Map();
  const heading = h("h2", { class: "title" }, "Descriptions");
  const tally = h("span", { class: "soft small" });
  const key = h("div", { class: "key small soft", "aria-label": "Stages of a description" });
  for (const [name, words, title] of STAGES) key.append(h("span", { title }, h("i", { class: name }), words));
  const feed = h("div", { class: "feed scroll", role: "feed", "aria-label": "Descriptions, newest first", tabindex: "0" });
  const empty = h("div", { class: "quiet", role: "status" });
  root.classList.add("box");
  const back = h("button", { class: "plain", hidden: true, onclick: () => send("action", { what: "live", at: Date.now() }) }, "Back to live");
  const others = h("div", { class: "others small soft", hidden: true });
  root.append(h("header", {}, heading, tally, back), key, feed, empty, others);
  let send = () => {};
  let found = null; // the result of a search, or null while the live feed shows

  function wanted() {
    if (found) return found.items;
    return [...link.descriptions.values()].sort((a, b) => b.due_s - a.due_s).slice(0, SHOWN);
  }

  function nothing() {
    const trouble = shortTrouble(link);
    if (trouble) return trouble;
    if (found) return found.problem || `No description holds “${found.query}”.`;
    const status = link.status;
    if (!status) return "Waiting for the camera service …";
    if (status.server.state === "down")
      return `The model server is down: nothing can be described. ${status.server.detail ?? ""}`;
    if (status.server.state !== "ready")
      return "The model server is starting. People are already being followed; descriptions begin when it is ready.";
    if (!status.cameras.length) return "No camera is being watched.";
    return "Nothing seen yet. A description appears here when a person was seen well.";
  }

  function draw() {
    const views = wanted();
    const ids = new Set(views.map((view) => view.description_id));
    for (const [id, card] of cards) {
      if (ids.has(id)) continue;
      card.root.remove();
      cards.delete(id);
    }
    let place = feed.firstElementChild;
    for (const view of views) {
      let card = cards.get(view.description_id);
      if (!card) {
        card = new Card(view, link);
        cards.set(view.description_id, card);
      } else if (card.view !== view) card.update(view);
      if (card.root === place) place = place.nextElementSibling;
      else feed.insertBefore(card.root, place);
    }
    put(heading, found ? `${found.more ? "Newest" : "Found"} ${views.length} for “${found.query}”` : "Descriptions");
    show(back, Boolean(found));
    drawTally();
    show(feed, views.length > 0);
    show(key, views.length > 0);
    show(empty, views.length === 0);
    if (!views.length) put(empty, nothing());
  }

  function drawTally() {
    const cameras = link.status?.cameras ?? [];
    let described = 0;
    const reasons = {};
    for (const camera of cameras) {
      described += camera.people_described;
      for (const [why, number] of Object.entries(camera.people_not_described ?? {})) reasons[why] = (reasons[why] ?? 0) + number;
    }
    put(tally, cameras.length && !found ? `${count(described)} people described` : "");
    const list = Object.entries(reasons).sort((a, b) => b[1] - a[1]).map(([why, number]) => `${count(number)} ${why}`);
    put(others, `Left without a description: ${list.join(", ")}`);
    others.title = list.join("\n");
    show(others, list.length > 0 && !found);
  }

  const timer = setInterval(() => {
    if (document.hidden) return;
    const now = link.now();
    for (const card of cards.values()) {
      if (card.view.state === "waiting" || card.view.state === "streaming") card.tick(now);
    }
    if (!cards.size) draw();
  }, 500);
  atEnd(() => clearInterval(timer));
  on("descriptions", draw);
  on("description", draw);
  on("status", drawTally);
  on("token", (message) => {
    const card = cards.get(message.description_id);
    const view = link.descriptions.get(message.description_id);
    if (!card || !view || found) return;
    card.view = view;
    card.say();
  });
  draw();
  return {
    update: (component) => {
      send = component.setTriggerValue;
      found = component.data.found ?? null;
      draw();
    },
  };
});
