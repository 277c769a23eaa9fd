// The part of the google.visualization interface that torch-tb-profiler 0.4.3 calls, drawn as plain
// SVG and HTML, so that its pages work without internet. Nothing of Google's library is in here.
(() => {
  const COLOURS = ["#1f5fa8", "#e8870e", "#12876f", "#7b3fb5", "#c2185b", "#86b6e8", "#7a5230",
    "#b5a642", "#56616d", "#d32f2f"];
  const LEFT = 80;
  const TOP = 26;
  const BOTTOM = 44;

  const colour = (options, i) => {
    const list = options.colors || COLOURS;
    return list[i % list.length];
  };

  // A cell is a value, or {v: value, f: formatted text}.
  const value = (cell) => (cell && typeof cell === "object" && "v" in cell ? cell.v : cell);
  const number = (cell) => Number(value(cell)) || 0;
  const text = (cell) => {
    if (cell && typeof cell === "object" && "f" in cell) return cell.f;
    const plain = value(cell);
    if (plain === null || plain === undefined) return "";
    return typeof plain === "number" && !Number.isInteger(plain) ? plain.toFixed(2) : String(plain);
  };

  function mark(tag, attributes, content) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, setting] of Object.entries(attributes)) node.setAttribute(name, setting);
    if (content !== undefined) node.textContent = content;
    return node;
  }

  function hinted(node, hint) {
    node.append(mark("title", {}, hint));
    return node;
  }

  class DataTable {
    constructor() {
      this.columns = [];
      this.rows = [];
      this.properties = {};
    }
    addColumn(column, label) {
      this.columns.push(typeof column === "object" ? column : { type: column, label });
    }
    addRow(row) { this.rows.push(row); }
    addRows(rows) { this.rows.push(...rows); }
    getNumberOfRows() { return this.rows.length; }
    getValue(row, column) { return value(this.rows[row][column]); }
    setProperty(row, column, name, setting) {
      const key = `${row},${column}`;
      this.properties[key] = { ...this.properties[key], [name]: setting };
    }
    // The columns that are drawn: numbers, without the first one and without tooltips.
    series() {
      return this.columns
        .map((column, i) => ({ label: column.label || "", i, role: column.role, type: column.type }))
        .filter(({ i, role, type }) => i > 0 && !role && type === "number");
    }
  }

  class Chart {
    constructor(container) {
      this.container = container;
      this.listeners = {};
      this.selection = [];
    }
    clearChart() { this.container.replaceChildren(); }
    getSelection() { return this.selection; }
    setSelection() {}
    emit(name, event = {}) {
      for (const listener of this.listeners[name] || []) listener(event);
    }
    begin(options) {
      this.width = this.container.clientWidth || 600;
      this.height = typeof options.height === "number" ? options.height : 300;
      this.svg = mark("svg", { width: this.width, height: this.height,
        style: "font: 11px system-ui, 'DejaVu Sans', sans-serif; display: block" });
      this.container.replaceChildren(this.svg);
      if (options.title) {
        this.svg.append(mark("text", { x: 8, y: 15, "font-weight": "bold" }, options.title));
      }
    }
    // Lines and numbers from 0 to `largest`.
    scale(largest) {
      const bottom = this.height - BOTTOM;
      for (let k = 0; k <= 4; k++) {
        const y = bottom - ((bottom - TOP) * k) / 4;
        this.svg.append(
          mark("line", { x1: LEFT, x2: this.width - 12, y1: y, y2: y, stroke: "#d9dee4" }),
          mark("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" },
            Number(((largest * k) / 4).toPrecision(3)).toLocaleString("en")));
      }
    }
    legend(labels, options) {
      let x = LEFT;
      labels.forEach((label, i) => {
        this.svg.append(
          mark("rect", { x, y: this.height - 15, width: 10, height: 10, fill: colour(options, i) }),
          mark("text", { x: x + 14, y: this.height - 6 }, label));
        x += 34 + 6.5 * label.length;
      });
    }
  }

  class PieChart extends Chart {
    draw(data, options = {}) {
      this.begin(options);
      const sum = data.rows.reduce((total, row) => total + number(row[1]), 0) || 1;
      const radius = Math.min(this.height * 0.4, this.width * 0.22);
      const [x, y] = [radius + 16, this.height / 2 + 8];
      let angle = -Math.PI / 2;
      data.rows.forEach((row, i) => {
        const part = number(row[1]) / sum;
        const end = angle + Math.min(part, 0.99999) * 2 * Math.PI;
        const at = (a) => `${x + radius * Math.cos(a)},${y + radius * Math.sin(a)}`;
        const path = `M${x},${y} L${at(angle)} A${radius},${radius} 0 ${part > 0.5 ? 1 : 0} 1 ${at(end)} Z`;
        const label = `${text(row[0])}: ${text(row[1])} (${(100 * part).toFixed(1)} %)`;
        this.svg.append(hinted(mark("path", { d: path, fill: colour(options, i), stroke: "#fff" }), label));
        const line = 30 + 17 * i;
        if (line < this.height - 6) {
          const left = x + radius + 18;
          this.svg.append(
            mark("rect", { x: left, y: line - 9, width: 10, height: 10, fill: colour(options, i) }),
            mark("text", { x: left + 15, y: line },
              `${text(row[0]).slice(0, 60)}  ${(100 * part).toFixed(1)} %`));
        }
        angle = end;
      });
      this.emit("ready");
    }
  }

  // Columns, stacked; also for the combined and the stepped charts.
  class ColumnChart extends Chart {
    draw(data, options = {}) {
      this.begin(options);
      const series = data.series();
      const heights = data.rows.map((row) => series.reduce((sum, { i }) => sum + number(row[i]), 0));
      const largest = Math.max(...heights, 1e-9);
      this.scale(largest);
      const bottom = this.height - BOTTOM;
      const step = (this.width - LEFT - 12) / Math.max(data.rows.length, 1);
      data.rows.forEach((row, r) => {
        let y = bottom;
        series.forEach(({ i, label }, s) => {
          const height = ((bottom - TOP) * number(row[i])) / largest;
          y -= height;
          const box = mark("rect", { x: LEFT + (r + 0.1) * step, y, width: 0.8 * step, height,
            fill: colour(options, s) });
          box.addEventListener("click", () => {
            this.selection = [{ row: r, column: i }];
            this.emit("select");
          });
          this.svg.append(hinted(box, `${text(row[0])}, ${label}: ${text(row[i])}`));
        });
        const room = Math.floor(step / 6.5);
        if (room > 2) {
          this.svg.append(mark("text", { x: LEFT + (r + 0.5) * step, y: bottom + 14,
            "text-anchor": "middle" }, text(row[0]).slice(0, room)));
        }
      });
      this.legend(series.map(({ label }) => label), options);
      this.emit("ready");
    }
  }

  class LineChart extends Chart {
    draw(data, options = {}) {
      this.begin(options);
      const series = data.series();
      const places = data.rows.map((row) => number(row[0]));
      const first = Math.min(...places);
      const span = Math.max(...places) - first || 1;
      const largest = Math.max(...data.rows.flatMap((row) => series.map(({ i }) => number(row[i]))), 1e-9);
      this.scale(largest);
      const bottom = this.height - BOTTOM;
      const width = this.width - LEFT - 12;
      this.area = { left: LEFT, top: TOP, width, height: bottom - TOP };
      this.valueAt = (x) => first + (span * (x - LEFT)) / width;
      series.forEach(({ i }, s) => {
        const points = data.rows
          .filter((row) => value(row[i]) !== null && value(row[i]) !== undefined)
          .map((row) => `${LEFT + (width * (number(row[0]) - first)) / span},` +
            `${bottom - ((bottom - TOP) * number(row[i])) / largest}`);
        this.svg.append(mark("polyline", { points: points.join(" "), fill: "none",
          stroke: colour(options, s), "stroke-width": 1.5 }));
      });
      this.legend(series.map(({ label }) => label), options);
      this.emit("ready");
    }
    getChartLayoutInterface() {
      return { getChartAreaBoundingBox: () => this.area, getHAxisValue: (x) => this.valueAt(x) };
    }
  }

  class Table extends Chart {
    draw(data, options = {}) {
      const columns = data.columns.map((column, i) => ({ ...column, i })).filter(({ role }) => !role);
      const rows = data.rows.map((row, r) => ({ row, r }));
      if (options.sortColumn !== undefined) {
        const key = ({ row }) => value(row[options.sortColumn]);
        const sign = options.sortAscending ? 1 : -1;
        rows.sort((a, b) => (key(a) < key(b) ? -sign : key(a) > key(b) ? sign : 0));
      }
      const table = document.createElement("table");
      table.style.cssText = "border-collapse: collapse; width: 100%; font: 12px system-ui, sans-serif";
      const fill = (line, tag, content, isMarkup) => {
        const cell = line.appendChild(document.createElement(tag));
        cell.style.cssText = "border: 1px solid #d9dee4; padding: 3px 6px; text-align: left";
        if (isMarkup) cell.innerHTML = content;
        else cell.textContent = content;
        return cell;
      };
      const heading = table.insertRow();
      for (const { label } of columns) fill(heading, "th", label || "", false);
      for (const { row, r } of rows.slice(0, options.pageSize || rows.length)) {
        const line = table.insertRow();
        for (const { i } of columns) {
          const cell = fill(line, "td", text(row[i]), options.allowHtml);
          const style = (data.properties[`${r},${i}`] || {}).style;
          if (style) cell.style.cssText += style;
        }
      }
      this.container.replaceChildren(table);
      this.emit("ready");
    }
  }

  // Rows of (lane, label, tooltip, start, end).
  class Timeline extends Chart {
    draw(data, options = {}) {
      const lanes = [...new Set(data.rows.map((row) => text(row[0])))];
      this.begin({ ...options, height: 40 * lanes.length + 8 });
      const first = Math.min(...data.rows.map((row) => number(row[3])));
      const span = Math.max(...data.rows.map((row) => number(row[4]))) - first || 1;
      data.rows.forEach((row, r) => {
        const y = 40 * lanes.indexOf(text(row[0])) + 4;
        const x = (this.width * (number(row[3]) - first)) / span;
        const width = Math.max(1, (this.width * (number(row[4]) - number(row[3]))) / span);
        this.svg.append(hinted(mark("rect", { x, y, width, height: 34, fill: colour(options, r) }), text(row[2])));
        if (width > 60) {
          this.svg.append(mark("text", { x: x + 4, y: y + 21, fill: "#fff" },
            text(row[1]).slice(0, Math.floor(width / 7))));
        }
      });
      this.emit("ready");
    }
  }

  function arrayToDataTable([labels, ...rows]) {
    const table = new DataTable();
    labels.forEach((label, i) => {
      const column = label && typeof label === "object" && !("v" in label) ? label : { label: value(label) };
      table.addColumn({ type: i ? "number" : "string", ...column });
    });
    table.addRows(rows);
    return table;
  }

  const events = {
    addListener(chart, name, listener) {
      (chart.listeners[name] = chart.listeners[name] || []).push(listener);
    },
  };

  window.google = {
    charts: { load: () => Promise.resolve(), setOnLoadCallback: (callback) => callback() },
    visualization: { DataTable, PieChart, ColumnChart, ComboChart: ColumnChart,
      SteppedAreaChart: ColumnChart, LineChart, Table, Timeline, arrayToDataTable, events },
  };
})();
