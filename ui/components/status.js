/* The top line: what state the product is in. */

const SERVER_WORDS = { starting: "starting", ready: "ready", down: "down", restarting: "restarting" };

export default panel(({ root, link, on }) => {
  const lamp = h("span", { class: "lamp", "aria-hidden": "true" });
  const server = h("span", { class: "server", role: "status" });
  const simulated = h("strong", { class: "simulated", hidden: true });
  const detail = h("span", { class: "soft detail" });
  const facts = h("span", { class: "soft facts" });
  const bar = h("div", { class: "progress", hidden: true, "aria-hidden": "true" }, h("i"));
  const warnings = h("details", { class: "warnings", hidden: true });
  root.append(
    h("div", { class: "line" }, h("h1", { class: "brand" }, "FrameChat"), lamp, server, simulated, detail, warnings, facts),
    bar,
  );

  function draw() {
    const trouble = troubleWith(link);
    const status = link.status;
    let state = "waiting";
    if (trouble) {
      put(server, trouble);
      put(detail, "");
      put(facts, "");
      state = link.attempt > 1 || link.everOpen ? "down" : "starting";
    } else if (status) {
      const { server: model, engine } = status;
      state = model.state;
      const since = model.state === "ready" || model.elapsed_s === null ? "" : ` for ${duration(model.elapsed_s * 1000)}`;
      put(server, `Model server ${SERVER_WORDS[model.state] ?? model.state}${since}`);
      put(detail, model.simulated ? "" : (model.detail ?? ""));
      put(simulated, `SIMULATED, made-up answers: ${(model.simulated ?? "").replace(/^simulated: /, "")}`);
      simulated.title = simulated.textContent;
      const parts = [];
      if (model.model) parts.push(model.model);
      if (model.version && !model.simulated) parts.push(`vLLM ${model.version}`);
      if (model.attached) parts.push("attached");
      if (model.state === "ready" && engine.age_s !== null && engine.age_s > 10)
        parts.push(`its figures are ${duration(engine.age_s * 1000)} old`);
      parts.push(`detector ${status.detector}`);
      put(facts, parts.join(" · "));
    }
    show(simulated, !trouble && Boolean(status?.server.simulated));
    root.dataset.state = state;
    show(bar, !trouble && (state === "starting" || state === "restarting"));
    drawWarnings(trouble ? [] : (status?.warnings ?? []));
  }

  function drawWarnings(list) {
    const key = JSON.stringify(list);
    if (warnings.dataset.key === key) return;
    warnings.dataset.key = key;
    show(warnings, list.length > 0);
    const more = list.length > 1 ? ` (and ${list.length - 1} more)` : "";
    warnings.replaceChildren(
      h("summary", { role: "alert" }, `${list[0] ?? ""}${more}`),
      h("ul", {}, ...list.map((text) => h("li", {}, text))),
    );
  }

  on("phase", draw);
  on("status", draw);
  draw();
  return {};
});
