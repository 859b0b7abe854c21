/* A line on pages that show no server state themselves: the model server behind them is a simulated one. */

export default panel(({ root, link, on }) => {
  const words = h("strong", { class: "simulated", role: "status", hidden: true });
  root.append(words);

  function draw() {
    const what = link.phase === "open" ? link.status?.server.simulated : null;
    show(words, Boolean(what));
    put(words, what ? `SIMULATED, made-up answers: ${what.replace(/^simulated: /, "")}` : "");
  }

  on("phase", draw);
  on("status", draw);
  draw();
  return {};
});
