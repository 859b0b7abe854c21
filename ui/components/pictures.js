/* Live pictures: one canvas a camera, with the people's boxes, what state each is in, and how old the picture is. */

const STATES = {
  new: { colour: "#b8c0cc", dash: [2, 4], words: "new: not confirmed yet" },
  watched: { colour: "#4cc9f0", dash: [7, 5], words: "watched: no good view yet" },
  waiting: { colour: "#ffd23f", dash: [12, 4], words: "waiting for its turn" },
  describing: { colour: "#ff9f43", dash: [], words: "being described" },
  described: { colour: "#4ade80", dash: [], words: "described" },
  skipped: { colour: "#d6a2ff", dash: [3, 3], words: "not described" },
};
const OLD_MS = 3000;

class Tile {
  constructor(camera, link, act) {
    this.id = camera.camera_id;
    this.link = link;
    this.camera = camera;
    this.shown = 0;
    this.name = h("span", { class: "name" });
    this.facts = h("span", { class: "soft small facts" });
    this.age = h("span", { class: "age", title: "Frame age: from the picture's arrival to its being drawn here" });
    this.pause = h("button", { class: "plain", onclick: () => act(this.camera.state === "paused" ? "resume" : "pause", this.id) });
    this.remove = h("button", { class: "plain", onclick: () => this.askRemove(act) }, "Remove");
    this.canvas = h("canvas", { role: "img", "data-camera": camera.name });
    this.note = h("div", { class: "note", role: "status", hidden: true });
    this.stage = h("div", { class: "stage" }, this.canvas, this.note);
    this.root = h(
      "section",
      { class: "tile", "aria-label": `Camera ${camera.name}` },
      h("header", {}, this.name, this.facts, this.age, this.pause, this.remove),
      this.stage,
    );
    this.canvas.addEventListener("pointermove", (event) => this.tell(event));
  }

  askRemove(act) {
    if (this.sure) {
      act("remove", this.id);
      put(this.remove, "Removing …");
      return;
    }
    this.sure = true;
    put(this.remove, "Really remove?");
    setTimeout(() => {
      this.sure = false;
      put(this.remove, "Remove");
    }, 4000);
  }

  /** Takes the newest frame; one that comes while another is being decoded replaces any that waits. */
  async take(frame) {
    this.next = frame;
    if (this.decoding) return;
    this.decoding = true;
    while (this.next) {
      const current = this.next;
      this.next = null;
      try {
        const bitmap = await createImageBitmap(new Blob([current.jpeg], { type: "image/jpeg" }));
        current.jpeg = null;
        this.bitmap?.close();
        this.bitmap = bitmap;
        this.frame = current;
        this.draw();
      } catch {
        /* a damaged picture: the next one comes soon */
      }
    }
    this.decoding = false;
  }

  draw() {
    if (!this.bitmap || this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      if (this.bitmap) this.paint();
    });
  }

  paint() {
    const room = this.stage.getBoundingClientRect();
    if (room.width < 2 || room.height < 2) return;
    const { bitmap, frame, canvas } = this;
    const scale = Math.min(room.width / bitmap.width, room.height / bitmap.height);
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    const width = Math.round(bitmap.width * scale);
    const height = Math.round(bitmap.height * scale);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.drawImage(bitmap, 0, 0, width, height);
    const size = Math.max(11, Math.min(22, width / 58));
    const taken = [];
    const order = [...frame.tracks].sort((a, b) => b.box[3] - a.box[3]);
    for (const track of order) this.paintTrack(pen, track, width, height, size, taken);
    // A picture drawn again, as when the page changes its size, is the same picture.
    if (frame !== this.painted) this.shown += 1;
    this.painted = frame;
    canvas.dataset.frames = this.shown;
    if (this.note.hidden) this.drawAge();
    else this.update(this.camera, troubleWith(this.link));
    const said = `${frame.tracks.length} people in view: ${frame.tracks.map((t) => `${personName(t.person_id)} ${t.state}`).join(", ")}`;
    if (!this.saidAt || Date.now() - this.saidAt > 2000) {
      this.saidAt = Date.now();
      canvas.setAttribute("aria-label", `${this.camera.name}, ${said}`);
    }
  }

  paintTrack(pen, track, width, height, size, taken) {
    const look = STATES[track.state] ?? STATES.new;
    const x = track.box[0] * width;
    const y = track.box[1] * height;
    const w = (track.box[2] - track.box[0]) * width;
    const tall = (track.box[3] - track.box[1]) * height;
    pen.lineWidth = size / 3.2;
    pen.setLineDash([]);
    pen.strokeStyle = "rgb(0 0 0 / 45%)";
    pen.strokeRect(x, y, w, tall);
    pen.lineWidth = size / 5.5;
    pen.setLineDash(look.dash);
    pen.strokeStyle = look.colour;
    pen.strokeRect(x, y, w, tall);
    pen.setLineDash([]);

    const first = `${personName(track.person_id)} ${track.state}`;
    const reason = track.reason && track.reason !== track.state && width > 420 ? shorten(track.reason, 34) : "";
    pen.font = `600 ${size}px sans-serif`;
    let wide = pen.measureText(first).width;
    pen.font = `${size * 0.86}px sans-serif`;
    if (reason) wide = Math.max(wide, pen.measureText(reason).width);
    const high = size * (reason ? 2.35 : 1.3);
    const left = Math.max(0, Math.min(width - wide - 8, x));
    let top = y - high - 2;
    if (top < 0) top = Math.min(y + tall + 2, height - high);
    const spot = [left, top, left + wide + 8, top + high];
    // Where labels would cover each other, the nearer person (lower in the picture) keeps the whole one.
    const clash = taken.some((o) => spot[0] < o[2] && spot[2] > o[0] && spot[1] < o[3] && spot[3] > o[1]);
    if (clash) return;
    taken.push(spot);
    pen.fillStyle = "rgb(12 16 22 / 74%)";
    pen.fillRect(left, top, wide + 8, high);
    pen.fillStyle = look.colour;
    pen.fillRect(left, top, 3, high);
    pen.font = `600 ${size}px sans-serif`;
    pen.textBaseline = "top";
    pen.fillText(first, left + 6, top + size * 0.15);
    if (!reason) return;
    pen.fillStyle = "#f1f4f8";
    pen.font = `${size * 0.86}px sans-serif`;
    pen.fillText(reason, left + 6, top + size * 1.28);
  }

  /** The whole reason of the person under the pointer. */
  tell(event) {
    if (!this.frame) return;
    const area = this.canvas.getBoundingClientRect();
    const x = (event.clientX - area.left) / area.width;
    const y = (event.clientY - area.top) / area.height;
    const hit = this.frame.tracks.find((t) => x >= t.box[0] && x <= t.box[2] && y >= t.box[1] && y <= t.box[3]);
    this.canvas.title = hit ? `${personName(hit.person_id)} ${hit.state}: ${hit.reason || STATES[hit.state]?.words}` : "";
  }

  drawAge() {
    if (this.aged && Date.now() - this.aged < 250) return;
    this.aged = Date.now();
    if (!this.frame) return put(this.age, "");
    const age = (this.link.now() - this.frame.frame_s) * 1000;
    put(this.age, this.camera.state === "live" ? `frame age ${duration(age)}` : "");
    this.age.classList.toggle("bad", age > OLD_MS);
  }

  update(camera, trouble) {
    this.camera = camera;
    put(this.name, camera.name);
    const rates = [];
    if (camera.source_fps) rates.push(`${camera.source_fps.toFixed(1)} frames/s`);
    if (camera.detect_fps) rates.push(`${camera.detect_fps.toFixed(1)} detections/s`);
    rates.push(`${count(camera.people_described)} of ${count(camera.people_seen)} people described`);
    put(this.facts, rates.join(" · "));
    this.facts.title = [
      `source ${camera.source}`,
      `${camera.width_px}×${camera.height_px} px`,
      `${count(camera.frames)} frames, ${count(camera.frames_dropped)} dropped, ${count(camera.frames_damaged)} damaged`,
      `frame age p95 ${duration(camera.frame_age_p95_ms)}`,
      `${count(camera.reconnects)} reconnects`,
    ].join("\n");
    put(this.pause, camera.state === "paused" ? "Resume" : "Pause");
    show(this.pause, camera.state !== "ended");
    const [head, text] = this.noteFor(camera, trouble);
    show(this.note, Boolean(head));
    if (head) {
      const key = head + text;
      if (this.note.dataset.key !== key) {
        this.note.dataset.key = key;
        this.note.replaceChildren(h("strong", {}, head), ...(text ? [h("span", {}, text)] : []));
      }
    }
    this.root.dataset.state = trouble ? "lost" : camera.state;
    this.drawAge();
  }

  noteFor(camera, trouble) {
    if (trouble) return ["No live picture", this.bitmap ? "This is the last one." : ""];
    if (camera.state === "lost") return ["Camera lost", camera.detail];
    if (camera.state === "connecting") return ["Connecting", camera.detail];
    if (camera.state === "paused") return ["Paused", ""];
    if (camera.state === "ended") return ["The video has ended", camera.detail];
    if (!this.bitmap) return ["Waiting for the first picture", camera.detail];
    if (camera.detail) return [camera.detail, ""];
    const age = (this.link.now() - this.frame.frame_s) * 1000;
    if (age > OLD_MS) return ["No new picture", `The last one is ${duration(age)} old.`];
    return ["", ""];
  }

  leave() {
    cancelAnimationFrame(this.pending);
    this.bitmap?.close();
    this.bitmap = null;
    this.next = null;
    this.root.remove();
  }
}

function shorten(text, limit) {
  return text.length <= limit ? text : `${text.slice(0, limit - 1).trimEnd()}…`;
}

export default panel(({ root, link, on, atEnd }) => {
  const tiles = new Map();
  const grid = h("div", { class: "grid" });
  const empty = h("div", { class: "quiet", role: "status" });
  const legend = h("div", { class: "legend small", "aria-label": "What the colours mean" });
  const counters = {};
  for (const [state, look] of Object.entries(STATES)) {
    counters[state] = h("b", {}, "0");
    const sample = h("i", { "aria-hidden": "true" });
    sample.style.background = look.colour;
    legend.append(h("span", { title: look.words }, sample, `${state} `, counters[state]));
  }
  root.classList.add("box");
  root.append(grid, empty, legend);

  let send = () => {};
  const act = (what, camera) => send("action", { what, camera_id: camera, at: Date.now() });

  function arrange() {
    const number = tiles.size;
    const area = grid.getBoundingClientRect();
    if (!number || area.width < 2) return;
    let best = { columns: 1, scale: 0 };
    for (let columns = 1; columns <= number; columns += 1) {
      const rows = Math.ceil(number / columns);
      const scale = Math.min(area.width / columns / 16, (area.height / rows - 30) / 9);
      if (scale > best.scale) best = { columns, scale };
    }
    grid.style.gridTemplateColumns = `repeat(${best.columns}, minmax(0, 1fr))`;
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    const width = Math.ceil((area.width / best.columns) * ratio / 80) * 80;
    link.want({ cameras: "all", max_width_px: Math.max(160, Math.min(1280, width)) });
    for (const tile of tiles.values()) tile.draw();
  }

  function draw() {
    const trouble = troubleWith(link);
    const cameras = link.status?.cameras ?? [];
    const ids = new Set(cameras.map((camera) => camera.camera_id));
    let changed = false;
    for (const [id, tile] of tiles) {
      if (ids.has(id)) continue;
      tile.leave();
      tiles.delete(id);
      changed = true;
    }
    const tally = {};
    for (const camera of cameras) {
      let tile = tiles.get(camera.camera_id);
      if (!tile) {
        tile = new Tile(camera, link, act);
        tiles.set(camera.camera_id, tile);
        grid.append(tile.root);
        changed = true;
      }
      tile.update(camera, trouble);
      const tracks = camera.state === "live" ? (tile.frame?.tracks ?? camera.tracks) : [];
      for (const track of tracks) tally[track.state] = (tally[track.state] ?? 0) + 1;
    }
    for (const state of Object.keys(STATES)) put(counters[state], String(tally[state] ?? 0));
    show(grid, cameras.length > 0);
    show(legend, cameras.length > 0);
    show(empty, cameras.length === 0);
    put(
      empty,
      trouble ?? (link.status ? "No camera yet. Add one, or a video, with “Add camera” at the top right." : "Waiting for the camera service …"),
    );
    if (changed) arrange();
  }

  const watcher = new ResizeObserver(arrange);
  watcher.observe(grid);
  atEnd(() => {
    watcher.disconnect();
    for (const tile of tiles.values()) tile.leave();
  });
  on("status", draw);
  on("phase", draw);
  on("frame", (frame) => tiles.get(frame.camera_id)?.take(frame));
  draw();
  return {
    update: (component) => {
      send = component.setTriggerValue;
    },
  };
});
