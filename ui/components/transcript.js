/* The conversation: turns as the service keeps them; an answer in flight is followed straight from the service, so it
 * goes on after a reload, in another tab, and while the rest of the page is used. */

const FENCE = /^\s*(```|~~~)/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^\s*#{1,6}\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=\S)([^*]+?)\*(?![\w*])/gs;

/** Bold, italic and code; everything else, links, pictures and markup above all, stays the text it is. */
function inline(text) {
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > from) parts.push(text.slice(from, match.index));
    if (match[1]) parts.push(h("code", {}, match[2]));
    else if (match[3]) parts.push(h("strong", {}, match[3]));
    else parts.push(h("em", {}, match[4]));
    from = match.index + match[0].length;
  }
  if (from < text.length) parts.push(text.slice(from));
  return parts;
}

/** The few block forms of Markdown that models use, as elements. */
function blocks(text) {
  const out = [];
  let paragraph = [];
  let list = null;
  let code = null;
  const flush = () => {
    if (paragraph.length) out.push(h("p", {}, ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (const line of text.split("\n")) {
    if (code) {
      if (FENCE.test(line)) code = null;
      else code.append(line + "\n");
      continue;
    }
    const item = ITEM.exec(line);
    const heading = HEADING.exec(line);
    if (FENCE.test(line) || item || heading || !line.trim()) flush();
    if (!item) list = null;
    if (FENCE.test(line)) {
      code = h("code");
      out.push(h("pre", { tabindex: "0" }, code));
    } else if (item) {
      const tag = item[1] ? "ol" : "ul";
      if (list?.localName !== tag) {
        list = h(tag, item[1] ? { start: item[1] } : {});
        out.push(list);
      }
      list.append(h("li", {}, ...inline(item[2])));
    } else if (heading) out.push(h("p", { class: "heading" }, ...inline(heading[1])));
    else if (line.trim()) paragraph.push(line);
  }
  flush();
  return out;
}

class Turn {
  constructor(view, stop) {
    this.body = h("div", { class: "say" });
    this.meta = h("div", { class: "meta small soft" });
    this.stop = h("button", { class: "plain stop", hidden: true, onclick: () => { this.stop.disabled = true; put(this.stop, "Stopping …"); stop(this.view.answer_id); } }, "Stop");
    this.attachment = h("div", { class: "attachment small", hidden: true });
    this.root = h("div", { class: "turn", "data-role": view.role }, this.attachment, this.body, h("div", { class: "foot" }, this.meta, this.stop));
    this.since = Date.now();
    this.update(view);
  }

  get open() {
    return this.view.state === "waiting" || this.view.state === "streaming";
  }

  update(view) {
    this.view = view;
    this.root.dataset.state = view.state;
    this.root.setAttribute("aria-label", view.role === "user" ? "You" : "Answer");
    show(this.attachment, Boolean(view.attachment));
    put(this.attachment, view.attachment ? `Attached: ${view.attachment}` : "");
    this.draw();
  }

  draw() {
    const { view } = this;
    if (view.role === "user") put(this.body, view.text);
    else if (this.drawn !== view.text) {
      this.drawn = view.text;
      this.body.replaceChildren(...blocks(view.text));
    }
    show(this.stop, this.open);
    const parts = [];
    if (view.state === "waiting") parts.push(`waiting for the first token: ${duration(Date.now() - this.since)}`);
    if (view.state === "cancelled") parts.push("stopped");
    if (view.state === "failed") parts.push(`failed: ${view.detail || "no reason given"}`);
    else if (view.detail) parts.push(view.detail);
    if (view.ttft_ms !== null) parts.push(`TTFT ${duration(view.ttft_ms)}`);
    if (view.itl_p50_ms !== null) parts.push(`ITL p50 ${duration(view.itl_p50_ms)}, p99 ${duration(view.itl_p99_ms)}`);
    if (view.completion_tokens) parts.push(`${count(view.completion_tokens)} tokens`);
    put(this.meta, parts.join(" · "));
    this.meta.classList.toggle("bad", view.state === "failed");
  }
}

export default panel(({ root, link, on, atEnd }) => {
  root.classList.add("box");
  const tally = h("span", { class: "soft small" });
  const again = h("button", { class: "plain", onclick: () => send("action", { what: "new", at: Date.now() }) }, "New chat");
  const log = h("div", { class: "log scroll", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const empty = h("div", { class: "quiet", role: "status" });
  const unsentText = h("p", { class: "say" });
  const unsentReason = h("div", { class: "small bad" });
  const unsent = h(
    "div",
    { class: "unsent", role: "alert", hidden: true },
    unsentText,
    unsentReason,
    h("button", { class: "plain", onclick: () => send("action", { what: "resend", at: Date.now() }) }, "Send again"),
    h("button", { class: "plain", onclick: () => send("action", { what: "drop", at: Date.now() }) }, "Discard"),
  );
  root.append(h("header", {}, h("h2", { class: "title" }, "Chat"), tally, again), log, empty, unsent);
  let turns = [];
  let sessionId = null;
  let data = {};
  let send = () => {};
  let follower = null; // the answer being followed: {answerId, source, turn}
  let pinned = true;
  let drawing = 0;
  const ended = new Map(); // answers that ended since the page's data was made
  log.addEventListener("scroll", () => {
    pinned = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  });

  function settle() {
    if (pinned) log.scrollTop = log.scrollHeight;
  }

  function redraw(turn) {
    if (drawing) return;
    drawing = requestAnimationFrame(() => {
      drawing = 0;
      turn.draw();
      settle();
    });
  }

  function unfollow() {
    follower?.source.close();
    follower = null;
  }

  function follow(turn) {
    const answerId = turn.view.answer_id;
    if (follower?.answerId === answerId) {
      follower.turn = turn;
      turn.update({ ...turn.view, text: follower.text || turn.view.text, state: follower.text ? "streaming" : turn.view.state });
      return;
    }
    unfollow();
    const known = turn.view.text; // the service counts characters, JavaScript's length counts halves of some
    const after = [...known].length;
    const source = new EventSource(link.url(`/chat/answers/${encodeURIComponent(answerId)}/events?after=${after}`));
    const mine = { answerId, source, turn, text: known };
    follower = mine;
    source.addEventListener("token", (event) => {
      mine.text += JSON.parse(event.data).text;
      mine.turn.view = { ...mine.turn.view, text: mine.text, state: "streaming" };
      mine.turn.root.dataset.state = "streaming";
      redraw(mine.turn);
    });
    source.addEventListener("end", (event) => {
      const view = JSON.parse(event.data);
      ended.set(answerId, view);
      if (ended.size > 100) ended.delete(ended.keys().next().value);
      unfollow();
      mine.turn.update(view);
      drawState();
      settle();
    });
    source.addEventListener("error", () => {
      if (source.readyState !== EventSource.CLOSED || follower !== mine) return;
      unfollow();
      mine.turn.update({ ...mine.turn.view, state: "failed", detail: "the service no longer has this answer; ask again" });
      ended.set(answerId, mine.turn.view);
      drawState();
    });
  }

  /** Brings the turns on the page in line with the service's; an answer that ended meanwhile is not set back. */
  function take(session) {
    if (session?.session_id !== sessionId) {
      sessionId = session?.session_id ?? null;
      unfollow();
      turns = [];
      log.replaceChildren();
      pinned = true;
    }
    const views = session?.turns ?? [];
    while (turns.length > views.length) turns.pop().root.remove();
    views.forEach((given, index) => {
      const view = ended.get(given.answer_id) ?? given;
      const turn = turns[index];
      if (!turn) {
        const fresh = new Turn(view, (answerId) => send("action", { what: "stop", answer_id: answerId, at: Date.now() }));
        turns.push(fresh);
        log.append(fresh.root);
        pinned = true;
      } else if (follower?.turn !== turn) turn.update(view);
    });
    const last = turns.at(-1);
    if (last?.open && last.view.answer_id) follow(last);
    else unfollow();
    drawState();
    requestAnimationFrame(settle);
  }

  function drawState() {
    const status = link.status;
    show(unsent, Boolean(data.unsent));
    put(unsentText, data.unsent?.text ?? "");
    put(unsentReason, data.unsent ? `Not sent: ${data.unsent.reason}` : "");
    show(log, turns.length > 0);
    show(again, turns.length > 0);
    show(empty, turns.length === 0);
    const chat = link.latency?.classes.find((view) => view.traffic_class === "chat");
    put(tally, chat ? `${chat.in_flight} in flight · ${chat.waiting} waiting` : "");
    if (turns.length) return;
    let words = "Ask anything. The answer comes from the same model server that describes the pictures.";
    const trouble = shortTrouble(link);
    if (trouble) words = trouble;
    else if (data.problem) words = data.problem;
    else if (status?.server.state === "down") words = `The model server is down: nothing can be answered. ${status.server.detail ?? ""}`;
    else if (status && status.server.state !== "ready") words = "The model server is starting; questions can be asked when it is ready.";
    put(empty, words);
  }

  const timer = setInterval(() => {
    const last = turns.at(-1);
    if (last?.view.state === "waiting") last.draw();
  }, 500);
  atEnd(() => {
    clearInterval(timer);
    cancelAnimationFrame(drawing);
    unfollow();
  });
  let told = null;
  on("status", (status) => {
    drawState();
    const cameras = JSON.stringify(status.cameras.map((camera) => camera.camera_id));
    if (!data.session || cameras === JSON.stringify(data.cameras) || cameras === told) return;
    told = cameras;
    send("action", { what: "cameras", at: Date.now() });
  });
  on("latency", drawState);
  on("phase", (phase) => {
    drawState();
    // The conversation could not be read when the page was made: read it now that the service is there.
    if (phase === "open" && data.problem) send("action", { what: "retry", at: Date.now() });
  });
  return {
    update: (component) => {
      send = component.setTriggerValue;
      data = component.data;
      told = null;
      take(data.session);
    },
  };
});
