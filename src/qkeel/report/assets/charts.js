// Draws the charts of the page from #report-data into [data-chart], and again when the width changes.
(() => {
  "use strict";
  const {human, unique, ascending, frame, controls, draw, redraw, start, colour, dash, symbol, key, view, smoothed, axis, above, keep} = Kit;
  let data;
  const FLOOR = 0.1; // a logarithmic axis cannot show a logit of 0
  const focus = {}; // chart name → remedy that is singled out

  const lrText = (lr) => String(lr).replace("e-", "e−");

  // ── Panels: one per learning rate, wrapped to the width ────────────────────────────────────────────────────────
  function panels(keys, width, least) {
    const columns = Math.max(1, Math.min(keys.length, Math.floor(width / least)));
    const place = new Map(keys.map((key, i) => [key, {fx: i % columns, fy: Math.floor(i / columns)}]));
    return {columns, rows: Math.ceil(keys.length / columns), at: (key) => place.get(key)};
  }

  const panelTitle = (titles) =>
    Plot.text(titles, {
      fx: "fx", fy: "fy", text: "text", frameAnchor: "top-left", dy: -16, fontWeight: 600, fontSize: 12.5,
      fill: "var(--ink)"
    });

  const strokeWidth = (name, i) => (focus[name] === i ? 2.2 : name === "train" ? 1.1 : 1.5);
  const faded = (name, i) => (focus[name] === undefined || focus[name] === i ? 0.9 : 0.12);

  // One mark per remedy, so that its group can be named and faded.
  function lines(name, points, facet, clip = false) {
    return unique(points.map((p) => p.remedy)).map((i) =>
      Plot.line(points.filter((p) => p.remedy === i), {
        x: "step", y: "value", z: "run", ...facet, stroke: colour(i), strokeDasharray: dash(i),
        strokeWidth: strokeWidth(name, i), strokeOpacity: faded(name, i), strokeLinejoin: "round",
        ariaDescription: data.remedies[i], clip
      })
    );
  }

  const label = (p) => `${data.remedies[p.remedy]}${p.status === "done" ? "" : ` (${p.status})`}\nLR ${lrText(p.lr)}, seed ${p.seed}`;

  const tips = (points, facet, what) =>
    Plot.tip(points, Plot.pointer({
      x: "step", y: "value", ...facet, title: (p) => `${label(p)}\nstep ${p.step.toLocaleString("en-US")}: ${what(p.exact)}`,
      fill: "var(--paper)", stroke: "var(--rule)", fontSize: 12, lineHeight: 1.25
    }));

  function series(runs, field) {
    return runs.flatMap((run, index) =>
      run.step.map((step, i) => ({
        step, value: run[field][i], run: index, remedy: run.remedy, lr: run.lr, seed: run.seed, status: run.status
      })).filter((p) => p.value !== null)
    );
  }

  // One line per remedy and rate in place of one per seed, where the reader chose that.
  function meanOfSeeds(points) {
    const cells = new Map();
    for (const p of points) {
      const at = `${p.remedy} ${p.lr} ${p.step}`;
      cells.set(at, [...(cells.get(at) ?? []), p]);
    }
    return [...cells.values()].map((own) => ({
      ...own[0], run: `${own[0].remedy} ${own[0].lr}`, seed: `mean of ${own.length}`, value: own.reduce((sum, p) => sum + p.value, 0) / own.length
    })).sort((a, b) => a.step - b.step);
  }

  const rowOf = (field) => (p) => ({remedy: data.remedies[p.remedy], lr: p.lr, seed: p.seed, step: p.step, [field]: p.value});

  const alarm = (first) => [
    Plot.ruleY([data.alarm], {stroke: "var(--alarm)", strokeWidth: 1, ariaDescription: "alarm threshold"}),
    Plot.text([first], {
      fx: "fx", fy: "fy", y: () => data.alarm, text: () => `alarm ${human(data.alarm)}`, frameAnchor: "left",
      textAnchor: "start", dx: 4, dy: -7, fill: "var(--alarm)", stroke: "var(--paper)", strokeWidth: 3
    })
  ];

  // ── The charts ─────────────────────────────────────────────────────────────────────────────────────────────────
  function loss(width) {
    const lrs = ascending(data.losses.map((row) => row[1]));
    const order = ascending(data.losses.map((row) => row[0]));
    const gaps = lrs.slice(1).map((lr, i) => Math.log(lr / lrs[i]));
    const step = Math.min(0.06, (0.3 * Math.min(1, ...gaps)) / Math.max(1, order.length - 1));
    const apart = (i) => Math.exp(step * (order.indexOf(i) - (order.length - 1) / 2));
    const dots = data.losses.map(([remedy, lr, seed, value, logit, collapsed]) => (
      {remedy, lr, seed, value, logit, collapsed, x: lr * apart(remedy), status: "done"}
    )).filter((d) => d.value !== null);
    const means = order.flatMap((remedy) => lrs.map((lr) => {
      const values = dots.filter((d) => d.remedy === remedy && d.lr === lr).map((d) => d.value);
      const total = values.reduce((a, b) => a + b, 0);
      return {remedy, x: lr * apart(remedy), value: total / values.length, low: Math.min(...values), high: Math.max(...values), n: values.length};
    })).filter((m) => m.n > 0);
    const low = Math.min(...dots.map((d) => d.value)), high = Math.max(...dots.map((d) => d.value));
    const levels = [["before training", data.start]].filter(([, v]) => v !== null);
    const inside = levels.filter(([, v]) => v < high + 0.5 * (high - low) && v > low - 0.2 * (high - low));
    const seen = view("loss", {scale: "linear"}), log = seen.scale === "log";
    const bands = lrs.map((lr) => ({x1: lr * apart(order[0]) * 0.985, x2: lr * apart(order[order.length - 1]) * 1.015}));
    keep("loss", data.losses.map(([remedy, lr, seed, value, logit, collapsed]) => ({remedy: data.remedies[remedy], lr, seed, held_out_loss: value, max_logit: logit, collapsed})));
    legend("loss", order, true, [
      ...levels.filter((l) => !inside.includes(l)).map(([t, v]) => `${t}: ${v.toFixed(3)}, outside the frame`),
      ...(dots.length < data.losses.length ? [`${data.losses.length - dots.length} runs ended in NaN and are not drawn`] : [])
    ]);
    const mark = (remedy, hollow) => Plot.dot(dots.filter((d) => d.remedy === remedy && d.collapsed === hollow), {
      x: "x", y: "value", r: 3.6, symbol: symbol(remedy), stroke: colour(remedy), strokeWidth: 1.4,
      fill: hollow ? "var(--paper)" : colour(remedy), opacity: faded("loss", remedy), ariaDescription: `${data.remedies[remedy]}, seeds`
    });
    return frame("loss", width, Math.min(440, Math.max(320, width * 0.46)), {
      marginLeft: 50, marginRight: 20, marginTop: 24, marginBottom: 38,
      x: {type: "log", label: "learning rate", ticks: lrs, tickFormat: lrText, domain: [lrs[0] / 1.4, lrs[lrs.length - 1] * 1.4]},
      y: axis(dots, `held-out loss (${data.unit})`, log, inside.map((l) => l[1]), {domain: [Math.min(low, ...inside.map((l) => l[1])), Math.max(high, ...inside.map((l) => l[1]))]}),
      color: {type: "identity"},
      marks: [
        Plot.rect(bands, {x1: "x1", x2: "x2", fill: "var(--rule)", fillOpacity: 0.35, ariaDescription: "the dots of one learning rate"}),
        Plot.ruleY(inside, {y: (l) => l[1], stroke: "var(--faint)", strokeDasharray: "5 4"}),
        Plot.text(inside, {y: (l) => l[1], text: (l) => l[0], frameAnchor: "right", textAnchor: "end", dy: -7, fill: "var(--faint)"}),
        ...order.map((i) => Plot.line(means.filter((m) => m.remedy === i), {
          x: "x", y: "value", stroke: colour(i), strokeDasharray: dash(i), strokeWidth: strokeWidth("loss", i) + 0.3,
          strokeOpacity: faded("loss", i), ariaDescription: data.remedies[i]
        })),
        ...order.map((i) => Plot.ruleX(means.filter((m) => m.remedy === i && m.n > 1), {
          x: "x", y1: "low", y2: "high", stroke: colour(i), strokeWidth: 1.2, strokeOpacity: faded("loss", i),
          ariaDescription: `${data.remedies[i]}, range over seeds`
        })),
        ...order.flatMap((i) => [mark(i, false), mark(i, true)]),
        Plot.tip(dots, Plot.pointer({
          x: "x", y: "value", fill: "var(--paper)", stroke: "var(--rule)", fontSize: 12, lineHeight: 1.25,
          title: (d) => `${label(d)}\nheld-out loss ${d.value.toFixed(3)}\nlargest logit ${human(d.logit)}${d.collapsed ? "\ncollapsed" : ""}`
        }))
      ]
    });
  }

  // `log`, `smooth`, `lines`: how the chart is shown at first; `least`: what a logarithmic axis shows of smaller values.
  function byRate(name, width, field, {label, log, least = 0, also = [], more = () => ({}), extra = () => [], what, smooth = "1", lines: first = "each", from}) {
    const {runs} = data;
    const lrs = ascending(runs.map((run) => run.lr));
    const layout = panels(lrs, width, 270);
    const facet = {fx: (p) => layout.at(p.lr).fx, fy: (p) => layout.at(p.lr).fy};
    const several = unique(runs.map((run) => run.seed)).length > 1;
    const seen = view(name, {scale: log ? "log" : "linear", ...(several ? {lines: first} : {}), smooth, ...(from ? {from} : {})});
    const logarithmic = seen.scale === "log", recorded = series(runs, field);
    const points = above(smoothed(seen.lines === "mean" ? meanOfSeeds(recorded) : recorded, "run", seen.smooth), logarithmic, least);
    keep(name, recorded.map(rowOf(field)));
    legend(name, ascending(runs.map((run) => run.remedy)), false);
    const each = width / layout.columns;
    const inner = each > 420 ? 270 : 200, gap = 50;
    return frame(name, width, (inner + gap) * layout.rows - gap + 76, {
      marginLeft: 56, marginRight: 14, marginTop: 40, marginBottom: 36,
      fx: {axis: null, paddingInner: layout.columns > 1 ? 0.12 : 0, paddingOuter: 0},
      fy: {axis: null, paddingInner: layout.rows > 1 ? gap / (inner + gap) : 0, paddingOuter: 0},
      x: {label: "step", ticks: Math.max(2, Math.floor(each / 90)), insetRight: 3},
      y: axis(from ? points.filter((p) => p.step >= Number(seen.from) * Math.max(...points.map((q) => q.step))) : points, label, logarithmic, also, more(points, Number(seen.from))),
      color: {type: "identity"},
      marks: [
        panelTitle(lrs.map((lr) => ({...layout.at(lr), text: `LR ${lrText(lr)}`}))),
        ...extra(runs, facet),
        ...lines(name, points, facet, name === "train"),
        tips(points, facet, what)
      ]
    });
  }

  const logits = (width) => byRate("logits", width, "max_logit", {
    label: "largest attention logit (nats)", log: true, least: FLOOR, also: [data.alarm], extra: () => alarm({fx: 0, fy: 0}), what: human
  });

  const entropy = (width) => byRate("entropy", width, "entropy", {
    label: "attention entropy (nats)", log: false, least: 1e-3, more: () => ({zero: true}),
    extra: () => (document.querySelector('[data-controls="entropy-view"] select').value === "log" ? [] : [Plot.ruleY([0], {stroke: "var(--rule)"})]),
    what: (x) => `${human(x)} nats`
  });

  // The first tenth of training would squeeze the rest into a line, so at first the frame is fitted to what follows it.
  function train(width) {
    const held = (runs) => runs.flatMap((run) => run.val_loss.filter(([, v]) => v !== null).map(([step, value]) => ({step, value, remedy: run.remedy, lr: run.lr})));
    const domain = (points, from) => {
      const late = points.filter((p) => p.step >= from * Math.max(...points.map((q) => q.step))).map((p) => p.value);
      return {domain: [Math.min(...late), Math.max(...late)]};
    };
    return byRate("train", width, "train_loss", {
      label: `loss (${data.unit})`, log: false, least: 1e-9, more: domain, smooth: "5", lines: "mean", from: "0.1", what: (x) => x.toFixed(3),
      extra: (runs, facet) => ascending(runs.map((run) => run.remedy)).map((i) => Plot.dot(held(runs).filter((p) => p.remedy === i), {
        x: "step", y: "value", ...facet, r: 2.2, fill: colour(i), opacity: faded("train", i), clip: true, ariaDescription: `${data.remedies[i]}, held out`
      }))
    });
  }

  // ── Long texts: accuracy by position, one panel per post-hoc method ────────────────────────────────────────────
  function lengths(width) {
    const longest = Math.max(...data.long.map((c) => c.length));
    const points = data.long.filter((c) => c.length === longest).flatMap((c) =>
      c.share.map((share, i) => ({x: (i + 1) * data.context, value: 100 * share, remedy: c.remedy, method: c.method})));
    const layout = panels(unique(points.map((p) => p.method)), width, 240);
    const facet = {fx: (p) => layout.at(p.method).fx, fy: (p) => layout.at(p.method).fy};
    const order = ascending(points.map((p) => p.remedy));
    keep("lengths", points.map((p) => ({form: data.remedies[p.remedy], method: p.method, token: p.x, predicted_percent: p.value})));
    const log = view("lengths", {scale: "linear"}).scale === "log";
    legend("lengths", order, false);
    const each = width / layout.columns, gap = 50, inner = each > 420 ? 270 : 220;
    return frame("lengths", width, (inner + gap) * layout.rows - gap + 76, {
      marginLeft: 44, marginRight: 14, marginTop: 40, marginBottom: 36,
      fx: {axis: null, paddingInner: layout.columns > 1 ? 0.12 : 0, paddingOuter: 0},
      fy: {axis: null, paddingInner: layout.rows > 1 ? gap / (inner + gap) : 0, paddingOuter: 0},
      x: {label: "tokens so far", ticks: Math.max(2, Math.floor(each / 90)), insetRight: 3},
      y: axis(points, "next tokens predicted (%)", log),
      color: {type: "identity"},
      marks: [
        panelTitle(unique(points.map((p) => p.method)).map((m) => ({...layout.at(m), text: m === "none" ? "as trained" : m}))),
        Plot.ruleX([data.context], {stroke: "var(--faint)", strokeDasharray: "5 4", ariaDescription: "training length"}),
        ...order.map((i) => Plot.line(points.filter((p) => p.remedy === i), {
          x: "x", y: "value", z: "method", ...facet, stroke: colour(i), strokeDasharray: dash(i),
          strokeWidth: strokeWidth("lengths", i) + 0.3, strokeOpacity: faded("lengths", i), ariaDescription: data.remedies[i]
        })),
        Plot.tip(points, Plot.pointer({
          x: "x", y: "value", ...facet, fill: "var(--paper)", stroke: "var(--rule)", fontSize: 12, lineHeight: 1.25,
          title: (p) => `${data.remedies[p.remedy]}${p.method === "none" ? "" : `, ${p.method}`}\nup to token ${p.x}: ${p.value.toFixed(1)} %`
        }))
      ]
    });
  }

  // ── Legends and choices ────────────────────────────────────────────────────────────────────────────────────────
  function legend(name, remedies, dots, notes = []) {
    const holder = document.querySelector(`[data-legend="${name}"]`);
    const keys = remedies.map((i) => {
      const button = document.createElement("button");
      const label = document.createElement("span");
      label.className = "key-name";
      label.textContent = data.remedies[i];
      button.type = "button";
      button.className = "key";
      button.setAttribute("aria-pressed", String(focus[name] === i));
      button.title = "Single out this line";
      button.append(key(i, dots), label);
      button.addEventListener("click", () => {
        focus[name] = focus[name] === i ? undefined : i;
        draw(name);
        document.querySelectorAll(`[data-legend="${name}"] .key`)[remedies.indexOf(i)].focus();
      });
      return button;
    });
    const extra = notes.map((text) => Object.assign(document.createElement("span"), {className: "key-name key-note", textContent: text}));
    holder.replaceChildren(...keys, ...extra);
  }

  // ── Drawing ────────────────────────────────────────────────────────────────────────────────────────────────────
  const DRAWERS = {lengths, loss, logits, entropy, train};

  // A study in parts (other models, other optimizers) is drawn one part at a time.
  const shown = {part: null};
  function take(all) {
    if (!all.parts) {
      data = all;
      return;
    }
    const names = Object.keys(all.parts);
    shown.part = names[0];
    data = all.parts[shown.part];
    controls("part", shown, [["Charts of", "part", names.map((name) => [name, name])]], () => {
      data = all.parts[shown.part];
      redraw();
    });
  }

  take(Kit.data());
  start(DRAWERS);
})();
