/* The page of maporl's report. Its data are in #data (gzip, base64). A live page gets them from "data" beside the page instead. */
"use strict";
(() => {
  const { html, render, useState, useEffect, useMemo, useRef } = htmPreact;
  const PAGE = 60;
  const LIGHT = ["#0b57d0", "#b3540a", "#0a7a4b", "#8e24aa", "#b3261e", "#00838f", "#5d4037", "#5f6368"];
  const DARK = ["#8ab4f8", "#ffb366", "#7bd8a5", "#d7a6ec", "#ff9d94", "#6fd3dd", "#c9b1a6", "#bdc1c6"];
  const percent = (x) => (x == null ? "–" : (100 * x).toFixed(1) + "%");
  const short = (x) => (x == null ? "–" : Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-4) ? x.toExponential(1) : String(+x.toPrecision(4)));
  /* How the numbers of a column are written, all with as many decimals, so that the largest has four digits. */
  const alike = (values) => {
    const most = Math.max(0, ...values.map((v) => Math.abs(v ?? 0)));
    if (most >= 1e5 || (most > 0 && most < 1e-3)) return (x) => (x == null ? "–" : x.toExponential(1));
    const digits = Number.isInteger(most) && values.every((v) => v == null || Number.isInteger(v)) ? 0 : Math.max(0, 3 - Math.floor(Math.log10(most || 1)));
    return (x) => (x == null ? "–" : x.toFixed(digits));
  };
  const remembered = { get: (k) => { try { return localStorage.getItem(k); } catch { return null; } }, set: (k, v) => { try { localStorage.setItem(k, v); } catch { /* a file's page may have no storage */ } } };

  /* -- charts ------------------------------------------------------------------------------------------------------ */

  function Chart({ chart, dark, high = 220 }) {
    const place = useRef(null);
    const [hidden, setHidden] = useState({});
    const [at, setAt] = useState(null);
    const last = chart.steps.length - 1, shown = chart.share ? percent : alike(chart.series.flatMap((s) => s.values));
    const held = chart.series.some((s) => s.held_out), plain = (s) => s.name.replace(/, held out/g, "");
    const colours = useMemo(() => {
      const palette = dark ? DARK : LIGHT, names = [...new Set(chart.series.map((s) => s.name.replace(/, held out$/, "")))];
      return chart.series.map((s) => palette[(s.colour ?? names.indexOf(s.name.replace(/, held out$/, ""))) % palette.length]);
    }, [chart, dark]);
    useEffect(() => {
      const style = getComputedStyle(document.documentElement), fg = style.getPropertyValue("--quiet"), line = style.getPropertyValue("--line");
      const data = [chart.steps], series = [{ label: "update" }], bands = [];
      chart.series.forEach((s, i) => {
        const show = !hidden[s.name], points = { show: s.held_out || chart.steps.length < 3, size: 5, fill: colours[i] };
        data.push(s.values);
        series.push({ label: s.name, stroke: colours[i], width: 1.5, dash: s.held_out ? [5, 4] : undefined, points, show, spanGaps: true, ...(s.held_out && s.values.filter((v) => v != null).length < 3 ? { paths: () => null } : {}) });
        if (s.low && !s.held_out && show) {
          data.push(s.high, s.low);
          series.push({ stroke: "transparent", points: { show: false }, spanGaps: true }, { stroke: "transparent", points: { show: false }, spanGaps: true });
          bands.push({ series: [series.length - 2, series.length - 1], fill: colours[i] + "2b" });
        }
      });
      if (chart.limit) {
        data.push(chart.steps.map(() => chart.limit[0]));
        series.push({ label: chart.limit[1], stroke: fg, width: 1, dash: [2, 3], points: { show: false } });
      }
      const axis = { stroke: fg, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
      const told = (_, ticks, __, ___, step) => ticks.map((t) => {
        const value = chart.share ? 100 * t : t, each = (chart.share ? 100 : 1) * step;
        let digits = 0;
        while (digits < 8 && Math.abs(each * 10 ** digits - Math.round(each * 10 ** digits)) > 1e-6) digits += 1;
        return (Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(1) : value.toFixed(digits)) + (chart.share ? "%" : "");
      });
      const wide = (u, values) => 18 + Math.max(0, ...(values || []).map((v) => (v ? 7.2 * v.length : 0)));
      const range = (_, low, high) => (low == null || high - low > 1e-12 ? uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true) : [Math.min(0, 1.5 * low), Math.max(chart.share ? 0.01 : low === 0 ? 1 : 0, 1.5 * high)]);
      const options = {
        width: place.current.clientWidth, height: high, legend: { show: false }, series, bands,
        scales: { x: { time: false }, y: { range: chart.whole ? [0, 1] : range } },
        axes: [{ ...axis, label: "update", labelSize: 18, labelFont: axis.font, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] }, { ...axis, size: wide, values: told }],
        cursor: { sync: { key: "updates", scales: ["x", null] }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
        hooks: { setCursor: [(u) => setAt(u.cursor.idx ?? null)], draw: [words] },
      };
      /* The last held-out value of each line, in words beside it. */
      function words(u) {
        u.ctx.save();
        u.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
        u.ctx.textAlign = "right";
        const ends = [];
        chart.series.forEach((s, i) => {
          const end = s.values.findLastIndex((v) => v != null);
          if (s.held_out && !hidden[s.name] && end > 0) ends.push([s, i, end, u.valToPos(s.values[end], "y", true)]);
        });
        if (ends.length > 3) ends.length = 0;
        let lowest = -Infinity;
        ends.sort((a, b) => a[3] - b[3]).forEach(([s, i, end, y]) => {
          const place = Math.max(y - 26 * devicePixelRatio > u.bbox.top ? y - 16 * devicePixelRatio : y + 24 * devicePixelRatio, lowest + 18 * devicePixelRatio);
          lowest = place;
          u.ctx.fillStyle = colours[i];
          u.ctx.lineWidth = 4 * devicePixelRatio;
          u.ctx.strokeStyle = style.getPropertyValue("--panel");
          for (const write of ["strokeText", "fillText"]) u.ctx[write](`${plain(s)}, held out: ${shown(s.values[end])}`, u.valToPos(chart.steps[end], "x", true) - 8 * devicePixelRatio, place);
        });
        u.ctx.restore();
      }
      const plot = new uPlot(options, data, place.current);
      const watcher = new ResizeObserver(() => plot.setSize({ width: place.current.clientWidth, height: high }));
      watcher.observe(place.current);
      return () => { watcher.disconnect(); plot.destroy(); };
    }, [chart, dark, hidden]);
    const known = (s) => s.values.filter((v) => v != null);
    const spoken = chart.series.filter((s) => known(s).length).map((s) => `${s.name}: from ${shown(known(s)[0])} to ${shown(known(s).at(-1))}`).join("; ");
    const every = Math.max(1, Math.ceil(chart.steps.length / 20));
    const rows = chart.steps.map((s, i) => [s, i]).filter(([, i]) => i % every === 0 || i === chart.steps.length - 1);
    return html`<figure id=${"chart-" + chart.id}>
      <figcaption><h3>${chart.title}</h3><div class="quiet">${chart.about}</div></figcaption>
      ${(held ? [false, true] : [null]).map((part) => html`<ul class="legend" aria-label=${part == null ? "Lines" : part ? "Lines of held-out questions" : "Lines of training"}>${part != null && html`<li class="quiet">${part ? "Held out:" : "In training:"}</li>`}
        ${chart.series.map((s, i) => (part == null || s.held_out === part) && html`<li><button aria-pressed=${String(!hidden[s.name])} onClick=${() => setHidden({ ...hidden, [s.name]: !hidden[s.name] })}>
        <span class=${"swatch" + (s.held_out ? " dots" : "")} style=${{ borderColor: colours[i] }}></span><bdi>${plain(s)}</bdi> <span class="value">${shown(s.values[at ?? last])}</span></button></li>`)}
        ${!part && chart.limit && html`<li class="quiet"><span class="swatch dotted"></span> ${chart.limit[1]} ${short(chart.limit[0])}</li>`}${!part && html`<li class="quiet">at update ${chart.steps[at ?? last]}</li>`}</ul>`)}
      <div ref=${place} role="img" aria-label=${`${chart.title} over updates. ${spoken}`}></div>
      <details><summary>Numbers${every > 1 ? `, every ${every} updates` : ""}</summary><div class="scroll"><table>
        <thead><tr><th scope="col">update</th>${chart.series.map((s) => html`<th scope="col" class="number">${s.name}</th>`)}</tr></thead>
        <tbody>${rows.map(([step, i]) => html`<tr><th scope="row">${step}</th>${chart.series.map((s) => html`<td class="number">${shown(s.values[i])}</td>`)}</tr>`)}</tbody>
      </table></div></details>
    </figure>`;
  }

  /* How answers changed from turn to turn: a column for each turn, and between columns ribbons whose width is a number of answers.
     Where dialogues ended early, each pair of turns has its own two columns, because it counts only the dialogues that went on. */
  function Flips({ flips }) {
    const W = 560, H = 190, top = 24, high = 140, bar = 16;
    const turns = flips.turns.map((t) => ({ ...t, before: t.stayed_right + t.right_to_wrong, after: t.stayed_right + t.wrong_to_right, all: t.stayed_right + t.right_to_wrong + t.wrong_to_right + t.stayed_wrong }));
    const apart = turns.some((t, i) => i > 0 && (t.before !== turns[i - 1].after || t.all !== turns[i - 1].all));
    const columns = apart ? 2 * turns.length : turns.length + 1, x = (i, side) => 70 + ((apart ? 2 * i + side : i + side) * (W - 140)) / Math.max(1, columns - 1);
    const scale = high / Math.max(1, ...turns.map((t) => t.all)), marks = [];
    const ribbon = (i, y0, y1, n, colour, text) => n > 0 && marks.push(html`<path d=${`M${x(i, 0) + bar} ${y0} C${(x(i, 0) + x(i, 1) + bar) / 2} ${y0} ${(x(i, 0) + x(i, 1) + bar) / 2} ${y1} ${x(i, 1)} ${y1} v${n * scale} C${(x(i, 0) + x(i, 1) + bar) / 2} ${y1 + n * scale} ${(x(i, 0) + x(i, 1) + bar) / 2} ${y0 + n * scale} ${x(i, 0) + bar} ${y0 + n * scale} z`} fill=${`rgba(var(--${colour}), .45)`}><title>${text}</title></path>`);
    turns.forEach((t, i) => {
      const name = `turn ${i + 1} to ${i + 2}`;
      ribbon(i, top, top, t.stayed_right, "up", `${name}: ${t.stayed_right} stayed right`);
      ribbon(i, top + t.stayed_right * scale, top + t.after * scale, t.right_to_wrong, "down", `${name}: ${t.right_to_wrong} spoiled`);
      ribbon(i, top + t.before * scale, top + t.stayed_right * scale, t.wrong_to_right, "up", `${name}: ${t.wrong_to_right} corrected`);
      ribbon(i, top + (t.before + t.wrong_to_right) * scale, top + (t.after + t.right_to_wrong) * scale, t.stayed_wrong, "down", `${name}: ${t.stayed_wrong} stayed wrong`);
      for (const side of i && !apart ? [1] : [0, 1]) {
        const right = side ? t.after : t.before;
        marks.push(html`<rect x=${x(i, side)} y=${top} width=${bar} height=${right * scale} fill="rgb(var(--up))" /><rect x=${x(i, side)} y=${top + right * scale} width=${bar} height=${(t.all - right) * scale} fill="rgb(var(--down))" />
          <text x=${x(i, side) + bar / 2} y="14" text-anchor="middle">turn ${i + side + 1}</text><text x=${x(i, side) + bar / 2} y=${top + high + 18} text-anchor="middle">${t.all ? percent(right / t.all) : percent(0)} right</text>`);
      }
    });
    const words = turns.map((t, i) => `Turn ${i + 1} to ${i + 2}: ${t.wrong_to_right} corrected, ${t.right_to_wrong} spoiled, ${t.stayed_right} stayed right, ${t.stayed_wrong} stayed wrong.`).join(" ") + (apart ? " Each pair of turns counts only the dialogues that went on." : "");
    return html`<figure><figcaption><h3>${flips.title}</h3></figcaption><svg viewBox=${`0 0 ${W} ${H}`} role="img" aria-label=${words}>${marks}</svg><p class="quiet">${words}</p></figure>`;
  }

  /* What the processes of each group did: a bar over the time of the last updates, in which the time of an update is divided by kind. */
  const WORK = { learning: 0, sampling: 2, sending: 1, saving: 3, dead: 4 };
  function Groups({ groups, dark }) {
    const palette = dark ? DARK : LIGHT, colour = (what) => (what === "idle" ? "var(--line)" : palette[WORK[what]]);
    const sum = (values) => values.reduce((a, b) => a + (b ?? 0), 0), seconds = groups.bars.map((bar) => sum(bar.updates.map(sum)));
    const longest = Math.max(1e-9, ...seconds), used = groups.kinds.filter((_, k) => groups.bars.some((bar) => bar.shares[k] > 0));
    const told = (bar) => groups.kinds.map((what, k) => (bar.shares[k] > 0 ? `${what} ${percent(bar.shares[k])}` : "")).filter(Boolean).join(", ");
    return html`<figure class="groups"><figcaption><h3>${groups.bottleneck}</h3><div class="quiet">Updates ${groups.steps[0]} to ${groups.steps.at(-1)}, ${short(longest)} s. A part between two gaps is an update; in it, work is in the order of the legend.</div></figcaption>
      <ul class="legend">${used.map((what) => html`<li><span class="block" style=${{ background: colour(what) }}></span> ${what}</li>`)}</ul>
      ${groups.bars.map((bar) => html`<div class="lane"><bdi>${bar.name}</bdi><div class="work" role="img" aria-label=${`${bar.name}: ${told(bar)}`}>${bar.updates.map((own, i) => html`<span class="update" title=${`update ${groups.steps[i]}: ${groups.kinds.map((what, k) => (own[k] > 0 ? `${what} ${short(own[k])} s` : "")).filter(Boolean).join(", ")}`} style=${{ width: `${(100 * sum(own)) / longest}%` }}>
        ${groups.kinds.map((what, k) => own[k] > 0 && html`<span class=${what} style=${{ width: `${(100 * own[k]) / sum(own)}%`, background: colour(what) }}></span>`)}</span>`)}</div></div>`)}
      <details><summary>Numbers</summary><div class="scroll"><table><thead><tr><th scope="col">processes</th>${groups.kinds.map((what) => html`<th scope="col" class="number">${what}</th>`)}</tr></thead>
        <tbody>${groups.bars.map((bar) => html`<tr><th scope="row">${bar.name}</th>${bar.shares.map((share) => html`<td class="number">${percent(share)}</td>`)}</tr>`)}</tbody></table></div></details></figure>`;
  }

  /* -- results ----------------------------------------------------------------------------------------------------- */

  const Interval = ({ share }) => share && share.value != null ? html`${percent(share.value)} <span class="quiet">${(100 * share.low).toFixed(1)}–${(100 * share.high).toFixed(1)}</span>` : "–";

  /* A table of texts: rows of cells, the first of which names its row. */
  const Rows = ({ columns, rows }) => html`<div class="scroll"><table><thead><tr>${columns.map((name, i) => html`<th scope="col" class=${i && isNumber(rows, i) ? "number" : ""}>${name}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell, i) => (i ? html`<td class=${isNumber(rows, i) ? "number" : ""}>${cell}</td>` : html`<th scope="row">${cell}</th>`))}</tr>`)}</tbody></table></div>`;
  const isNumber = (rows, i) => rows.every((row) => /^[–+-]?[\d.]*( nats)?%?$/.test(row[i]) || /^[+-]?[\d.]+%? \(/.test(row[i]));

  /* The first screen: a verdict, at most four numbers, the first chart, and two dialogues. */
  function Result({ run, number, level, open, children }) {
    const { verdict, about, numbers } = run.result, Title = level, played = (one) => one.lines.length > 0;
    if (!numbers.length && !run.exhibits.length && !children?.length) return html`<p>Nothing has been measured yet.</p><${Audit} audit=${run.audit} />`;
    return html`${verdict.length > 0 && html`<p class="verdict">${verdict.join(" ")}</p>`}
      ${numbers.length > 0 && html`<p class="quiet">${about} Ranges are 95% intervals.</p><dl class="numbers">${numbers.map((n) => html`<div><dt>${n.label}</dt><dd><strong>${n.value}</strong> <span class="interval">${n.interval}</span> <span class="quiet">${n.note}</span></dd></div>`)}</dl>`}
      ${run.audit.findings.length > 0 && html`<details><summary>${["void", "idle", "doubt"].map((s) => [run.audit.findings.filter((f) => f.severity === s).length, s]).filter(([n]) => n > 0).map(([n, s]) => `${n} ${s}`).join(", ")}: ${run.audit.findings[0].text.split(";")[0]}</summary><${Audit} audit=${run.audit} /></details>`}
      <div class=${`first of-${run.exhibits.filter(played).length}${children?.length ? " charted" : ""}`}>${children}${run.exhibits.filter(played).map((one) => html`<${Exhibit} one=${one} title=${Title} open=${open(`${number}/${one.key}`)} />`)}</div>
      ${run.exhibits.filter((one) => !played(one)).map((one) => html`<p class="missing"><strong>${one.title}?</strong> ${one.told}</p>`)}`;
  }

  /* What the run did not do although a part of it promised it. */
  const Audit = ({ audit }) => html`${audit.findings.length > 0 ? html`<ul class="audit">${audit.findings.map((f) => html`<li class=${f.severity}><strong>${f.severity}</strong> ${f.text}</li>`)}</ul>` : html`<p class="quiet">Nothing is void, idle or in doubt.</p>`}${audit.note && html`<p class="quiet">Audited ${audit.note}.</p>`}`;

  /* One dialogue as a conversation. */
  function Exhibit({ one, title, open }) {
    const Title = title, agents = [...new Set(one.lines.map((l) => l.agent))];
    const told = (l) => (l.correct == null ? (l.score == null ? "" : `score ${l.score}`) : one.game ? (l.correct ? "✓ won" : "✗ did not win") : l.correct ? "✓ right" : "✗ wrong");
    return html`<article class="exhibit"><${Title}>${one.title}<//><p>${one.told}</p>
      <div class="quiet">${one.where}</div><div class="asked"><span class="text" dir="auto">${one.question}</span>${one.label && html`<span class="quiet">right answer: <strong dir="auto">${one.label}</strong></span>`}</div>
      <ol class="talk">${one.lines.map((l) => html`<li class=${(agents.indexOf(l.agent) % 2 ? "other" : "") + (l.changed ? " changed" : "") + (l.correct == null ? "" : l.correct ? " is-right" : " is-wrong")}>
        <div class="who"><span><strong><bdi>${l.agent}</bdi></strong>${l.role && html` (<bdi>${l.role}</bdi>)`} <span class="quiet">${l.when}${l.changed ? ", changed" : ""}</span></span> ${told(l) && html`<span class=${"badge " + (l.correct == null ? "" : l.correct ? "right" : "wrong")}>${told(l)}</span>`}</div>
        <div class="text" dir="auto">${l.text || html`<span class="quiet">(nothing)</span>`}</div>${l.answer != null && html`<div class="quiet">${one.game ? "move" : "answer"}: <strong dir="auto">${l.answer}</strong></div>`}</li>`)}</ol>
      ${open && html`<button onClick=${open}>open the whole dialogue${one.more > 0 ? `, ${one.more} more utterances` : ""}</button>`}</article>`;
  }

  /* What a run's records say beside the first screen: tables, and a few sentences. */
  function Details({ run, number, level, show }) {
    const Title = level, Part = level === "h2" ? "h3" : "h4";
    const tables = [run.results.length > 0 && html`<section><${Part}>Who is right in which turn?<//><p class="quiet">Held-out accuracy by turn and agent, with 95% intervals.</p><div class="scroll"><table>
        <thead><tr><th scope="col">turn</th><th scope="col">who</th><th scope="col">before training</th><th scope="col">after training</th></tr></thead>
        <tbody>${run.results.map((r) => html`<tr><td>${r.turn}</td><th scope="row">${r.who}</th><td><${Interval} share=${r.before} /></td><td><${Interval} share=${r.after} /></td></tr>`)}</tbody></table></div></section>`,
      ...run.tables.map((t) => html`<section><${Part}>${t.title}<//><p class="quiet">${t.about}</p><${Rows} ...${t} /></section>`),
      ...run.told.map((part) => html`<section><${Part}>${part.title}<//><p>${part.text}</p></section>`)].filter(Boolean);
    return html`${tables.length > 0 && html`<section aria-label="What is behind it"><${Title}>What is behind it<//><div class="panels">${tables}</div></section>`}
      ${run.crossplay && html`<details open><summary>Cross-play: agents of different runs in one team</summary><p class="quiet">${run.crossplay.about} Accuracy of the last turn, with 95% intervals.</p><div class="scroll"><table>
        <thead><tr><th scope="col"></th>${run.crossplay.runs.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
        <tbody>${run.crossplay.cells.map((cells, i) => html`<tr><th scope="row">${run.crossplay.runs[i]}</th>${cells.map((cell, j) => html`<td class="cell" style=${{ background: `rgba(var(--high), ${(0.3 * (cell.value ?? 0)).toFixed(2)})`, outline: i === j ? "2px solid rgb(var(--low))" : "" }}><${Interval} share=${cell} /></td>`)}</tr>`)}</tbody></table></div></details>`}
      ${run.setup.length > 0 && html`<section aria-label="Setup"><${Title}>The team and its training<//><div class="panels"><div class="scroll"><table class="setup"><tbody>${run.setup.map(([name, value]) => html`<tr><th scope="row">${name}</th><td>${value}</td></tr>`)}</tbody></table></div>
        ${run.learns_from.length > 0 && html`<section><${Part}>What it learns from<//><ul>${run.learns_from.map((text) => html`<li>${text}</li>`)}</ul></section>`}</div></section>`}
      ${run.failures.lines.length > 0 && html`<section aria-label="Where it still fails"><${Title} id="failures">Where it still fails<//>
        <p class="quiet">Counted over ${run.failures.scope}, with 95% intervals.</p>
        <ul>${run.failures.lines.map((line, i) => html`<li>${line.text} <button aria-label=${"show the dialogues: " + line.text} onClick=${() => show(`${number}.${i}`)}>show them</button></li>`)}</ul>
        <div class="panels">${run.failures.groups.map((group) => html`<section><${Part}>${group.title}<//><div class="scroll"><table>
          <thead><tr><th scope="col">${group.column}</th><th scope="col" class="number">questions</th><th scope="col" class="number">right before</th><th scope="col">right now</th></tr></thead>
          <tbody>${group.rows.map((row) => html`<tr><th scope="row">${row.name}</th><td class="number">${row.questions}</td><td class="number">${percent(row.before)}</td>
            <td><span class="bar" style=${{ width: 8 * row.now + "rem" }}></span> <${Interval} share=${{ value: row.now, low: row.low, high: row.high }} /></td></tr>`)}</tbody></table></div></section>`)}</div>
      </section>`}`;
  }

  /* -- dialogues --------------------------------------------------------------------------------------------------- */

  const texts = new WeakMap();
  const searchable = (d) => {
    if (!texts.has(d)) texts.set(d, [d.question, d.label, d.id, d.kind || "", ...d.said.map((u) => [u.agent, u.text, ...u.calls.flatMap((call) => [call.line, call.result || ""])].join(" "))].join("\n").toLowerCase());
    return texts.get(d);
  };
  const place = (when) => (when === "after" ? "held out, after" : when === "before" ? "held out, before" : "training, update " + when);
  const mark = (correct) => (correct == null ? "·" : correct ? "✓" : "✗");

  function Answer({ text, trace, shade }) {
    const [tip, setTip] = useState("");
    if (!trace || shade === "nothing") return html`<div class="text" dir="auto">${text || html`<span class="quiet">(nothing)</span>`}</div>`;
    const values = trace[shade], most = Math.max(1e-9, ...(values || []).map((v) => Math.abs(v ?? 0)));
    const colour = (v) => v == null ? "" : shade === "logprobs" ? `rgba(var(--low), ${(0.55 * (1 - Math.exp(v))).toFixed(3)})` : `rgba(var(${v >= 0 ? "--high" : "--low"}), ${((0.55 * Math.abs(v)) / most).toFixed(3)})`;
    const told = (i) => `${JSON.stringify(trace.pieces[i])}: log-probability ${short(trace.logprobs[i])}${trace.logprobs[i] == null ? "" : ` (${percent(Math.exp(trace.logprobs[i]))})`}${trace.values ? `, value ${short(trace.values[i])}` : ""}, advantage ${short(trace.advantages[i])}`;
    const scale = !values ? "This answer has no such numbers" : shade === "logprobs" ? "A deeper orange means a less likely token" : `Blue is above 0 and orange below; the deepest colour is ${short(most)}`;
    return html`<div class="text" dir="auto" onMouseLeave=${() => setTip("")}>${trace.pieces.map((piece, i) => html`<span class="tok" style=${{ background: values ? colour(values[i]) : "" }} onMouseEnter=${() => setTip(told(i))} onClick=${() => setTip(told(i))}>${piece}</span>`)}</div>
      <div class="tip" aria-live="off">${tip || `${scale}. Point at a token to see its numbers.`}</div>
      <details><summary>Tokens as a table</summary><div class="scroll"><table><thead><tr><th scope="col">token</th><th scope="col" class="number">log-probability</th>${trace.values && html`<th scope="col" class="number">value</th>`}<th scope="col" class="number">advantage</th></tr></thead>
        <tbody>${trace.pieces.slice(0, 500).map((piece, i) => html`<tr><th scope="row"><code>${JSON.stringify(piece)}</code></th><td class="number">${short(trace.logprobs[i])}</td>${trace.values && html`<td class="number">${short(trace.values[i])}</td>`}<td class="number">${short(trace.advantages[i])}</td></tr>`)}</tbody></table></div></details>`;
  }

  function Called({ call }) {
    const told = call.result == null ? "not carried out" : [call.error && `failed (${call.error})`, `${short(1000 * call.seconds)} ms`, call.reward != null && `paid ${short(call.reward)}`, call.left_out && `${call.left_out} tokens left out`].filter(Boolean).join(", ");
    return html`<details class=${"called" + (call.error ? " failed" : "")}><summary><bdi>${call.line}</bdi> → ${told}</summary>${call.result != null && html`<div class="text" dir="auto">${call.result}</div>`}</details>`;
  }

  function Said({ u, shade, game, rewards, written }) {
    const verdict = u.correct == null ? (game ? "not decided" : "not graded") : u.correct ? (game ? "✓ won" : "✓ right") : game ? "✗ did not win" : "✗ wrong";
    return html`<article class=${"said" + (u.correct == null ? "" : u.correct ? " is-right" : " is-wrong")}>
      <h4><bdi>${u.agent}</bdi>${u.role && u.role !== u.agent && html` (<bdi>${u.role}</bdi>)`} <span class=${"badge " + (u.correct == null ? "" : u.correct ? "right" : "wrong")}>${verdict}</span></h4>
      <div class="quiet">${u.answer == null ? (u.correct == null ? "" : "no answer could be read") : html`${game ? "move" : "answer"} <strong>${u.answer}</strong>`}${[u.reason, u.stop === "length" && "cut off at the length limit"].filter(Boolean).map((told, i) => (i ? "; " : u.answer == null && u.correct == null ? "" : ": ") + told)}</div>
      <${Answer} text=${u.text} trace=${u.trace} shade=${shade} />
      ${u.calls.map((call) => html`<${Called} call=${call} />`)}
      ${u.restated != null && html`<div class="quiet">restated: ${u.restated}</div>`}
      ${(u.notes || []).map((note) => html`<div class="quiet">${note}</div>`)}
      ${u.credited && html`<div class="quiet">${u.credited}</div>`}
      ${u.compared && html`<div class="quiet">${u.compared}</div>`}
      <dl class="terms">${Object.entries(u.rewards).map(([name, value]) => html`<div title=${rewards[name] || ""}><dt>${name}</dt><dd>${written(value)}</dd></div>`)}</dl>
      <details><summary>What <bdi>${u.agent}</bdi> was told</summary>${u.heard.map(([role, content]) => html`<div class="quiet">${role}</div><div class="text" dir="auto">${content}</div>`)}</details>
    </article>`;
  }

  function Detail({ d, shade, twin, open, many, rewards }) {
    const turns = [...new Set(d.said.map((u) => u.turn))].sort((a, b) => a - b), agents = [...new Set(d.said.map((u) => u.agent))];
    const written = alike(d.said.flatMap((u) => Object.values(u.rewards)));
    return html`<div class="question"><div class="quiet">${many ? many[d.run].name + ", " : ""}${place(d.when)}${d.kind && html`, <bdi>${d.kind}</bdi>`}, <bdi>${d.id}</bdi></div>
        <div class="text" dir="auto">${d.question}</div><div>${!d.game && d.label && html`right answer: <strong dir="auto">${d.label}</strong> `}${d.outcome ? html`<span class=${d.game ? "" : "quiet"}>${d.game ? "ended: " : "("}${d.outcome}${d.game ? "" : ")"}</span>` : ""}</div>
        ${twin && html`<button onClick=${() => open(twin)}>the same question ${twin.when === "before" ? "before" : "after"} training</button>`}</div>
      <div class="turns">${turns.map((turn) => html`<section class="scroll"><h3>Turn ${turn}</h3><div class="seats" style=${{ "--seats": agents.length }}>
        ${agents.map((agent) => { const own = d.said.filter((u) => u.turn === turn && u.agent === agent); return own.length ? html`<div>${own.map((u) => html`<${Said} u=${u} shade=${shade} game=${d.game} rewards=${rewards} written=${written} />`)}</div>` : html`<div class="quiet">${agent} was not asked</div>`; })}</div></section>`)}</div>`;
  }

  function readHash() {
    const given = new URLSearchParams(location.hash.slice(1));
    return { flags: (given.get("show") || "").split(",").filter(Boolean), when: given.get("when") || "all", kind: given.get("kind") || "", words: given.get("search") || "", open: given.get("dialogue") || "", line: given.get("line") || "", run: given.get("run") || "", shade: given.get("shade") || "advantages" };
  }

  function Dialogues({ data, view, setView }) {
    const { flags, when, kind, words, open, line, run, shade } = view;
    const [most, setMost] = useState(PAGE);
    const search = useRef(null), detail = useRef(null), list = useRef(null);
    const kinds = useMemo(() => [...new Set(data.dialogues.map((d) => d.kind).filter(Boolean))].sort(), [data]);
    const counted = useMemo(() => {
      const [r, i] = line.split(".");
      const found = data.runs[r]?.failures.lines[i];
      return found && { text: found.text, run: +r, keys: new Set(found.keys) };
    }, [data, line]);
    const chosen = useMemo(() => {
      const wanted = words.trim().toLowerCase();
      return data.dialogues.filter((d) => flags.every((f) => d.flags.includes(f)) && (!counted || (d.run === counted.run && counted.keys.has(d.key.slice(d.key.indexOf("/") + 1)))) && (!run || String(d.run) === run) && (when === "all" || (when === "train" ? typeof d.when === "number" : d.when === when)) && (!kind || d.kind === kind) && (!wanted || searchable(d).includes(wanted)));
    }, [data, flags.join(), when, kind, words, counted, run]);
    /* For how many of these each button holds. */
    const holds = useMemo(() => { const found = {}; for (const d of chosen) for (const f of d.flags) found[f] = (found[f] || 0) + 1; return found; }, [chosen]);
    const change = (part, push) => { setMost(PAGE); setView({ ...view, ...part }, push); };
    const current = chosen.find((d) => d.key === open) || data.dialogues.find((d) => d.key === open) || chosen[0];
    const at = chosen.indexOf(current);
    const go = (step) => {
      const next = chosen[Math.min(chosen.length - 1, Math.max(0, at + step))];
      if (!next) return;
      if (chosen.indexOf(next) >= most) setMost(most + PAGE);
      setView({ ...view, open: next.key });
      requestAnimationFrame(() => {
        list.current?.querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" });
        const top = detail.current.getBoundingClientRect().top;
        if (top < 0 || top > innerHeight / 2) detail.current.scrollIntoView();
      });
    };
    useEffect(() => {
      const press = (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        if (event.key === "Escape" && event.target === search.current) return search.current.blur();
        if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
        if (event.key === "j") go(1);
        else if (event.key === "k") go(-1);
        else if (event.key === "/") { event.preventDefault(); search.current.focus(); }
      };
      document.addEventListener("keydown", press);
      return () => document.removeEventListener("keydown", press);
    });
    const twin = current && typeof current.when === "string" && data.dialogues.find((d) => d.run === current.run && d.id === current.id && typeof d.when === "string" && d.when !== current.when);
    const select = (d) => { setView({ ...view, open: d.key }, true); if (matchMedia("(max-width: 760px)").matches) requestAnimationFrame(() => detail.current.scrollIntoView()); };
    const none = { flags: [], when: "all", kind: "", words: "", line: "", run: "" };
    const offered = Object.entries(data.flags).filter(([name]) => data.dialogues.some((d) => d.flags.includes(name)));
    const marked = data.dialogues.some((d) => d.said.some((u) => u.correct != null)), scored = data.dialogues.some((d) => d.said.some((u) => u.rewards.score != null));
    const traced = current?.said.some((u) => u.trace);
    return html`<section id="dialogues" aria-label="Dialogues" tabindex="-1"><h2>Dialogues</h2>
      <p class="quiet">${data.dialogues.length < data.recorded ? `${data.dialogues.length} of ${data.recorded} recorded dialogues. ` : ""}<span class="keys">Keys: <kbd>j</kbd> next, <kbd>k</kbd> previous, <kbd>/</kbd> search. </span>${marked ? "The marks in the list are the answers in the order in which they were given: ✓ right, ✗ wrong. " : scored ? "The numbers in the list are the scores of the answers in the order in which they were given. " : ""}The address of the page keeps the filters and the open dialogue.</p>
      <div class="tools" role="search"><label>Search <input type="search" ref=${search} value=${words} onInput=${(e) => change({ words: e.target.value })} placeholder="question, answer, words" /></label>
        <label>From <select value=${when} onChange=${(e) => change({ when: e.target.value }, true)}><option value="all">everywhere</option><option value="after">held out, after</option><option value="before">held out, before</option><option value="train">training</option></select></label>
        ${data.runs.length > 1 && html`<label>Run <select value=${run} onChange=${(e) => change({ run: e.target.value }, true)}><option value="">all</option>${data.runs.map((r, i) => html`<option value=${String(i)}>${r.name}</option>`)}</select></label>`}
        ${kinds.length > 1 && html`<label>Task <select value=${kind} onChange=${(e) => change({ kind: e.target.value }, true)}><option value="">all</option>${kinds.map((k) => html`<option value=${k}>${k}</option>`)}</select></label>`}
        <label>Shade tokens by <select value=${shade} disabled=${!traced} onChange=${(e) => setView({ ...view, shade: e.target.value })}><option value="advantages">advantage</option><option value="values">value</option><option value="logprobs">log-probability</option><option value="nothing">nothing</option></select></label>${!traced && html`<span class="quiet">(${current && typeof current.when === "number" ? "the numbers of this dialogue are in the run's folder" : "only dialogues of training have these numbers"})</span>`}</div>
      <div class="tools" role="group" aria-label="Show only">${offered.map(([name, about]) => html`<button title=${about} aria-pressed=${String(flags.includes(name))} disabled=${!holds[name] && !flags.includes(name)} onClick=${() => change({ flags: flags.includes(name) ? flags.filter((f) => f !== name) : [...flags, name] }, true)}>${name} <span class="count">${holds[name] || 0}</span></button>`)}</div>
      <details><summary>What the buttons and the rewards mean</summary><dl class="meanings">${offered.map(([name, about]) => html`<div><dt>${name}</dt><dd>${about}</dd></div>`)}${Object.entries(data.rewards).map(([name, about]) => html`<div><dt>${name}</dt><dd>${about}</dd></div>`)}</dl><p class="quiet">With several buttons pressed, the list shows the dialogues for which all of them hold.</p></details>
      ${counted && html`<p>Shown are only the dialogues counted here: ${counted.text} <button onClick=${() => change({ line: "" }, true)}>show all</button></p>`}
      <p role="status" id="count">${chosen.length} ${chosen.length === 1 ? "dialogue" : "dialogues"}${chosen.length === 0 && data.dialogues.length > 0 ? html` <button onClick=${() => change(none, true)}>clear the filters</button>` : ""}</p>
      ${data.dialogues.length === 0 ? html`<p>No dialogue has been recorded yet.</p>` : html`<div class="dialogues">
        <ul class="list" ref=${list}>${chosen.slice(0, most).map((d) => html`<li key=${d.key}><button aria-current=${String(d === current)} onClick=${() => select(d)}>
          <span class="what" dir="auto">${d.question.slice(0, 200) || d.id}</span><span class="quiet">${data.runs.length > 1 ? data.runs[d.run].name + ", " : ""}${place(d.when)} ${d.game ? d.outcome : html`<span class="marks" aria-label=${d.flags.join(", ")}>${d.said.filter((u) => u.correct != null).map((u) => html`<span class=${u.correct ? "right" : "wrong"}>${mark(u.correct)}</span>`)}</span>${!marked && scored && d.said.filter((u) => u.rewards.score != null).map((u) => short(u.rewards.score)).join(" ")}`}</span></button></li>`)}
          ${chosen.length > most && html`<li><button onClick=${() => setMost(most + PAGE)}>show more of ${chosen.length}</button></li>`}</ul>
        <div class="detail" ref=${detail}>${current && html`<${Detail} key=${current.key} d=${current} shade=${shade} twin=${twin} open=${select} many=${data.runs.length > 1 ? data.runs : null} rewards=${data.rewards} />`}</div></div>`}
    </section>`;
  }

  /* -- a seat at the table ------------------------------------------------------------------------------------------- */

  function Seat() {
    const [asked, setAsked] = useState(null);
    const [text, setText] = useState("");
    const [trouble, setTrouble] = useState("");
    useEffect(() => {
      let stopped = false;
      const ask = async () => {
        try {
          const answer = await fetch("seat");
          if (answer.ok) { const now = await answer.json(); setAsked((old) => (old && old.number === now.number && old.over === now.over ? old : now)); }
        } catch { /* the page says that the connection is lost */ }
        if (!stopped) setTimeout(ask, 500);
      };
      ask();
      return () => { stopped = true; };
    }, []);
    if (!asked) return null;
    const say = async (event) => {
      event.preventDefault();
      try {
        const answer = await fetch("seat", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ number: asked.number, text }) });
        setTrouble(answer.ok ? "" : await answer.text());
        if (answer.ok) { setText(""); setAsked({}); }
      } catch { setTrouble("The game cannot be reached. Is maporl play still running?"); }
    };
    return html`<section aria-label="Your seat"><h2>Your seat</h2>${asked.over ? html`${asked.lines.map((line) => html`<div class="text" dir="auto">${line}</div>`)}<p role="status">That was the last question.</p>` : asked.number == null ? html`<p role="status">The others are speaking.</p>` : html`<form onSubmit=${say}>
      ${asked.lines.map((line) => html`<div class="text" dir="auto">${line}</div>`)}
      <label>You are ${asked.prompt}. Your answer:<br /><textarea rows="4" cols="60" value=${text} onInput=${(e) => setText(e.target.value)}></textarea></label><br />
      <button disabled=${!text.trim()}>say it</button> <span role="alert" class="wrong">${trouble}</span></form>`}</section>`;
  }

  /* -- the page ---------------------------------------------------------------------------------------------------- */

  function Page({ first, live }) {
    const [data, setData] = useState(first);
    const [view, setViewState] = useState(readHash());
    const [lost, setLost] = useState(false);
    const [theme, setTheme] = useState(remembered.get("maporl-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
    document.documentElement.dataset.theme = theme;
    document.title = `${data.title} · maporl`;
    useEffect(() => {
      const follow = () => setViewState(readHash());
      addEventListener("hashchange", follow);
      return () => removeEventListener("hashchange", follow);
    }, []);
    useEffect(() => {
      if (!live) return undefined;
      let epoch = -1, after = -1, stopped = false;
      const ask = async () => {
        try {
          const answer = await fetch(`data?epoch=${epoch}&after=${after}`);
          if (answer.ok) {
            const now = await answer.json();
            if (now.epoch !== epoch || now.last !== after || now.dialogues.length) ({ epoch, last: after } = now);
            setData((old) => ({ ...now, dialogues: joined(now.fresh ? [] : old.dialogues, now.dialogues, readHash().open) }));
          }
          setLost(!answer.ok);
        } catch { setLost(true); }
        if (!stopped) setTimeout(ask, 2000);
      };
      ask();
      return () => { stopped = true; };
    }, []);
    const setView = (next, push) => {
      setViewState(next);
      const hash = new URLSearchParams();
      if (next.flags.length) hash.set("show", next.flags.join());
      if (next.when !== "all") hash.set("when", next.when);
      for (const [name, value] of [["kind", next.kind], ["search", next.words], ["line", next.line], ["run", next.run], ["shade", next.shade === "advantages" ? "" : next.shade], ["dialogue", next.open]]) if (value) hash.set(name, value);
      history[push ? "pushState" : "replaceState"](null, "", "#" + hash);
    };
    const show = (line) => {
      setView({ ...view, flags: [], when: "all", words: "", kind: "", run: "", open: "", line }, true);
      const place = document.getElementById("dialogues");
      place.scrollIntoView();
      place.focus({ preventScroll: true });
    };
    const turn = () => { const next = theme === "dark" ? "light" : "dark"; remembered.set("maporl-theme", next); setTheme(next); };
    const one = data.runs.length === 1;
    const drawn = (chart, high) => html`<${Chart} key=${chart.id} chart=${chart} dark=${theme === "dark"} high=${high} />`;
    const to = (id) => (event) => { event.preventDefault(); document.getElementById(id)?.scrollIntoView(); };
    const of = (part) => data.charts.filter((chart, i) => chart.part === part && !(one && i === 0));
    const keys = useMemo(() => new Set(data.dialogues.map((d) => d.key)), [data]);
    const open = (key) => keys.has(key) && (() => {
      setView({ ...view, flags: [], when: "all", words: "", kind: "", run: "", line: "", open: key }, true);
      const place = document.getElementById("dialogues");
      place.scrollIntoView();
      place.focus({ preventScroll: true });
    });
    const versus = data.comparison;
    return html`<header><div><h1>${data.title}${live && html` <span class=${lost ? "wrong" : "live"} role="status">${lost ? "connection lost" : "live"}</span>`}</h1>${one && html`<p class="quiet">${[data.runs[0].subject !== data.title && data.runs[0].subject, data.runs[0].state].filter(Boolean).join(", ")}</p>`}</div>
        <nav aria-label="Parts of the page"><a href="#charts" onClick=${to("charts")}>Charts</a>${one && data.runs[0].flips.length > 0 && html`<a href="#flips" onClick=${to("flips")}>Changed answers</a>`}<a href="#dialogues" onClick=${to("dialogues")}>Dialogues</a><button onClick=${turn}>${theme === "dark" ? "light" : "dark"} theme</button></nav></header>
      <main>
        ${data.seat && html`<${Seat} />`}
        ${versus && html`<section aria-label="Side by side"><h2>Side by side</h2>${versus.verdict && html`<p class="verdict">${versus.verdict}</p>`}<div class="scroll"><table><thead><tr><th scope="col"></th>${versus.names.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
          <tbody>${versus.results.map((row) => html`<tr><th scope="row">${row.key}</th>${row.values.map((v) => html`<td>${v}</td>`)}</tr>`)}</tbody></table></div>
          <p class="quiet">Held-out answers of the last turn, with 95% intervals.${versus.scores ? " A score is the mean weighted sum of an utterance's rewards." : ""}${versus.scores && versus.rewards ? ` ${versus.rewards}` : ""}${versus.comparable ? "" : " The tasks differ, or are not recorded, so these accuracies cannot be compared."}</p></section>`}
        ${one && html`<section aria-label="Result"><h2>${data.runs[0].heading}</h2><${Result} run=${data.runs[0]} number="0" level="h3" open=${open}>${data.charts.slice(0, 1).map((chart) => drawn(chart, 300))}<//>${data.runs[0].how_drawn && html`<p class="quiet">${data.runs[0].how_drawn}</p>`}</section><${Details} run=${data.runs[0]} number="0" level="h2" show=${show} />`}
        <section id="charts" aria-label="Charts">${(of("learning").length > 0 || data.charts.length === 0) && html`<h2>Over the updates</h2>`}${data.charts.length === 0 && html`<p>No update has been measured yet.</p>`}${of("learning").some((chart) => chart.series.some((s) => !s.held_out)) && html`<p class="quiet">These are figures of training questions, unless a title or a line says held out.</p>`}<div class="charts">${of("learning").map((chart) => drawn(chart))}</div></section>
        ${versus && versus.setup.length > 0 && html`<section><h2>What differs in the configurations</h2><details open=${versus.setup.length <= 20}><summary>${versus.setup.length} keys</summary><div class="scroll"><table><thead><tr><th scope="col">key</th>${versus.names.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
          <tbody>${versus.setup.map((row) => html`<tr><th scope="row">${row.key}</th>${row.values.map((v) => html`<td>${v}</td>`)}</tr>`)}</tbody></table></div></details></section>`}
        ${versus && data.runs.map((run, i) => html`<section><h2>${run.name}</h2><${Result} run=${run} number=${i} level="h3" open=${open} /><${Details} run=${run} number=${i} level="h3" show=${show} /></section>`)}
        ${one && data.runs[0].flips.length > 0 && html`<section id="flips" aria-label="Changed answers"><h2>Answers that changed between turns</h2><div class="flips">${data.runs[0].flips.map((f) => html`<${Flips} flips=${f} />`)}</div></section>`}
        ${of("health").length > 0 && html`<section><h2>Was the training healthy?</h2>${data.runs.map((r) => html`${!one && html`<h3>${r.name}</h3><${Audit} audit=${r.audit} />`}${one && r.audit.rows.length > 0 && html`<${Rows} ...${r.audit} />`}`)}<div class="charts">${of("health").map((chart) => drawn(chart))}</div></section>`}
        ${one && data.runs[0].groups && html`<section id="groups" aria-label="Groups"><h2>What do the groups wait for?</h2><${Groups} groups=${data.runs[0].groups} dark=${theme === "dark"} /></section>`}
        ${of("machine").length > 0 && html`<section><h2>The machine</h2><${Folded} title="Speed, memory, and how exactly sampler and trainer agree"><div class="charts">${of("machine").map((chart) => drawn(chart))}</div><//></section>`}
        <${Dialogues} data=${data} view=${view} setView=${setView} />
        ${data.runs.filter((r) => r.config).map((r) => html`<details><summary>Configuration${one ? "" : " of " + r.name}</summary><pre>${r.config}</pre></details>`)}
      </main>`;
  }

  /* A chart measures the place it is drawn in, so charts in a folded part are drawn when it is opened. */
  function Folded({ title, children }) {
    const [open, setOpen] = useState(false);
    return html`<details onToggle=${(e) => setOpen(e.target.open)}><summary>${title}</summary>${open && children}</details>`;
  }

  /* The old and the new dialogues of a live page in order: evaluations, then updates from the last to the first. The oldest ones
     beyond 2,000 are dropped, except the one that is open. */
  function joined(old, more, open) {
    const order = (d) => (d.when === "after" ? Infinity : d.when === "before" ? Number.MAX_VALUE : d.when);
    const all = [...new Map([...old, ...more].map((d) => [d.key, d])).values()].sort((a, b) => (order(a) === order(b) ? 0 : order(b) - order(a)));
    return all.filter((d, i) => i < 2000 || d.key === open);
  }

  async function start() {
    const root = document.getElementById("app"), holder = document.getElementById("data"), live = holder.dataset.live === "yes";
    let data = { title: document.title.split(" · ")[0], charts: [], flags: {}, rewards: {}, runs: [], comparison: null, dialogues: [], recorded: 0 };
    if (!live) {
      if (typeof DecompressionStream === "undefined") throw new Error("this browser cannot unpack the page's data; use a browser of 2023 or newer");
      const bytes = Uint8Array.from(atob(holder.textContent), (c) => c.charCodeAt(0));
      data = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
    }
    root.textContent = "";
    render(html`<${Page} first=${data} live=${live} />`, root);
    const part = document.getElementById(location.hash.slice(1));
    if (part) part.scrollIntoView();
    else if (["show", "when", "kind", "search", "line", "run", "dialogue"].some((name) => new URLSearchParams(location.hash.slice(1)).has(name))) document.getElementById("dialogues").scrollIntoView();
    document.documentElement.dataset.ready = "yes";
  }
  start().catch((error) => {
    const line = document.createElement("p");
    line.setAttribute("role", "alert");
    line.textContent = "The page cannot be shown: " + error.message;
    document.getElementById("app").prepend(line);
  });
})();
