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
    if (tens.length > 1) return tens;
    // Within one decade: round numbers about a quarter of the range apart.
    const rough = (high - low) / 4, unit = 10 ** Math.floor(Math.log10(rough));
    const gap = [1, 2, 5, 10].map((digit) => digit * unit).find((x) => x >= rough);
    const first = Math.ceil(low / gap), last = Math.floor(high / gap);
    return Array.from({length: last - first + 1}, (_, i) => Number(((first + i) * gap).toPrecision(12)));
  };

  function ramp(name, scale) {
    const [low, high] = scale.domain, n = 64, log = scale.type === "log";
    const at = (t) => (log ? low * (high / low) ** t : low + (high - low) * t);
    const holder = document.querySelector(`[data-legend="${name}"]`);
    holder.replaceChildren(Plot.plot({
      width: 300, height: 50, marginLeft: 12, marginRight: 24, marginTop: 18, marginBottom: 20,
      style: {fontSize: "11px", background: "none", overflow: "visible"}, ariaLabel: `Scale of colour: ${scale.label}`,
      x: {type: scale.type, domain: scale.domain, label: null, ticks: log ? logTicks(low, high) : 5, tickFormat: (x) => human(x), tickSize: 3},
      color: {...scale, label: undefined},
      marks: [
        Plot.rect(Array.from({length: n}, (_, i) => i), {x1: (i) => at(i / n), x2: (i) => at((i + 1) / n), fill: (i) => at((i + 0.5) / n), insetLeft: -0.3, insetRight: -0.3}),
        Plot.text([scale.label], {text: (d) => d, frameAnchor: "top-left", dy: -13, fill: "var(--ink)"})
      ]
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

  // ── Drawing ────────────────────────────────────────────────────────────────────────────────────────────────────
  function draw(name) {
    const holder = document.getElementById(`chart-${name}`);
    const width = Math.floor(holder.clientWidth);
    if (width > 0) holder.replaceChildren(drawers[name](width));
    holder.dataset.width = width;
  }

  // `update` takes the data of a page that is kept up to date.
  function start(given, update) {
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
    document.addEventListener("fresh", () => {
      update(data());
      redraw();
    });
  }

  const redraw = () => Object.keys(drawers).filter((name) => document.getElementById(`chart-${name}`)).forEach(draw);

  return {data, human, finite, unique, ascending, logTicks, frame, controls, ramp, draw, redraw, start};
})();
