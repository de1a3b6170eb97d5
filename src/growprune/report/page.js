"use strict";
// Draws the charts in the colours of the page, again when these or the width change, and saves them to files.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const PRINT_WIDTH = 660; // of a sheet of paper, in CSS pixels, less its margins
  let printing = false;

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  // "ink" stands for the colour of the text, wherever a colour may be, and "ink-faint" for that of its bands
  const inked = (value, ink) => {
    if (value === "ink") return ink;
    if (value === "ink-faint") return `${ink}2e`;
    if (Array.isArray(value)) return value.map((item) => inked(item, ink));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, inked(item, ink)]));
    return value;
  };

  // What the legend of a section hides: names of rows, and sparsities
  const hiddenIn = (plot) => {
    const boxes = plot.closest("section").querySelectorAll(".legend input:not(:checked)");
    return new Set(Array.from(boxes, (box) => box.value));
  };

  const themedAxis = (axis) => ({
    ...axis,
    gridcolor: colour("grid"),
    linecolor: colour("line"),
    tickfont: { size: 12 },
    title: { ...axis.title, standoff: 8, font: { size: 13 } },
  });

  // Names of rows. Long ones break near the middle, because they would leave no space for their points
  const NARROW = 500;
  const folded = (name) => {
    const middle = name.length / 2;
    const gaps = Array.from(name.matchAll(/ /g), (gap) => gap.index);
    const at = gaps.reduce((best, gap) => (Math.abs(gap - middle) < Math.abs(best - middle) ? gap : best), -1);
    return at < 0 ? name : `${name.slice(0, at)} <br>${name.slice(at + 1)}`;
  };
  // An axis with a line for each row that is shown
  const ROW = 28;
  const rowsAxis = (axis, data, width) => {
    const names = axis.categoryarray.filter((name) => data.some((trace) => trace.y[0] === name));
    const range = [-0.6, Math.max(1, names.length) - 0.4];
    const text = names.map((name) => `${name.length > width / 16 ? folded(name) : name} `);
    const tickfont = { size: width < NARROW ? 10 : 12 };
    return { ...axis, categoryarray: names, range, tickmode: "array", tickvals: names, ticktext: text, tickfont };
  };

  const HEIGHT = 400;
  const figure = (chart, plot) => {
    const width = printing ? PRINT_WIDTH : plot.clientWidth;
    const hidden = hiddenIn(plot);
    const shown = chart.data.filter((trace) => !hidden.has(trace.legendgroup) && !hidden.has(trace.meta));
    const data = inked(shown, colour("ink"));
    const layout = {
      ...inked(chart.layout, colour("ink")),
      width,
      height: HEIGHT,
      paper_bgcolor: colour("card"),
      plot_bgcolor: colour("card"),
      font: { color: colour("ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      hoverlabel: { font: { size: 12 } },
    };
    layout.xaxis = themedAxis(layout.xaxis);
    layout.yaxis = themedAxis(layout.yaxis);
    if (layout.yaxis.type === "category") {
      layout.yaxis = rowsAxis(layout.yaxis, data, width);
      layout.height = Math.max(width < NARROW ? 160 : 240, 80 + ROW * layout.yaxis.categoryarray.length);
    }
    plot.style.height = `${layout.height}px`;
    return { data, layout };
  };

  const plotOf = (number) => document.getElementById(`plot-${number}`);
  const draw = (number) => {
    const { data, layout } = figure(charts[number], plotOf(number));
    return Plotly.react(plotOf(number), data, layout, { displayModeBar: false });
  };
  const drawAll = () => Promise.all(charts.map((_, number) => draw(number)));

  // The legends
  const redraw = (section) =>
    section.querySelectorAll(".plot").forEach((plot) => draw(Number(plot.id.replace("plot-", ""))));
  for (const legend of document.querySelectorAll(".legend")) {
    if (innerWidth < 860) legend.open = false; // on a phone the charts come first
    legend.addEventListener("change", () => redraw(legend.closest("section")));
    for (const button of legend.querySelectorAll("button"))
      button.addEventListener("click", () => {
        for (const box of legend.querySelectorAll("input")) box.checked = Boolean(button.dataset.all);
        redraw(legend.closest("section"));
      });
  }

  // The theme: as the system has it, or as chosen
  const themes = ["auto", "light", "dark"];
  let theme = "auto";
  const setTheme = (name) => {
    theme = name;
    if (name === "auto") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", name);
    document.getElementById("theme").textContent = `Theme: ${name}`;
  };
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(themes[(themes.indexOf(theme) + 1) % themes.length]);
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  // Paper is white, and as wide as it is
  let before = "auto";
  addEventListener("beforeprint", () => {
    before = theme;
    printing = true;
    setTheme("light");
    drawAll();
  });
  addEventListener("afterprint", () => {
    printing = false;
    setTheme(before);
    drawAll();
  });

  let waiting = 0;
  let lastWidth = innerWidth;
  addEventListener("resize", () => {
    if (printing || innerWidth === lastWidth) return; // on a phone, scrolling changes the height
    lastWidth = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 100);
  });

  const save = (href, name) => {
    const link = document.createElement("a");
    link.href = href;
    link.download = name;
    link.click();
  };

  const csv = (number) => {
    const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const rows = document.querySelectorAll(`#chart-${number} details tr`);
    const cell = (node) => quote(node.dataset.v ?? node.textContent);
    return Array.from(rows, (row) => Array.from(row.cells, cell).join(",")).join("\n") + "\n";
  };

  const download = async (number, kind) => {
    const name = `${charts[number].name}.${kind}`;
    if (kind === "csv") {
      const url = URL.createObjectURL(new Blob([csv(number)], { type: "text/csv" }));
      save(url, name);
      setTimeout(() => URL.revokeObjectURL(url), 1000);
      return;
    }
    // a picture has no page around it, so that it needs a legend of its own
    const { data, layout } = figure(charts[number], plotOf(number));
    const rows = data.filter((trace) => trace.showlegend !== false).length;
    const has = rows > 1 && layout.yaxis.type !== "category";
    const width = layout.width + (has ? 300 : 0);
    const height = Math.max(layout.height, has ? 60 + 20 * rows : 0);
    const legend = { tracegroupgap: 0 }; // by row, which would part its sparsities from others
    const picture = { data, layout: { ...layout, width, height, legend, showlegend: has } };
    save(await Plotly.toImage(picture, { format: kind, width, height, scale: kind === "png" ? 2 : 1 }), name);
  };
  for (const button of document.querySelectorAll("button[data-kind]"))
    button.addEventListener("click", () => download(Number(button.dataset.chart), button.dataset.kind));

  drawAll().then(() => root.setAttribute("data-drawn", String(charts.length)));
})();
