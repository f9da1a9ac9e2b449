"use strict";
(() => {
  const panels = JSON.parse(document.getElementById("panels").textContent);
  const figure = document.getElementById("figure"), readout = document.getElementById("readout");
  if (!figure || !panels.length) return;
  const SVG = "http://www.w3.org/2000/svg";
  const LEVELS = [0.25, 0.5, 1, 3, 10, 100, 10000];  // upper ends of the colours; beyond them and not finite: two more

  const level = (ratio) => ratio === null ? 8 : LEVELS.findIndex((end) => ratio <= end) < 0 ? 7 : LEVELS.findIndex((end) => ratio <= end);
  const make = (parent, name, attributes, text) => {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  };
  const said = (ratio) => ratio === null ? "not finite, or a tolerance of 0" : `${ratio.toPrecision(3)} × tolerance`;

  function ticks(count, most) {
    const step = [1, 2, 4, 8, 16, 32, 64, 128].find((size) => count / size <= most) || Math.ceil(count / most);
    return Array.from({length: Math.ceil(count / step)}, (_, i) => i * step);
  }

  function draw(panel) {
    const {rows, columns, ratio} = panel;
    const left = 52, right = 12, top = 20, gap = 40, chart = panel.across === "token" ? 110 : 0, plot = 940;
    const cell = Math.min(34, plot / columns), high = Math.max(3, Math.min(26, 420 / rows, cell * 2.2));
    const width = left + cell * columns + right, height = top + high * rows + gap + (chart ? chart + 26 : 0);
    figure.replaceChildren();
    const svg = make(figure, "svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `error over tolerance of ${panel.quantity}, ${panel.about}`});
    svg.style.maxWidth = `${Math.max(width, 260)}px`;
    svg.style.minWidth = `${Math.min(width, 600)}px`;  // narrower windows scroll: smaller cells could not be picked
    const pad = cell > 6 ? 0.5 : 0;
    for (let i = 0; i < ratio.length; i++) {
      const row = Math.floor(i / columns), column = i % columns;
      const box = make(svg, "rect", {class: `cell c${level(ratio[i])}`, x: left + column * cell, y: top + row * high, width: cell - pad, height: high - pad});
      box.dataset.i = i;
    }
    for (const c of ticks(columns, 16)) make(svg, "text", {x: left + (c + 0.5) * cell, y: top + high * rows + 14, "text-anchor": "middle"}, c * panel.wide);
    for (const r of ticks(rows, 12)) make(svg, "text", {x: left - 6, y: top + (r + 0.5) * high + 4, "text-anchor": "end"}, r * panel.high);
    make(svg, "text", {x: left, y: top + high * rows + 30}, panel.wide > 1 ? `${panel.across} (worst of ${panel.wide})` : panel.across);
    if (panel.down) make(svg, "text", {x: 12, y: top + high * rows / 2, transform: `rotate(-90 12 ${top + high * rows / 2})`, "text-anchor": "middle"}, panel.down);
    const taken = [];
    const ordered = [...panel.borders].sort((a, b) => (a.kind === "chunk") - (b.kind === "chunk"));
    for (const border of ordered) {
      const x = left + border.at * cell - pad / 2, long = 6.2 * border.label.length + 8, end = left + cell * columns;
      make(svg, "line", {class: `border-${border.kind}`, x1: x, x2: x, y1: top - 6, y2: top + high * rows});
      const [from, to] = x + long > end + right ? [x - long, x] : [x, x + long];
      if (taken.some(([a, b]) => from < b && to > a)) continue;
      taken.push([from, to]);
      make(svg, "text", {x: from === x ? x + 3 : x - 3, y: top - 7, "text-anchor": from === x ? "start" : "end"}, border.label);
    }
    if (chart) byPosition(svg, panel, {left, cell, start: top + high * rows + gap + 16, chart, width: cell * columns});
    svg.addEventListener("mousemove", (event) => show(panel, event.target));
    svg.addEventListener("click", (event) => show(panel, event.target));
  }

  function byPosition(svg, panel, {left, cell, start, chart, width}) {
    const worst = Array.from({length: panel.columns}, (_, c) => {
      let most = 0;
      for (let r = 0; r < panel.rows; r++) {
        const value = panel.ratio[r * panel.columns + c];
        most = Math.max(most, value === null ? Infinity : value);
      }
      return most;
    });
    const finite = worst.filter((x) => x > 0 && x < Infinity);
    const high = Math.max(1, Math.ceil(Math.log10(Math.max(10, ...finite)))), low = -2;
    const y = (value) => {
      const at = value === Infinity ? high : Math.log10(Math.max(value, 10 ** low));
      return start + chart * (1 - (Math.min(at, high) - low) / (high - low));
    };
    for (let p = low; p <= high; p += Math.max(1, Math.ceil((high - low) / 5))) {
      make(svg, "line", {class: "axis", x1: left, x2: left + width, y1: y(10 ** p), y2: y(10 ** p)});
      make(svg, "text", {x: left - 6, y: y(10 ** p) + 4, "text-anchor": "end"}, p < 0 ? (10 ** p).toString() : p < 5 ? 10 ** p : `1e${p}`);
    }
    make(svg, "line", {class: "limit", x1: left, x2: left + width, y1: y(1), y2: y(1)});
    make(svg, "text", {x: left, y: start - 8}, "largest error over tolerance at each token; the dashed line is the limit");
    const points = worst.map((value, c) => [left + (c + 0.5) * cell, y(value)]);
    make(svg, "path", {class: "curve", d: points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("")});
    points.forEach(([a, b], c) => { if (cell >= 3) make(svg, "circle", {class: worst[c] > 1 ? "dot over" : "dot", cx: a, cy: b, r: Math.min(3, cell / 2)}); });
  }

  function show(panel, target) {
    const i = target && target.dataset ? target.dataset.i : undefined;
    if (i === undefined) return;
    figure.querySelectorAll(".picked").forEach((node) => node.classList.remove("picked"));
    target.classList.add("picked");
    const name = document.createElement("b");
    name.textContent = panel.index[i];
    readout.replaceChildren(name, ` got ${panel.got[i]}, expected ${panel.expected[i]} ± ${panel.tolerance[i]}: ${said(panel.ratio[i])}`);
  }

  const quantities = [...new Set(panels.map((panel) => panel.quantity))];
  const tabs = {quantity: document.getElementById("quantities"), plane: document.getElementById("planes")};
  function buttons(parent, label, names, chosen, pick) {
    parent.replaceChildren();
    if (names.length < 2) return;
    const text = document.createElement("span");
    text.className = "label";
    text.textContent = label;
    parent.appendChild(text);
    names.forEach((name, i) => {
      const button = document.createElement("button");
      button.textContent = name;
      button.setAttribute("aria-pressed", String(i === chosen));
      button.addEventListener("click", () => pick(i));
      parent.appendChild(button);
    });
  }
  function select(q, p) {
    const planes = panels.filter((panel) => panel.quantity === quantities[q]);
    buttons(tabs.quantity, "quantity", quantities, q, (i) => select(i, 0));
    buttons(tabs.plane, "worst first", planes.map((panel) => panel.about), p, (i) => select(q, i));
    draw(planes[p]);
    const worst = planes[p].ratio.reduce((best, value, i, all) => all[best] === null ? best : value === null || value > all[best] ? i : best, 0);
    show(planes[p], figure.querySelector(`[data-i="${worst}"]`));
  }
  select(0, 0);
})();
