"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const NS = "http://www.w3.org/2000/svg";
  const css = (name) => `var(--${name})`;
  const HUES = ["#3b8fd6", "#e69f00", "#1fa88c", "#b07ac9", "#e0552b", "#7a9a2e", "#d6679b", "#4f6bb5", "#8a8f98"];
  const curves = data.curves, SPAN = data.span_ms;
  const view = { from: 0, to: SPAN, at: null, tenant: null, filter: "", page: 0 };
  const ROWS = 40, LEFT = 58, RIGHT = 58;

  // -- small helpers --------------------------------------------------------------------------------------
  const make = (tag, attributes, ...inside) => {
    const node = document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    for (const child of inside) node.append(child);
    return node;
  };
  const count = (value) => {
    if (value === null || value === undefined) return "n/a";
    if (Math.abs(value) >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
    if (Math.abs(value) >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
    return value.toLocaleString("en", { maximumFractionDigits: 2 });
  };
  const share = (value) => (value === null || value === undefined ? "n/a" : (100 * value).toFixed(value && value < 0.1 ? 1 : 0) + "%");
  const seconds = (value) => {
    if (value === null || value === undefined) return "n/a";
    if (value < 1) return +(value * 1000).toPrecision(3) + " ms";
    return value < 120 ? +value.toPrecision(3) + " s" : Math.floor(value / 60) + "m" + String(Math.round(value % 60)).padStart(2, "0") + "s";
  };
  const clock = (ms) => new Date(data.start_unix_ms + ms).toISOString().slice(11, view.to - view.from < 20000 ? 23 : 19) + "Z";
  const nice = (top) => {
    const unit = Math.pow(10, Math.floor(Math.log10(top || 1)));
    return [1, 2, 2.5, 5, 10].map((k) => k * unit).find((k) => k >= top * 0.999) || top;
  };
  const tip = $("tip");
  const say = (text, event) => {
    tip.textContent = text;
    tip.style.display = text ? "block" : "none";
    if (!event || event.clientX === undefined) return;
    const right = event.clientX + 18 + tip.offsetWidth > innerWidth;
    tip.style.left = (right ? event.clientX - tip.offsetWidth - 14 : event.clientX + 14) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 6) + "px";
  };
  const legend = (id, entries) => {
    const box = $(id + "-legend");
    box.replaceChildren(...entries.map(([name, color, click]) => {
      const entry = document.createElement(click ? "button" : "span"), dot = document.createElement("i");
      dot.style.background = color;
      entry.append(dot, name);
      if (click) entry.addEventListener("click", click);
      return entry;
    }));
  };

  // -- frames ---------------------------------------------------------------------------------------------
  const frame = (id, height, label) => {
    const box = $(id), width = Math.max(320, box.clientWidth);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    box.replaceChildren(svg);
    return { svg, width, height, left: LEFT, right: width - RIGHT, top: 8, bottom: height - 22 };
  };
  const axisY = (f, top, format, side) => {
    for (const part of [0, 0.5, 1]) {
      const y = f.bottom - part * (f.bottom - f.top);
      if (side !== "right") f.svg.append(make("line", { class: "grid", x1: f.left, x2: f.right, y1: y, y2: y }));
      const x = side === "right" ? f.right + 6 : f.left - 6;
      f.svg.append(make("text", { x, y: y + 4, "text-anchor": side === "right" ? "start" : "end" }, format(part * top)));
    }
  };
  const axisTime = (f) => {
    const steps = Math.max(2, Math.floor((f.right - f.left) / 150));
    for (let i = 0; i <= steps; i++) {
      const x = f.left + (i / steps) * (f.right - f.left);
      const anchor = i === 0 ? "start" : i === steps ? "end" : "middle";
      f.svg.append(make("text", { x, y: f.height - 5, "text-anchor": anchor }, clock(view.from + (i / steps) * (view.to - view.from))));
    }
  };
  const placeX = (f, ms) => f.left + ((ms - view.from) / (view.to - view.from)) * (f.right - f.left);
  const timeAt = (f, event) => {
    const box = f.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * f.width;
    return view.from + ((Math.min(f.right, Math.max(f.left, x)) - f.left) / (f.right - f.left)) * (view.to - view.from);
  };
  const range = (xs) => {
    let low = xs.findIndex((x) => x >= view.from), high = xs.length - 1;
    if (low < 0) low = xs.length;
    while (high >= 0 && xs[high] > view.to) high--;
    return [Math.max(0, low - 1), Math.min(xs.length - 1, high + 1)];
  };
  const nearest = (xs, ms) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < ms) low = middle; else high = middle; }
    return high >= 0 && Math.abs(xs[high] - ms) < Math.abs(xs[low] - ms) ? high : low;
  };
  const clipped = (f, id) => {
    f.svg.append(make("clipPath", { id: id + "-clip" }, make("rect", { x: f.left, y: f.top - 4, width: f.right - f.left, height: f.bottom - f.top + 6 })));
    const group = make("g", { "clip-path": `url(#${id}-clip)` });
    f.svg.append(group);
    return group;
  };
  const path = (f, xs, ys, top, from, to) => {
    let d = "", pen = false;
    for (let i = from; i <= to; i++) {
      if (ys[i] === null) { pen = false; continue; }
      d += (pen ? "L" : "M") + placeX(f, xs[i]).toFixed(1) + " " + (f.bottom - (Math.min(ys[i], top) / top) * (f.bottom - f.top)).toFixed(1);
      pen = true;
    }
    return d;
  };
  const area = (f, xs, low, high, top, from, to) => {
    if (to < from) return "";
    const y = (value) => (f.bottom - (Math.min(value, top) / top) * (f.bottom - f.top)).toFixed(1);
    let d = "";
    for (let i = from; i <= to; i++) d += (d ? "L" : "M") + placeX(f, xs[i]).toFixed(1) + " " + y(high[i]);
    for (let i = to; i >= from; i--) d += "L" + placeX(f, xs[i]).toFixed(1) + " " + y(low[i]);
    return d + "Z";
  };

  // -- interaction shared by all charts over time ---------------------------------------------------------
  const frames = new Map();
  const zoom = (from, to) => {
    const width = Math.max(Math.min(20, SPAN), to - from);
    view.from = Math.max(0, Math.min(from, SPAN - width));
    view.to = Math.min(SPAN, view.from + width);
    draw();
  };
  const cursor = (ms) => {
    for (const f of frames.values()) {
      f.line.setAttribute("x1", placeX(f, ms)); f.line.setAttribute("x2", placeX(f, ms));
      f.line.style.display = ms === null || ms < view.from || ms > view.to ? "none" : "";
    }
  };
  const live = (f, id, describe, pick) => {
    f.line = make("line", { class: "cursor", y1: f.top, y2: f.bottom, style: "display:none" });
    f.band = make("rect", { class: "pick", y: f.top, height: f.bottom - f.top, width: 0 });
    f.svg.append(f.band, f.line);
    frames.set(id, f);
    const box = $(id);
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "chart over time; arrow keys move, plus and minus zoom, shift and arrows pan, Enter chooses, Escape resets");
    let start = null;
    f.svg.onpointerdown = (event) => { if (event.button === 0) { start = event; f.svg.setPointerCapture(event.pointerId); } };
    f.svg.onpointermove = (event) => {
      const ms = timeAt(f, event);
      cursor(ms);
      say(clock(ms) + "\n" + describe(ms), event);
      if (start && Math.abs(event.clientX - start.clientX) > 4) {
        const a = placeX(f, timeAt(f, start)), b = placeX(f, ms);
        f.band.setAttribute("x", Math.min(a, b)); f.band.setAttribute("width", Math.abs(a - b));
      }
    };
    f.svg.onpointerup = (event) => {
      if (!start) return;
      const a = timeAt(f, start), b = timeAt(f, event), dragged = Math.abs(event.clientX - start.clientX) > 4;
      start = null;
      if (dragged) zoom(Math.min(a, b), Math.max(a, b));
      else if (pick) pick(b);
    };
    f.svg.onpointerleave = () => { say(""); cursor(null); };
    f.svg.ondblclick = () => zoom(0, SPAN);
    box.onkeydown = (event) => {
      const width = view.to - view.from, step = width / 40, at = view.at === null ? (view.from + view.to) / 2 : view.at;
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move && event.shiftKey) zoom(view.from + move * width / 4, view.to + move * width / 4);
      else if (move) {
        view.at = Math.min(view.to, Math.max(view.from, at + move * step));
        cursor(view.at);
        const where = frames.get(id).svg.getBoundingClientRect();
        say(clock(view.at) + "\n" + describe(view.at), { clientX: where.left + where.width * (placeX(frames.get(id), view.at) / frames.get(id).width), clientY: where.top + 20 });
      } else if (event.key === "+" || event.key === "=") zoom(at - width / 4, at + width / 4);
      else if (event.key === "-") zoom(view.from - width / 2, view.to + width / 2);
      else if (event.key === "Escape") { say(""); zoom(0, SPAN); } else if (event.key === "Enter" && pick) pick(at);
      else return;
      event.preventDefault();
    };
    box.onblur = () => { say(""); cursor(null); };
  };

  // -- charts over time -----------------------------------------------------------------------------------
  const plain = (id, height, series, format, right) => {
    const f = frame(id, height, data.titles[id]);
    const [from, to] = range(curves.x);
    const high = (list) => list.reduce((most, one) => Math.max(most, ...one.y.map((v) => (v === null ? 0 : v))), 0);
    const top = series.every((one) => one.ratio) ? 1 : nice(Math.max(high(series.filter((one) => !one.right)), format === share ? 0.05 : 0));
    const other = right ? nice(high(series.filter((one) => one.right))) : 0;
    axisY(f, top, format);
    if (right) axisY(f, other, right, "right");
    const group = clipped(f, id);
    for (const one of series) {
      const scale = one.right ? other : top;
      if (one.bars) {
        for (let i = from; i <= to; i++) {
          if (!one.y[i]) continue;
          const x = placeX(f, curves.x[i]), h = Math.max(2, (one.y[i] / scale) * (f.bottom - f.top));
          group.append(make("line", { x1: x, x2: x, y1: f.bottom, y2: f.bottom - h, stroke: one.color, "stroke-width": one.wide || 2 }));
        }
      } else group.append(make("path", { d: path(f, curves.x, one.y, scale, from, to), fill: "none", stroke: one.color, "stroke-width": 1.6, "stroke-dasharray": one.dash || "" }));
      if (one.dots) for (let i = from; i <= to; i++) if (one.y[i] !== null) group.append(make("circle", { cx: placeX(f, curves.x[i]), cy: f.bottom - (one.y[i] / scale) * (f.bottom - f.top), r: 1.8, fill: one.color }));
    }
    axisTime(f);
    live(f, id, (ms) => { const i = nearest(curves.x, ms); return series.map((one) => `${one.name}: ${(one.right ? right : format)(one.y[i])}`).join("\n"); });
    legend(id, series.map((one) => [one.name, one.color]));
  };
  const drawUse = () => {
    const f = frame("use", 284, data.titles.use), usable = data.usable || Math.max(...curves.active, 1);
    f.top = 20;
    const [from, to] = range(curves.x), zero = curves.active.map(() => 0);
    const stack = curves.active.map((value, i) => value + curves.cached[i]), full = curves.active.map(() => usable);
    axisY(f, usable, (value) => count(Math.round(value)));
    const group = clipped(f, "use");
    for (const [low, high, color, opacity] of [[stack, full, "free", 0.16], [curves.active, stack, "cached", 0.5], [zero, curves.active, "active", 0.75]])
      group.append(make("path", { d: area(f, curves.x, low, high, usable, from, to), fill: css(color), opacity }));
    group.append(make("path", { d: path(f, curves.x, curves.active_low, usable, from, to), fill: "none", stroke: css("active"), "stroke-width": 1 }));
    const y = f.bottom - data.watermark * (f.bottom - f.top);
    f.svg.append(make("line", { class: "mark", x1: f.left, x2: f.right, y1: y, y2: y }));
    f.svg.append(make("text", { class: "strong", x: f.left + 4, y: y - 4 }, `safe watermark ${share(data.watermark)} (assumed)`));
    const wait = curves.ttft.length ? nice(Math.max(...curves.ttft)) : 0;
    if (wait) {
      axisY(f, wait, seconds, "right");
      const [a, b] = range(curves.ttft_x);
      for (let i = a; i <= b; i++)
        group.append(make("circle", { cx: placeX(f, curves.ttft_x[i]), cy: f.bottom - (curves.ttft[i] / wait) * (f.bottom - f.top), r: 2.6, fill: css("evicted"), stroke: "#0008", "stroke-width": 0.5 }));
    }
    let peak = 0;
    for (let i = from; i <= to; i++) if (curves.active[i] > curves.active[peak] || i === from) peak = i;
    if (to >= from) {
      const x = placeX(f, curves.x[peak]), top = f.bottom - (curves.active[peak] / usable) * (f.bottom - f.top);
      f.svg.append(make("path", { d: `M${x} ${top}l-5 -8h10z`, fill: "currentColor" }));
      f.svg.append(make("text", { class: "strong", x: Math.min(x + 8, f.right - 90), y: Math.max(12, top - 4) }, `peak ${share(curves.active[peak] / usable)}`));
    }
    axisTime(f);
    live(f, "use", (ms) => {
      const i = nearest(curves.x, ms), j = nearest(curves.ttft_x, ms);
      return `active ${count(curves.active[i])} (${share(curves.active[i] / usable)})\ncached ${count(curves.cached[i])}\nfree ${count(usable - stack[i])}` + (wait ? `\nnearest first token took ${seconds(curves.ttft[j])}` : "");
    }, pickMoment);
    legend("use", [["active", css("active")], ["cached", css("cached")], ["free", css("free")], ["TTFT (right)", css("evicted")]]);
  };
  // The largest holders of a tenant in what is shown, and what each of them held at each moment.
  const largest = (tenant, from, to, most) => {
    const sum = new Map();
    for (let i = from; i <= to; i++) for (const [who, blocks] of tenant.largest[i]) sum.set(who, (sum.get(who) || 0) + blocks);
    const chosen = [...sum].sort((a, b) => b[1] - a[1]).slice(0, most).map(([who]) => who);
    return chosen.map((who) => ({ id: tenant.requests[who], y: tenant.largest.map((list) => (list.find((one) => one[0] === who) || [0, 0])[1]) }));
  };
  const drawHolders = () => {
    if (!data.holders) return;
    const f = frame("holders", 230, data.titles.holders), xs = data.holders.x, tenants = data.holders.tenants;
    const chosen = tenants.find((one) => one.name === view.tenant), [from, to] = range(xs);
    let layers = tenants.map((one, k) => ({ name: one.name, y: one.blocks, color: HUES[k % HUES.length] }));
    if (chosen) {
      layers = largest(chosen, from, to, 8).map((one, k) => ({ name: one.id, y: one.y, color: HUES[k % 8] }));
      const rest = chosen.blocks.map((total, i) => Math.max(0, total - layers.reduce((sum, layer) => sum + layer.y[i], 0)));
      layers.push({ name: "other requests", y: rest, color: css("free") });
    }
    const top = Math.max(nice(Math.max(...xs.map((_, i) => layers.reduce((sum, layer) => sum + layer.y[i], 0)))), 1);
    axisY(f, top, (value) => count(Math.round(value)));
    const group = clipped(f, "holders");
    let low = xs.map(() => 0);
    for (const layer of layers) {
      const high = low.map((value, i) => value + layer.y[i]);
      group.append(make("path", { d: area(f, xs, low, high, top, from, to), fill: layer.color, opacity: 0.8 }));
      low = high;
    }
    if (data.usable && data.usable <= top) {
      const y = f.bottom - (data.usable / top) * (f.bottom - f.top);
      f.svg.append(make("line", { class: "mark", x1: f.left, x2: f.right, y1: y, y2: y }), make("text", { class: "strong", x: f.left + 4, y: y - 4 }, "all usable blocks"));
    }
    axisTime(f);
    live(f, "holders", (ms) => { const i = nearest(xs, ms); return layers.filter((layer) => layer.y[i]).slice(0, 9).map((layer) => `${layer.name}: ${count(layer.y[i])}`).join("\n"); }, pickMoment);
    legend("holders", [...(chosen ? [["◀ all tenants", "transparent", () => { view.tenant = null; drawHolders(); }]] : []),
      ...layers.map((layer) => [layer.name, layer.color, chosen ? null : () => { view.tenant = layer.name; drawHolders(); }])]);
  };
  const pickMoment = (ms) => { view.moment = ms; drawIcicle(); };
  const drawIcicle = () => {
    if (!data.holders) return;
    const xs = data.holders.x, tenants = data.holders.tenants;
    const peak = curves.x[curves.active.indexOf(Math.max(...curves.active))];
    const i = nearest(xs, view.moment === undefined ? peak : view.moment);
    const f = frame("icicle", 120, "who holds the cache at " + clock(xs[i]));
    const total = Math.max(data.usable, tenants.reduce((sum, one) => sum + one.blocks[i], 0)) || 1;
    const cell = (x, y, width, color, text, opacity) => {
      const w = (width / total) * (f.width - 2);
      if (w < 0.4) return;
      const node = make("rect", { x: 1 + (x / total) * (f.width - 2), y, width: w, height: 30, fill: color, opacity, stroke: css("bg"), tabindex: w > 20 ? 0 : -1 });
      node.onpointermove = (event) => say(text, event);
      node.onpointerleave = () => say("");
      node.onfocus = () => { const box = node.getBoundingClientRect(); say(text, { clientX: box.left, clientY: box.bottom }); };
      node.onblur = () => say("");
      f.svg.append(node);
      if (w > 60) f.svg.append(make("text", { x: 7 + (x / total) * (f.width - 2), y: y + 20, class: color === css("free") ? "strong" : "on", "pointer-events": "none" }, text.length * 7 > w ? text.slice(0, Math.floor(w / 7) - 1) + "…" : text));
    };
    const held = tenants.reduce((sum, one) => sum + one.blocks[i], 0);
    f.svg.append(make("text", { x: 1, y: 114 }, `at ${clock(xs[i])}; click a chart to choose another moment`));
    cell(0, 4, held, css("active"), `held ${count(held)} blocks`, 0.85);
    cell(held, 4, total - held, css("free"), `not held ${count(total - held)}`, 0.25);
    let x = 0;
    tenants.forEach((tenant, k) => {
      const color = HUES[k % HUES.length];
      cell(x, 36, tenant.blocks[i], color, `${tenant.name} ${count(tenant.blocks[i])} (${share(tenant.blocks[i] / total)})`, 0.9);
      let y = x;
      for (const [who, blocks] of tenant.largest[i]) {
        cell(y, 68, blocks, color, `${tenant.requests[who]} ${count(blocks)} (${share(blocks / total)})`, 0.65);
        y += blocks;
      }
      x += tenant.blocks[i];
    });
  };
  const drawLives = () => {
    if (!$("lives")) return;
    const order = $("sort").value, wanted = view.filter.toLowerCase();
    // id tenant arrival scheduled first finish blocks prompt output cached recomputed stops
    let rows = data.lives.rows.filter((r) => r[2] !== null && r[2] <= view.to && (r[5] === null ? SPAN : r[5]) >= view.from && (!wanted || r[0].toLowerCase().includes(wanted) || r[1].toLowerCase().includes(wanted)));
    const wait = (r) => (r[4] === null ? SPAN : r[4] - r[2]);
    if (order === "arrival") rows.sort((a, b) => a[2] - b[2]);
    if (order === "blocks") rows.sort((a, b) => b[6] - a[6]);
    if (order === "ttft") rows.sort((a, b) => wait(b) - wait(a));
    const pages = Math.max(1, Math.ceil(rows.length / ROWS));
    view.page = Math.min(Math.max(0, view.page), pages - 1);
    $("page").textContent = `${rows.length} requests, page ${view.page + 1} of ${pages}`;
    rows = rows.slice(view.page * ROWS, (view.page + 1) * ROWS);
    const f = frame("lives", rows.length * 14 + 34, `${rows.length} requests over time`);
    f.left = 150; f.right = f.width - 10;
    const group = clipped(f, "lives");
    rows.forEach((r, k) => {
      const y = f.top + k * 14, end = r[5] === null ? SPAN : r[5];
      f.svg.append(make("text", { x: f.left - 6, y: y + 10, "text-anchor": "end" }, r[0].length > 20 ? r[0].slice(0, 19) + "…" : r[0]));
      const bar = (a, b, color, opacity, height) => {
        if (b < view.from || a > view.to || b < a) return;
        const x = placeX(f, a), width = Math.max(1, placeX(f, b) - x);
        group.append(make("rect", { x, y: y + (12 - height) / 2, width, height, fill: color, opacity }));
      };
      const run = r[3] === null ? end : r[3], first = r[4] === null ? end : r[4];
      bar(r[2], run, css("free"), 0.5, 4);
      if (r[3] !== null) bar(run, first, css("cached"), 0.9, 10);
      if (r[4] !== null) bar(first, end, css("active"), 0.8, 10);
      for (const [stop, again, lasted] of r[11]) {
        const back = again === null ? end : again;
        bar(stop, back, css("bg"), 1, 12);
        bar(stop, back, css("free"), 0.5, 4);
        if (again !== null && lasted) bar(again, Math.min(end, again + lasted), css("evicted"), 1, 10);
        if (stop >= view.from && stop <= view.to) group.append(make("path", { d: `M${placeX(f, stop) - 4} ${y + 2}l8 8m0 -8l-8 8`, stroke: css("preempted"), "stroke-width": 2 }));
      }
      const hover = make("rect", { x: 0, y, width: f.width, height: 14, fill: "transparent" });
      hover.onpointermove = (event) => say(`${r[0]}  tenant ${r[1]}\n${r[7]} prompt tokens (${r[9]} cached), ${r[8]} output\nmost held ${count(r[6])} blocks (${share(r[6] / data.usable)})\nqueued ${r[3] === null ? "n/a" : seconds((r[3] - r[2]) / 1000)}, TTFT ${r[4] === null ? "n/a" : seconds((r[4] - r[2]) / 1000)}\npreempted ${r[11].length}×, ${count(r[10])} tokens computed again${r[5] === null ? "\nnot finished" : ""}`, event);
      hover.onpointerleave = () => say("");
      f.svg.append(hover);
    });
    axisTime(f);
    legend("lives", [["waiting", css("free")], ["prefill", css("cached")], ["generation", css("active")], ["✕ preempted", css("preempted")], ["recompute", css("evicted")]]);
  };

  // -- charts without time --------------------------------------------------------------------------------
  const logAxis = (f, low, high, format) => {
    const decades = Math.log10(high / low), parts = decades > 2.5 ? [1] : decades > 0.8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const part of parts) {
        const value = part * Math.pow(10, e);
        if (value < low || value > high) continue;
        const x = f.left + (Math.log(value / low) / Math.log(high / low)) * (f.right - f.left);
        f.svg.append(make("line", { class: "grid", x1: x, x2: x, y1: f.top, y2: f.bottom }), make("text", { x, y: f.height - 5, "text-anchor": "middle" }, format(value)));
      }
  };
  const histogram = (id, series, format, mark) => {
    if (!$(id)) return;
    const f = frame(id, 190, id);
    f.right = f.width - 12;
    let low = Math.min(...series.map((one) => one.h.edges[0])), high = Math.max(...series.map((one) => one.h.edges.at(-1)));
    if (mark) { low = Math.min(low, mark / 1.3); high = Math.max(high, mark * 1.3); }
    const top = nice(Math.max(...series.flatMap((one) => one.h.counts)));
    const x = (value) => f.left + (Math.log(value / low) / Math.log(high / low)) * (f.right - f.left);
    axisY(f, top, count);
    logAxis(f, low, high, format);
    for (const one of series) {
      let d = `M${x(one.h.edges[0])} ${f.bottom}`;
      one.h.counts.forEach((value, i) => { const y = f.bottom - (value / top) * (f.bottom - f.top); d += `L${x(one.h.edges[i])} ${y}L${x(one.h.edges[i + 1])} ${y}`; });
      f.svg.append(make("path", { d: d + `L${x(one.h.edges.at(-1))} ${f.bottom}Z`, fill: one.color, opacity: 0.45, stroke: one.color }));
    }
    if (mark) f.svg.append(make("line", { class: "mark", x1: x(mark), x2: x(mark), y1: f.top, y2: f.bottom }), make("text", { class: "strong", x: x(mark) - 4, y: f.top + 10, "text-anchor": "end" }, `today ${count(mark)}`));
    f.svg.onpointermove = (event) => {
      const box = f.svg.getBoundingClientRect(), at = low * Math.pow(high / low, (((event.clientX - box.left) / box.width) * f.width - f.left) / (f.right - f.left));
      say(format(at) + "\n" + series.map((one) => { const i = one.h.edges.findIndex((edge) => edge > at) - 1; return `${one.name}: ${i < 0 ? 0 : count(one.h.counts[i] || 0)} blocks`; }).join("\n"), event);
    };
    f.svg.onpointerleave = () => say("");
    legend(id, series.map((one) => [one.name, one.color]));
  };
  const drawCurve = () => {
    if (!$("curve")) return;
    const r = data.reuse, f = frame("curve", 220, data.titles.reuse), low = r.capacity[0], high = Math.max(r.capacity.at(-1), low + 1);
    const top = Math.min(1, nice(Math.max(...r.hit_ratio, 0.01)));
    const x = (value) => f.left + (Math.log(value / low) / Math.log(high / low)) * (f.right - f.left), y = (value) => f.bottom - (value / top) * (f.bottom - f.top);
    axisY(f, top, share);
    logAxis(f, low, high, (value) => count(value) + " blocks");
    let d = "";
    r.capacity.forEach((value, i) => { d += (d ? "L" : "M") + x(value) + " " + y(r.hit_ratio[i]); });
    f.svg.append(make("path", { d, fill: "none", stroke: css("cached"), "stroke-width": 2.2 }));
    if (r.today) f.svg.append(make("line", { class: "mark", x1: x(r.today), x2: x(r.today), y1: f.top, y2: f.bottom }), make("text", { class: "strong", x: x(r.today) + (x(r.today) > f.width / 2 ? -5 : 5), y: f.top + 11, "text-anchor": x(r.today) > f.width / 2 ? "end" : "start" }, `today ${count(r.today)} blocks: ${share(r.today_ratio)}`));
    f.svg.onpointermove = (event) => {
      const box = f.svg.getBoundingClientRect(), at = low * Math.pow(high / low, (((event.clientX - box.left) / box.width) * f.width - f.left) / (f.right - f.left));
      const i = nearest(r.capacity, at);
      say(`${count(r.capacity[i])} blocks: ${share(r.hit_ratio[i])}`, event);
    };
    f.svg.onpointerleave = () => say("");
  };
  const drawMap = () => {
    const box = $("minimap"), width = Math.max(320, box.clientWidth), height = 40;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "cache use over the whole run; drag to choose a part" });
    const usable = data.usable || Math.max(...curves.active, 1), x = (ms) => (ms / SPAN) * width;
    let d = `M0 ${height}`;
    curves.x.forEach((ms, i) => { d += `L${x(ms).toFixed(1)} ${(height - (curves.active[i] / usable) * (height - 2)).toFixed(1)}`; });
    svg.append(make("rect", { width, height, fill: css("soft") }), make("path", { d: d + `L${width} ${height}Z`, fill: css("active"), opacity: 0.55 }));
    curves.preemptions.forEach((value, i) => { if (value) svg.append(make("line", { x1: x(curves.x[i]), x2: x(curves.x[i]), y1: 0, y2: 6, stroke: css("preempted"), "stroke-width": 1.5 })); });
    const pick = make("rect", { class: "pick", y: 0, height, x: x(view.from), width: x(view.to) - x(view.from), stroke: css("active") });
    svg.append(pick);
    let start = null;
    const at = (event) => { const b = svg.getBoundingClientRect(); return Math.min(SPAN, Math.max(0, ((event.clientX - b.left) / b.width) * SPAN)); };
    svg.onpointerdown = (event) => { start = at(event); svg.setPointerCapture(event.pointerId); };
    svg.onpointermove = (event) => { if (start === null) return; const now = at(event); pick.setAttribute("x", x(Math.min(start, now))); pick.setAttribute("width", Math.abs(x(now) - x(start))); };
    svg.onpointerup = (event) => { const now = at(event), from = start; start = null; if (Math.abs(now - from) > SPAN / 200) zoom(Math.min(from, now), Math.max(from, now)); else zoom(now - (view.to - view.from) / 2, now + (view.to - view.from) / 2); };
    box.replaceChildren(svg);
    $("window").textContent = `${clock(view.from)} to ${clock(view.to)} (${seconds((view.to - view.from) / 1000)}); drag on a chart to zoom`;
  };

  const draw = () => {
    frames.clear();
    drawMap();
    drawUse();
    plain("queues", 150, [{ name: "running", y: curves.running, color: css("active") }, { name: "waiting", y: curves.waiting, color: css("evicted"), dash: "6 3" }], count);
    plain("preempt", 150, [{ name: "tokens computed again (right)", y: curves.recomputed, color: css("evicted"), bars: true, right: true, wide: 5 }, { name: "preemptions", y: curves.preemptions, color: css("preempted"), bars: true }], count, count);
    plain("hits", 140, [{ name: "hit ratio", y: curves.hit_ratio, color: css("cached"), ratio: true, dots: true }], share);
    plain("empty", 140, [{ name: "empty slots of held blocks", y: curves.empty, color: css("evicted") }], share);
    plain("rate", 140, [{ name: "output tokens/s", y: curves.output_rate, color: css("active") }, { name: "longest step (right)", y: curves.step, color: css("evicted"), right: true, dash: "2 3" }], count, seconds);
    drawHolders();
    drawIcicle();
    drawLives();
  };
  const drawStill = () => {
    if (data.residency) histogram("residency", [{ name: "since last taken", h: data.residency.lifetime, color: css("cached") }, { name: "since last let go (idle)", h: data.residency.idle, color: css("evicted") }], seconds);
    if (data.reuse) histogram("distance", [{ name: "reused blocks", h: data.reuse.distance, color: css("cached") }], (value) => count(Math.round(value)), data.reuse.today);
    drawCurve();
  };

  $("reset").onclick = () => zoom(0, SPAN);
  $("theme").onclick = () => {
    const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  };
  $("filter").oninput = (event) => { view.filter = event.target.value; view.page = 0; drawLives(); };
  if ($("sort")) {
    $("sort").onchange = () => { view.page = 0; drawLives(); };
    $("fewer").onclick = () => { view.page--; drawLives(); };
    $("more").onclick = () => { view.page++; drawLives(); };
  }
  for (const button of document.querySelectorAll("button.when"))
    button.onclick = () => {
      const at = +button.dataset.ms - data.start_unix_ms, half = Math.max(SPAN / 20, 1000);
      pickMoment(at);
      zoom(at - half, at + half);
      $("use").scrollIntoView({ block: "center" });
      $("use").focus({ preventScroll: true });
    };
  let timer = 0;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(() => { draw(); drawStill(); }, 120); });
  addEventListener("beforeprint", () => { draw(); drawStill(); });
  draw();
  drawStill();
  document.documentElement.dataset.ready = "1";
})();
