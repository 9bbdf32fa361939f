// What the page does besides charts: sort a table, copy a command, save a figure as SVG or PNG and its numbers as CSV. Works without any of it.
(() => {
  "use strict";

  // ── Sorting ────────────────────────────────────────────────────────────────────────────────────────────────────
  const cellKey = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.sort === undefined ? cell.textContent : Number(cell.dataset.sort.replace("inf", "Infinity"));
  };

  function sortBy(table, column, header) {
    const down = header.getAttribute("aria-sort") === "ascending";
    const sign = down ? -1 : 1;
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [x, y] = [cellKey(a, column), cellKey(b, column)];
      return sign * (typeof x === "number" && typeof y === "number" ? (x === y ? 0 : x < y ? -1 : 1) : String(x).localeCompare(String(y)));
    });
    table.tBodies[0].append(...rows);
    for (const th of table.tHead.rows[0].cells) th.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
  }

  const makeSortable = () => document.querySelectorAll("table.sortable").forEach((table) => {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      button.addEventListener("click", () => sortBy(table, column, header));
      header.append(button);
    });
  });

  // ── Copying ────────────────────────────────────────────────────────────────────────────────────────────────────
  const makeCopied = () => document.querySelectorAll("button.copy[hidden]").forEach((button) => {
    const source = button.parentElement.querySelector(".command-text"), label = button.textContent;
    button.hidden = false;
    button.addEventListener("click", async () => {
      const range = document.createRange();
      range.selectNodeContents(source);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Selected: press Ctrl-C"; // a file:// page may not write the clipboard
      }
      setTimeout(() => (button.textContent = label), 2500);
    });
  });

  makeSortable();
  makeCopied();

  // ── Saving ─────────────────────────────────────────────────────────────────────────────────────────────────────
  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = ["fill", "stroke", "color"];

  // The clone keeps what the page's style sheet gave: colours, and nothing that points outside the file.
  function frozen(original) {
    const clone = original.cloneNode(true);
    const [from, to] = [original, clone].map((svg) => [svg, ...svg.querySelectorAll("*")]);
    from.forEach((element, i) => {
      for (const name of COLOURS) {
        const value = element.getAttribute(name);
        if (value && /var\(|currentcolor/i.test(value)) to[i].setAttribute(name, getComputedStyle(element)[name]);
      }
    });
    const box = original.getBoundingClientRect();
    clone.setAttribute("width", box.width);
    clone.setAttribute("height", box.height);
    clone.setAttribute("color", getComputedStyle(original).color);
    return clone;
  }

  // One SVG of the whole figure as it stands: its title, its legend, its chart, each where the page shows it.
  function figureSvg(figure) {
    const edge = 16, box = figure.getBoundingClientRect();
    const bottom = Math.max(...[...figure.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect().bottom));
    const [width, height] = [box.width + 2 * edge, bottom - box.top + 2 * edge];
    const out = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}`})) out.setAttribute(name, value);
    const paper = document.createElementNS(SVG, "rect");
    paper.setAttribute("width", width);
    paper.setAttribute("height", height);
    paper.setAttribute("fill", getComputedStyle(document.body).backgroundColor);
    out.append(paper);
    for (const element of figure.querySelectorAll("h3, .key-name, svg")) {
      const place = element.getBoundingClientRect();
      const [x, y] = [place.left - box.left + edge, place.top - box.top + edge];
      if (element.tagName.toLowerCase() === "svg") {
        const clone = frozen(element);
        clone.setAttribute("x", x);
        clone.setAttribute("y", y);
        out.append(clone);
      } else {
        const style = getComputedStyle(element), text = document.createElementNS(SVG, "text");
        const values = {x, y: y + place.height / 2, "dominant-baseline": "central", fill: style.color,
          "font-family": "system-ui, sans-serif", "font-size": style.fontSize, "font-weight": style.fontWeight};
        for (const [name, value] of Object.entries(values)) text.setAttribute(name, value);
        text.textContent = element.textContent;
        out.append(text);
      }
    }
    return new XMLSerializer().serializeToString(out);
  }

  // Twice as many pixels as on the screen.
  async function figurePng(svg) {
    const image = new Image(), canvas = document.createElement("canvas");
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
    await image.decode();
    [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((made) => canvas.toBlob(made, "image/png"));
  }

  const MAKERS = {
    svg: async (button) => new Blob([figureSvg(button.closest("figure"))], {type: "image/svg+xml"}),
    png: async (button) => figurePng(figureSvg(button.closest("figure"))),
    csv: async (button) => new Blob([Kit.csv(button.dataset.save)], {type: "text/csv"})
  };
  for (const button of document.querySelectorAll("button.save")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const {save, kind} = button.dataset, link = document.createElement("a");
      link.href = URL.createObjectURL(await MAKERS[kind](button));
      link.download = `qkeel-${save}.${kind}`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }
})();
