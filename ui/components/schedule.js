/* Steps of the simulated engine as a moving picture: the same requests under two schedules, on one time axis.
 *
 * Everything comes with the data; nothing is asked of the server while it plays. Requests' names become text only.
 */

const ROW_PX = 22;
const HEAD_PX = 26;
const GAP_PX = 18;
const AXIS_PX = 24;
const PLAY_MS = 9000; // a run from end to end, however long the simulated time

function node(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function time(seconds) {
  const ms = seconds * 1000;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

function isDark(element) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.fillStyle = getComputedStyle(element).getPropertyValue("--st-background-color").trim() || "#ffffff";
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(pen.fillStyle.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue < 128;
}

class Film {
  constructor(root) {
    this.root = root;
    this.at = 1; // 0..1 of the whole
    this.playing = false;
    this.button = node("button", { class: "plain", type: "button" }, "Play");
    this.slider = node("input", { type: "range", min: "0", max: "1000", value: "1000", "aria-label": "Time" });
    this.clock = node("span", { class: "soft clock" });
    this.canvas = node("canvas", { role: "img" });
    this.legend = node(
      "div",
      { class: "legend soft" },
      node("span", {}, node("i", { class: "prefill" }), "prefill of the long prompt"),
      node("span", {}, node("i", { class: "short" }), "prefill of a chat"),
      node("span", {}, node("i", { class: "decode" }), "decode"),
      node("span", {}, node("i", { class: "token" }), "a token reaches its reader"),
    );
    root.append(node("div", { class: "controls" }, this.button, this.slider, this.clock), this.canvas, this.legend);
    this.button.addEventListener("click", () => (this.playing ? this.pause() : this.play()));
    this.slider.addEventListener("input", () => {
      this.pause();
      this.at = Number(this.slider.value) / 1000;
      this.draw();
    });
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(root);
  }

  take(data) {
    const key = JSON.stringify(data);
    if (key !== this.key) {
      this.key = key;
      this.scenes = data.scenes;
      this.names = data.names;
      this.span = Math.max(...this.scenes.map((scene) => scene.end_s)) || 1;
      this.pause();
      this.at = 1;
      this.slider.value = "1000";
    }
    this.draw();
  }

  play() {
    if (this.at >= 1) this.at = 0;
    this.playing = true;
    this.button.textContent = "Pause";
    let last = performance.now();
    const move = (now) => {
      if (!this.playing) return;
      this.at = Math.min(1, this.at + (now - last) / PLAY_MS);
      last = now;
      this.slider.value = String(Math.round(this.at * 1000));
      this.draw();
      if (this.at >= 1) this.pause();
      else this.frame = requestAnimationFrame(move);
    };
    this.frame = requestAnimationFrame(move);
  }

  pause() {
    this.playing = false;
    cancelAnimationFrame(this.frame);
    this.button.textContent = "Play";
  }

  end() {
    this.pause();
    this.watcher.disconnect();
  }

  draw() {
    if (!this.scenes) return;
    const style = getComputedStyle(this.root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const width = Math.max(320, this.root.clientWidth);
    const rows = this.names.length;
    const height = this.scenes.length * (HEAD_PX + rows * ROW_PX + GAP_PX) + AXIS_PX;
    const scale = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const left = 108;
    const right = width - 12;
    const x = (seconds) => left + ((right - left) * seconds) / this.span;
    const now = this.at * this.span;
    const font = style.fontFamily;
    let top = 0;
    for (const scene of this.scenes) {
      pen.font = `600 13px ${font}`;
      pen.fillStyle = colour("--st-text-color");
      pen.textBaseline = "middle";
      pen.textAlign = "left";
      pen.fillText(scene.title, 0, top + HEAD_PX / 2);
      pen.font = `12px ${font}`;
      for (let row = 0; row < rows; row += 1) {
        const y = top + HEAD_PX + row * ROW_PX;
        pen.globalAlpha = 1;
        pen.fillStyle = colour("--soft");
        pen.fillText(this.names[row], 0, y + ROW_PX / 2);
        pen.strokeStyle = colour("--line");
        pen.beginPath();
        pen.moveTo(left, y + ROW_PX - 0.5);
        pen.lineTo(right, y + ROW_PX - 0.5);
        pen.stroke();
      }
      for (const [row, start, length, tokens, kind, writes] of scene.bars) {
        const y = top + HEAD_PX + row * ROW_PX;
        const stop = start + length;
        pen.fillStyle = colour(kind === "decode" ? "--chat" : kind === "prefill" ? "--camera" : "--document");
        const box = (from, to, alpha) => {
          if (to <= from) return;
          pen.globalAlpha = alpha;
          pen.fillRect(x(from), y + 4, Math.max(0.7, x(to) - x(from) - 0.6), ROW_PX - 9);
        };
        box(start, stop, 0.13);
        box(start, Math.min(stop, now), 0.75);
        if (writes && stop <= now) {
          pen.globalAlpha = 1;
          pen.fillStyle = colour("--good");
          pen.beginPath();
          pen.arc(x(stop), y + ROW_PX / 2 - 0.5, 2.2, 0, 2 * Math.PI);
          pen.fill();
        }
        if (tokens > 1 && x(stop) - x(start) > 34) {
          pen.globalAlpha = 0.9;
          pen.fillStyle = colour("--st-text-color");
          pen.textAlign = "center";
          pen.fillText(String(tokens), (x(start) + x(stop)) / 2, y + ROW_PX / 2);
          pen.textAlign = "left";
        }
      }
      pen.globalAlpha = 1;
      top += HEAD_PX + rows * ROW_PX + GAP_PX;
    }
    pen.strokeStyle = colour("--bad");
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x(now), HEAD_PX - 4);
    pen.lineTo(x(now), top - GAP_PX + 4);
    pen.stroke();
    pen.lineWidth = 1;
    pen.fillStyle = colour("--soft");
    pen.textBaseline = "top";
    for (let part = 0; part <= 4; part += 1) {
      pen.textAlign = part === 0 ? "left" : part === 4 ? "right" : "center";
      pen.fillText(time((this.span * part) / 4), x((this.span * part) / 4), top - GAP_PX + 8);
    }
    this.clock.textContent = `${time(now)} of ${time(this.span)}`;
    this.canvas.dataset.at = now.toFixed(6);
    this.canvas.setAttribute("aria-label", this.scenes.map((scene) => scene.title).join("; "));
  }
}

const films = new WeakMap();

export default (component) => {
  const outer = component.parentElement;
  const root = outer.querySelector(".panel");
  let film = films.get(outer);
  if (!film) {
    film = new Film(root);
    films.set(outer, film);
  }
  root.classList.toggle("dark", isDark(outer.host ?? root));
  film.take(component.data);
  return () => {
    films.delete(outer);
    film.end();
  };
};
