// Shows the values under the pointer, or under the arrow keys.  The page is whole without it.
"use strict";
for (const chart of document.querySelectorAll(".chart")) {
  const svg = chart.querySelector("svg.figure");
  const series = [...chart.querySelectorAll("g[data-points]")].map((g) => ({
    name: g.dataset.name,
    main: g.classList.contains("main"),
    points: new Map(JSON.parse(g.dataset.points).map(([x, px, py, text]) => [x, { px, py, text }])),
  }));
  for (const title of chart.querySelectorAll(".point > title")) title.remove(); // ours replaces them
  const at = new Map();
  for (const one of series) for (const [x, point] of one.points) at.set(x, point.px);
  const xs = [...at.keys()].sort((a, b) => a - b);
  if (!xs.length) continue;

  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y2", "100%");
  cursor.setAttribute("visibility", "hidden");
  svg.append(cursor);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  chart.append(tip);
  let here = -1;

  const hide = () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  const show = (index) => {
    here = index;
    const x = xs[index];
    const rows = series
      .filter((one) => one.points.has(x))
      .map((one) => ({ name: one.name, main: one.main, ...one.points.get(x) }))
      .sort((a, b) => b.main - a.main || a.py - b.py);
    const head = document.createElement("b");
    head.textContent = `${chart.dataset.xLabel} ${x.toLocaleString("en")}`;
    tip.replaceChildren(head);
    for (const row of rows.slice(0, 9)) {
      const line = document.createElement("span");
      const name = document.createElement("i");
      name.textContent = row.name;
      const value = document.createElement("i");
      value.textContent = row.text;
      line.append(name, value);
      tip.append(line);
    }
    if (rows.length > 9) {
      const more = document.createElement("span");
      more.textContent = `and ${rows.length - 9} more`;
      tip.append(more);
    }
    cursor.setAttribute("x1", `${at.get(x)}%`);
    cursor.setAttribute("x2", `${at.get(x)}%`);
    cursor.setAttribute("visibility", "visible");
    tip.hidden = false;
    const plot = svg.getBoundingClientRect();
    const box = chart.getBoundingClientRect();
    const left = plot.left - box.left + (plot.width * at.get(x)) / 100;
    const flip = left + 14 + tip.offsetWidth > box.width;
    const wanted = flip ? left - 14 - tip.offsetWidth : left + 14;
    tip.style.left = `${Math.max(0, Math.min(wanted, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${plot.top - box.top + 4}px`;
  };
  const nearest = (event) => {
    const plot = svg.getBoundingClientRect();
    const share = (100 * (event.clientX - plot.left)) / plot.width;
    let best = 0;
    xs.forEach((x, i) => {
      if (Math.abs(at.get(x) - share) < Math.abs(at.get(xs[best]) - share)) best = i;
    });
    return best;
  };
  svg.addEventListener("pointermove", (event) => show(nearest(event)));
  svg.addEventListener("pointerdown", (event) => show(nearest(event)));
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    show(Math.max(0, Math.min(xs.length - 1, here < 0 ? (step > 0 ? 0 : xs.length - 1) : here + step)));
  });
  svg.tabIndex = 0;
}
