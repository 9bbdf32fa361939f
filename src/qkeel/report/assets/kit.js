// What every page's charts are drawn with. `start` draws them into [data-chart], and again when the width changes.
const Kit = (() => {
  "use strict";
  let drawers = {};

  const data = () => JSON.parse(document.getElementById("report-data").textContent);
  const unique = (values) => [...new Set(values)];
  const ascending = (values) => unique(values).sort((a, b) => a - b);
  const finite = (values) => values.filter((v) => v !== null && Number.isFinite(v));

  // 25, 11,000, 1.2e5: as in formats.number
  function human(x, digits = 3) {
    if (x === null || !Number.isFinite(x)) return "NaN";
    if (x === 0) return "0";
    const size = Math.abs(Number(x.toPrecision(digits)));
    const sign = x < 0 ? "−" : "";
    if (size >= 1e5 || size < 1e-4) {
      const [mantissa, exponent] = size.toExponential(digits - 1).split("e");
      return `${sign}${Number(mantissa)}e${exponent.replace("+", "").replace("-", "−")}`;
    }
    return sign + size.toLocaleString("en-US", {maximumSignificantDigits: digits});
  }

  function frame(name, width, height, options) {
    const holder = document.getElementById(`chart-${name}`);
    return Plot.plot({
      width,
      height,
      ariaLabel: holder.dataset.label,
      style: {fontSize: "12px", background: "none", overflow: "visible"},
      ...options
    });
  }

  const logTicks = (low, high) => {
    const from = Math.ceil(Math.log10(low)), to = Math.floor(Math.log10(high));
    const tens = Array.from({length: Math.max(0, to - from + 1)}, (_, i) => Number(`1e${from + i}`));
    if (tens.length > 3) return tens;
    const decades = [from - 1, ...tens.map((_, i) => from + i)];
    const digits = tens.length > 1 ? [1, 3] : [1, 2, 5];
    if (high / low > 4) return decades.flatMap((e) => digits.map((d) => Number(`${d}e${e}`))).filter((x) => x >= low && x <= high);
    // Within half a decade: round numbers about a quarter of the range apart.
    const rough = (high - low) / 4, unit = 10 ** Math.floor(Math.log10(rough));
    const gap = [1, 2, 5, 10].map((digit) => digit * unit).find((x) => x >= rough);
    const first = Math.ceil(low / gap), last = Math.floor(high / gap);
    return Array.from({length: last - first + 1}, (_, i) => Number(((first + i) * gap).toPrecision(12)));
  };

  // The place of a value on a scale of colour, from 0 to 1, and the value at a place.
  function axisOf(scale) {
    const [low, high] = scale.domain, c = scale.constant ?? 1;
    const kinds = {
      log: [Math.log, Math.exp],
      "diverging-symlog": [(v) => Math.sign(v) * Math.log1p(Math.abs(v / c)), (t) => Math.sign(t) * c * Math.expm1(Math.abs(t))]
    };
    const [to, from] = kinds[scale.type] ?? [(v) => v, (t) => t];
    const [first, last] = [to(low), to(high)];
    return {place: (v) => (to(v) - first) / (last - first), at: (t) => from(first + t * (last - first))};
  }

  // Ticks of a scale of colour whose labels have room beside each other: the ends first.
  function rampTicks(scale, width) {
    const [low, high] = scale.domain, {place} = axisOf(scale), taken = [];
    const tens = (most) => Array.from({length: Math.max(0, Math.ceil(Math.log10(most)))}, (_, i) => Number(`1e${i}`)).filter((x) => x < most);
    const wanted = scale.type === "log" ? [low, high, ...logTicks(low, high)]
      : scale.type === "diverging-symlog" ? [0, low, high, ...tens(high).reverse(), ...tens(-low).reverse().map((x) => -x)]
        : [low, high, (low + high) / 2, low + (high - low) / 4, low + 3 * (high - low) / 4];
    for (const tick of wanted) {
      const middle = place(tick) * width, half = 3.4 * human(tick).length + 5;
      if (taken.every((other) => Math.abs(other.middle - middle) >= other.half + half)) taken.push({tick, middle, half});
    }
    return ascending(taken.map((one) => one.tick));
  }

  function ramp(name, scale) {
    const n = 64, width = 264, {place, at} = axisOf(scale), ticks = rampTicks(scale, width);
    const holder = document.querySelector(`[data-legend="${name}"]`);
    const more = 13 * Math.floor((5.8 * scale.label.length) / width); // of lines, on which a phone shows a long label
    holder.replaceChildren(Plot.plot({
      width: width + 56, height: 50 + more, marginLeft: 28, marginRight: 28, marginTop: 18 + more, marginBottom: 20,
      style: {fontSize: "11px", background: "none", overflow: "visible"}, ariaLabel: `Scale of colour: ${scale.label}`,
      x: {type: "linear", domain: [0, 1], label: null, ticks: ticks.map(place), tickFormat: (t) => human(ticks.find((tick) => Math.abs(place(tick) - t) < 1e-9)), tickSize: 3},
      color: {...scale, label: undefined},
      marks: [
        Plot.rect(Array.from({length: n}, (_, i) => i), {x1: (i) => i / n, x2: (i) => (i + 1) / n, fill: (i) => at((i + 0.5) / n), insetLeft: -0.3, insetRight: -0.3}),
        Plot.text([scale.label], {text: (d) => d, frameAnchor: "top-left", lineAnchor: "bottom", lineWidth: 26, dy: -6, fill: "var(--ink)"})
      ]
    }));
  }

  // Black or white, whichever can be read on a colour: contrast as WCAG 2 defines it.
  function readable(colour) {
    const rgb = (colour.match(/^#(..)(..)(..)$/)?.slice(1).map((part) => parseInt(part, 16)) ?? colour.match(/[\d.]+/g)?.map(Number) ?? [255, 255, 255]).slice(0, 3);
    const [r, g, b] = rgb.map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
    return 1.05 / (light + 0.05) > (light + 0.05) / 0.05 ? "#fff" : "#000";
  }

  // Names at the right ends of lines, moved apart where they would lie on each other; of many lines those that have room.
  function endLabels(ends, {height, top, bottom, axis, dx = 6, size = 11, ...facet}) {
    const [low, high] = axis.domain ?? [Math.min(...ends.map((e) => e.value)), Math.max(...ends.map((e) => e.value))];
    const to = axis.type === "log" ? Math.log : (v) => v, inner = height - top - bottom;
    const pixel = (v) => top + inner * (1 - (to(Math.max(v, low)) - to(low)) / ((to(high) - to(low)) || 1));
    const gap = size + 1, most = Math.max(1, Math.floor(inner / gap));
    const every = Math.ceil(ends.length / most);
    const shown = ends.filter((_, i) => i % every === 0 || i === ends.length - 1).map((end) => ({...end, at: pixel(end.value)})).sort((a, b) => a.at - b.at);
    shown.forEach((end, i) => { end.to = i ? Math.max(end.at, shown[i - 1].to + gap) : end.at; });
    for (let i = shown.length - 1, limit = top + inner; i >= 0; i -= 1) {
      shown[i].to = Math.min(shown[i].to, limit);
      limit = shown[i].to - gap;
    }
    return shown.map((end) => Plot.text([end], {
      x: "step", y: "value", text: "name", dx, dy: end.to - end.at, textAnchor: "start", fontSize: size, fontWeight: 600,
      fill: end.fill, stroke: "var(--paper)", strokeWidth: 3, paintOrder: "stroke", ariaDescription: "name of a line", ...facet
    }));
  }

  // After a choice `after` draws again: the chart of that name if it is not given.
  function controls(name, choice, choices, after = () => draw(name)) {
    const holder = document.querySelector(`[data-controls="${name}"]`);
    if (holder.childElementCount) return;
    for (const [title, slot, options] of choices) {
      const label = document.createElement("label");
      const select = document.createElement("select");
      select.append(...options.map(([value, text]) => new Option(text, value, false, value === choice[slot])));
      select.addEventListener("change", () => { choice[slot] = select.value; after(); });
      label.append(`${title} `, select);
      holder.append(label);
    }
  }

  // ── Series: the colours of report.css; each further round of them has dashes and other symbols of its own ────────
  const SYMBOLS = ["circle", "square", "triangle", "diamond2", "cross", "wye", "hexagon", "star"];
  const DASHES = [null, "7 3", "2 2.5", "10 3 2 3"];
  const COLOURS = 8;
  const colour = (i) => `var(--series-${i % COLOURS})`;
  const dash = (i) => DASHES[Math.floor(i / COLOURS) % DASHES.length];
  const symbol = (i) => SYMBOLS[(i + Math.floor(i / COLOURS)) % SYMBOLS.length];

  function key(i, dots = false) {
    const marks = [Plot.line([[1, 7], [23, 7]], {stroke: colour(i), strokeWidth: 2, strokeDasharray: dash(i)})];
    if (dots) marks.push(Plot.dot([[12, 7]], {r: 3.6, symbol: symbol(i), fill: colour(i), stroke: colour(i)}));
    const svg = Plot.plot({width: 24, height: 14, margin: 0, axis: null, x: {type: "identity"}, y: {type: "identity"}, marks});
    svg.setAttribute("aria-hidden", "true");
    return svg;
  }

  // ── What the reader may choose of a chart, and the numbers behind it ───────────────────────────────────────────
  const views = {}, tables = {};
  const VIEWS = {
    scale: ["Scale", [["log", "logarithmic"], ["linear", "linear"]]],
    lines: ["Lines", [["each", "each run"], ["mean", "mean over seeds"]]],
    smooth: ["Smoothing", [["1", "none"], ["5", "mean of 5 records"], ["15", "mean of 15 records"]]],
    from: ["Frame", [["0", "all of training"], ["0.1", "after the first tenth"]]]
  };

  function view(name, start) {
    views[name] ??= {...start};
    controls(`${name}-view`, views[name], Object.keys(start).map((slot) => [VIEWS[slot][0], slot, VIEWS[slot][1]]), () => draw(name));
    return views[name];
  }

  // Running means of `records` around each point of a line.
  function smoothed(points, line, records) {
    const half = (Number(records) - 1) / 2, lines = new Map();
    if (!half) return points;
    for (const p of points) lines.set(p[line], [...(lines.get(p[line]) ?? []), p]);
    return [...lines.values()].flatMap((own) => own.map((p, i) => {
      const near = own.slice(Math.max(0, i - half), i + half + 1);
      return {...p, value: near.reduce((sum, q) => sum + q.value, 0) / near.length};
    }));
  }

  // The y axis of points, logarithmic or linear; `also` are levels that lie inside, `more` is for the linear one.
  function axis(points, label, log, also = [], more = {}) {
    const values = finite([...points.map((p) => p.value), ...also]);
    if (!log) return {label, grid: true, nice: true, ticks: 6, tickFormat: (x) => human(x), ...more};
    const positive = values.filter((v) => v > 0);
    if (!positive.length) positive.push(1);
    const low = Math.min(...positive) / 1.15, high = 1.3 * Math.max(...positive);
    return {type: "log", domain: [low, high], label, ticks: logTicks(low, high), tickFormat: (x) => human(x), grid: true, clamp: true};
  }

  // A logarithmic axis shows no zero: what is at or under `least` is drawn there; `exact` is what labels say.
  const above = (points, log, least) => points.map((p) => ({...p, exact: p.value, value: log ? Math.max(least, p.value) : p.value}));

  const keep = (name, rows) => { tables[name] = rows; };

  function csv(name) {
    const rows = tables[name] ?? [], names = unique(rows.flatMap(Object.keys));
    const cell = (x) => (x == null ? "" : /[",\n]/.test(String(x)) ? `"${String(x).replaceAll('"', '""')}"` : String(x));
    return [names, ...rows.map((row) => names.map((n) => row[n]))].map((line) => line.map(cell).join(",")).join("\n") + "\n";
  }

  // ── Drawing ────────────────────────────────────────────────────────────────────────────────────────────────────
  function draw(name) {
    const holder = document.getElementById(`chart-${name}`);
    const width = Math.floor(holder.clientWidth);
    if (width > 0) holder.replaceChildren(drawers[name](width));
    holder.dataset.width = width;
  }

  function start(given) {
    drawers = given;
    const observer = new ResizeObserver((entries) => {
      requestAnimationFrame(() => { // drawing changes sizes, which the observer must not see in its own turn
        for (const {target} of entries) {
          if (Math.abs(Math.floor(target.clientWidth) - Number(target.dataset.width)) > 1) draw(target.dataset.chart);
        }
      });
    });
    const names = [...document.querySelectorAll("[data-chart]")].map((holder) => holder.dataset.chart);
    for (const name of names) {
      draw(name);
      observer.observe(document.getElementById(`chart-${name}`));
    }
  }

  const redraw = () => Object.keys(drawers).filter((name) => document.getElementById(`chart-${name}`)).forEach(draw);

  return {data, human, finite, unique, ascending, logTicks, frame, controls, ramp, readable, endLabels, draw, redraw, start, colour, dash, symbol, key, view, smoothed, axis, above, keep, csv};
})();
