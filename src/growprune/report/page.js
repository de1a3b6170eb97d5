"use strict";
// Draws the charts in the colours of the page, again when these or the width change, and saves them to files.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const PRINT_WIDTH = 660; // of a sheet of paper, in CSS pixels, less its margins
  let printing = false;

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  // "ink" stands for the colour of the text, wherever a colour may be
  const inked = (value, ink) => {
    if (value === "ink") return ink;
    if (Array.isArray(value)) return value.map((item) => inked(item, ink));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, inked(item, ink)]));
    return value;
  };

  // A legend below the chart takes as many rows as its longest name allows for columns
  const legendRows = (data, width) => {
    const names = data.filter((trace) => trace.type === "scatter" && trace.showlegend !== false).map((t) => t.name);
    if (names.length < 2) return 0;
    const longest = Math.max(...names.map((name) => name.length));
    return Math.ceil(names.length / Math.max(1, Math.floor((width - 20) / (longest * 6.6 + 52))));
  };

  const themedAxis = (axis) => ({
    ...axis,
    gridcolor: colour("grid"),
    linecolor: colour("line"),
    tickfont: { size: 12 },
    title: { ...axis.title, font: { size: 13 } },
  });

  // Names of rows. On a phone they break near the middle, because long ones would leave no space for their bars
  const NARROW = 500;
  const folded = (name) => {
    const middle = name.length / 2;
    const gaps = Array.from(name.matchAll(/ /g), (gap) => gap.index);
    const at = gaps.reduce((best, gap) => (Math.abs(gap - middle) < Math.abs(best - middle) ? gap : best), -1);
    return name.length < 20 || at < 0 ? name : `${name.slice(0, at)} <br>${name.slice(at + 1)}`;
  };
  const foldedAxis = (axis, data) => {
    const names = [...new Set(data.flatMap((trace) => trace.y))];
    const text = names.map((name) => `${folded(name)} `);
    return { ...axis, tickmode: "array", tickvals: names, ticktext: text, tickfont: { size: 10 } };
  };

  const figure = (chart, plot) => {
    const width = printing ? PRINT_WIDTH : plot.clientWidth;
    const data = inked(chart.data, colour("ink"));
    const rows = legendRows(data, width);
    const height = Number(plot.dataset.height) + rows * 20;
    plot.style.height = `${height}px`;
    const layout = {
      ...structuredClone(chart.layout),
      width,
      height,
      showlegend: rows > 0,
      paper_bgcolor: colour("card"),
      plot_bgcolor: colour("card"),
      font: { color: colour("ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      hoverlabel: { font: { size: 12 } },
    };
    layout.margin = { ...layout.margin, b: 52 + rows * 20 };
    layout.legend = { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, xref: "paper" };
    layout.xaxis = themedAxis(layout.xaxis);
    layout.yaxis = themedAxis(layout.yaxis);
    if (width < NARROW && layout.yaxis.type === "category") layout.yaxis = foldedAxis(layout.yaxis, data);
    return { data, layout };
  };

  const plotOf = (number) => document.getElementById(`plot-${number}`);
  const draw = (number) => {
    const { data, layout } = figure(charts[number], plotOf(number));
    return Plotly.react(plotOf(number), data, layout, { displayModeBar: false });
  };
  const drawAll = () => Promise.all(charts.map((_, number) => draw(number)));

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
    const { width, height } = plotOf(number).layout;
    save(await Plotly.toImage(plotOf(number), { format: kind, width, height, scale: kind === "png" ? 2 : 1 }), name);
  };
  for (const button of document.querySelectorAll("button[data-kind]"))
    button.addEventListener("click", () => download(Number(button.dataset.chart), button.dataset.kind));

  drawAll().then(() => root.setAttribute("data-drawn", String(charts.length)));
})();
