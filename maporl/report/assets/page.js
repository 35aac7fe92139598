/* The page of maporl's report. Data come from #data (gzip, base64) or, while a run goes on, from "data" beside the page. */
"use strict";
(() => {
  const { html, render, useState, useEffect, useMemo, useRef } = htmPreact;
  const PAGE = 60;
  const LIGHT = ["#0b57d0", "#b3540a", "#0a7a4b", "#8e24aa", "#b3261e", "#00838f", "#5d4037", "#5f6368"];
  const DARK = ["#8ab4f8", "#ffb366", "#7bd8a5", "#d7a6ec", "#ff9d94", "#6fd3dd", "#c9b1a6", "#bdc1c6"];
  const percent = (x) => (x == null ? "–" : (100 * x).toFixed(1) + "%");
  const short = (x) => (x == null ? "–" : Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(2) : String(+x.toPrecision(4)));
  const remembered = { get: (k) => { try { return localStorage.getItem(k); } catch { return null; } }, set: (k, v) => { try { localStorage.setItem(k, v); } catch { /* a file's page may have no storage */ } } };

  /* -- charts ------------------------------------------------------------------------------------------------------ */

  function Chart({ chart, dark }) {
    const place = useRef(null);
    const [hidden, setHidden] = useState({});
    const [at, setAt] = useState(null);
    const colours = useMemo(() => {
      const palette = dark ? DARK : LIGHT, names = [...new Set(chart.series.map((s) => s.name.replace(/, held out$/, "")))];
      return chart.series.map((s) => palette[names.indexOf(s.name.replace(/, held out$/, "")) % palette.length]);
    }, [chart, dark]);
    useEffect(() => {
      const style = getComputedStyle(document.documentElement), fg = style.getPropertyValue("--quiet"), line = style.getPropertyValue("--line");
      const data = [chart.steps], series = [{ label: "update" }], bands = [];
      chart.series.forEach((s, i) => {
        const show = !hidden[s.name], points = { show: s.held_out || chart.steps.length < 3, size: 5, fill: colours[i] };
        data.push(s.values);
        series.push({ label: s.name, stroke: colours[i], width: 1.5, dash: s.held_out ? [5, 4] : undefined, points, show, spanGaps: true });
        if (s.low && !s.held_out && show) {
          data.push(s.high, s.low);
          series.push({ stroke: "transparent", points: { show: false }, spanGaps: true }, { stroke: "transparent", points: { show: false }, spanGaps: true });
          bands.push({ series: [series.length - 2, series.length - 1], fill: colours[i] + "2b" });
        }
      });
      const axis = { stroke: fg, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
      const options = {
        width: place.current.clientWidth, height: 220, legend: { show: false }, series, bands,
        scales: { x: { time: false }, y: chart.whole ? { range: [0, 1] } : {} },
        axes: [axis, { ...axis, size: 56, values: (_, ticks) => ticks.map((t) => (chart.share ? +(100 * t).toFixed(1) + "%" : short(t))) }],
        cursor: { sync: { key: "updates" }, points: { size: 6 }, drag: { x: true, y: false } },
        hooks: { setCursor: [(u) => setAt(u.cursor.idx ?? null)] },
      };
      const plot = new uPlot(options, data, place.current);
      const watcher = new ResizeObserver(() => plot.setSize({ width: place.current.clientWidth, height: 220 }));
      watcher.observe(place.current);
      return () => { watcher.disconnect(); plot.destroy(); };
    }, [chart, dark, hidden]);
    const shown = chart.share ? percent : short;
    const known = (s) => s.values.filter((v) => v != null);
    const spoken = chart.series.map((s) => `${s.name}: from ${shown(known(s)[0])} to ${shown(known(s).at(-1))}`).join("; ");
    const every = Math.max(1, Math.ceil(chart.steps.length / 20));
    const rows = chart.steps.map((s, i) => [s, i]).filter(([, i]) => i % every === 0 || i === chart.steps.length - 1);
    return html`<figure id=${"chart-" + chart.id}>
      <figcaption><h3>${chart.title}</h3><div class="quiet">${chart.about}</div></figcaption>
      <ul class="legend">${chart.series.map((s, i) => html`<li><button aria-pressed=${String(!hidden[s.name])} onClick=${() => setHidden({ ...hidden, [s.name]: !hidden[s.name] })}>
        <span class=${"swatch" + (s.held_out ? " dashed" : "")} style=${{ borderColor: colours[i] }}></span>${s.name}${at == null ? "" : " " + shown(s.values[at])}</button></li>`)}</ul>
      <div ref=${place} role="img" aria-label=${`${chart.title} over updates. ${spoken}`}></div>
      <details><summary>Numbers</summary><div class="scroll"><table>
        <thead><tr><th scope="col">update</th>${chart.series.map((s) => html`<th scope="col" class="number">${s.name}</th>`)}</tr></thead>
        <tbody>${rows.map(([step, i]) => html`<tr><th scope="row">${step}</th>${chart.series.map((s) => html`<td class="number">${shown(s.values[i])}</td>`)}</tr>`)}</tbody>
      </table></div></details>
    </figure>`;
  }

  /* What answers did from turn to turn: a column for each turn, ribbons between them as wide as there are answers. */
  function Flips({ flips }) {
    const W = 560, H = 190, top = 24, high = 140, bar = 16;
    const columns = flips.turns.length + 1, x = (i) => 70 + (i * (W - 140)) / Math.max(1, columns - 1);
    const total = Math.max(1, ...flips.turns.map((t) => t.stayed_right + t.right_to_wrong + t.wrong_to_right + t.stayed_wrong));
    const scale = high / total, marks = [];
    const ribbon = (a, y0, b, y1, n, colour, text) => n > 0 && marks.push(html`<path d=${`M${x(a) + bar} ${y0} C${(x(a) + x(b) + bar) / 2} ${y0} ${(x(a) + x(b) + bar) / 2} ${y1} ${x(b)} ${y1} v${n * scale} C${(x(a) + x(b) + bar) / 2} ${y1 + n * scale} ${(x(a) + x(b) + bar) / 2} ${y0 + n * scale} ${x(a) + bar} ${y0 + n * scale} z`} fill=${`rgba(var(--${colour}), .45)`}><title>${text}</title></path>`);
    flips.turns.forEach((t, i) => {
      const rightBefore = t.stayed_right + t.right_to_wrong, rightAfter = t.stayed_right + t.wrong_to_right, all = rightBefore + t.wrong_to_right + t.stayed_wrong;
      const name = `turn ${i + 1} to ${i + 2}`;
      ribbon(i, top, i + 1, top, t.stayed_right, "up", `${name}: ${t.stayed_right} stayed right`);
      ribbon(i, top + t.stayed_right * scale, i + 1, top + rightAfter * scale, t.right_to_wrong, "down", `${name}: ${t.right_to_wrong} from right to wrong`);
      ribbon(i, top + rightBefore * scale, i + 1, top + t.stayed_right * scale, t.wrong_to_right, "up", `${name}: ${t.wrong_to_right} from wrong to right`);
      ribbon(i, top + (rightBefore + t.wrong_to_right) * scale, i + 1, top + (rightAfter + t.right_to_wrong) * scale, t.stayed_wrong, "down", `${name}: ${t.stayed_wrong} stayed wrong`);
      for (const [column, right] of i ? [[i + 1, rightAfter]] : [[i, rightBefore], [i + 1, rightAfter]]) {
        marks.push(html`<rect x=${x(column)} y=${top} width=${bar} height=${right * scale} fill="rgb(var(--up))" /><rect x=${x(column)} y=${top + right * scale} width=${bar} height=${(all - right) * scale} fill="rgb(var(--down))" />
          <text x=${x(column) + bar / 2} y="14" text-anchor="middle">turn ${column + 1}</text><text x=${x(column) + bar / 2} y=${top + high + 18} text-anchor="middle">${all ? Math.round((100 * right) / all) : 0}% right</text>`);
      }
    });
    const words = flips.turns.map((t, i) => `Turn ${i + 1} to ${i + 2}: ${t.wrong_to_right} from wrong to right, ${t.right_to_wrong} from right to wrong, ${t.stayed_right} stayed right, ${t.stayed_wrong} stayed wrong.`).join(" ");
    return html`<figure><figcaption><h3>${flips.title}</h3></figcaption><svg viewBox=${`0 0 ${W} ${H}`} role="img" aria-label=${words}>${marks}</svg><p class="quiet">${words}</p></figure>`;
  }

  /* -- results ----------------------------------------------------------------------------------------------------- */

  const Interval = ({ share }) => share && share.value != null ? html`${percent(share.value)} <span class="quiet">${(100 * share.low).toFixed(1)}–${(100 * share.high).toFixed(1)}</span>` : "–";

  function Run({ run, level, show, children }) {
    const Title = level;
    return html`<div class="top"><div class="story">${run.story.map((part) => html`<section><${Title}>${part.title}<//><p>${part.text}</p></section>`)}</div>${children}</div>
      ${run.results.length > 0 && html`<details><summary>Held-out accuracy by turn and agent, with 95% intervals</summary><div class="scroll"><table>
        <thead><tr><th scope="col">turn</th><th scope="col">who</th><th scope="col">before</th><th scope="col">after</th></tr></thead>
        <tbody>${run.results.map((r) => html`<tr><td>${r.turn}</td><th scope="row">${r.who}</th><td><${Interval} share=${r.before} /></td><td><${Interval} share=${r.after} /></td></tr>`)}</tbody></table></div></details>`}
      ${run.failures.lines.length > 0 && html`<section aria-label="Where it still fails"><${Title} id="failures">Where it still fails<//>
        <p class="quiet">Counted over ${run.failures.scope}.</p>
        <ul>${run.failures.lines.map((line) => html`<li>${line.text} <button onClick=${() => show(line.flag, run.failures.when)}>show them</button></li>`)}</ul>
        ${run.failures.groups.map((group) => html`<h3>Right at the end, by ${group.title}</h3><div class="scroll"><table>
          <thead><tr><th scope="col">${group.title}</th><th scope="col" class="number">questions</th><th scope="col" class="number">before</th><th scope="col">now, with 95% interval</th></tr></thead>
          <tbody>${group.rows.map((row) => html`<tr><th scope="row">${row.name}</th><td class="number">${row.questions}</td><td class="number">${percent(row.before)}</td>
            <td><span class="bar" style=${{ width: 8 * row.now + "rem" }}></span> <${Interval} share=${{ value: row.now, low: row.low, high: row.high }} /></td></tr>`)}</tbody></table></div>`)}
      </section>`}`;
  }

  /* -- dialogues --------------------------------------------------------------------------------------------------- */

  const texts = new WeakMap();
  const searchable = (d) => {
    if (!texts.has(d)) texts.set(d, [d.question, d.label, d.id, d.kind || "", ...d.said.map((u) => u.agent + " " + u.text)].join("\n").toLowerCase());
    return texts.get(d);
  };
  const place = (when) => (when === "after" ? "held out, after" : when === "before" ? "held out, before" : "update " + when);
  const mark = (correct) => (correct == null ? "·" : correct ? "✓" : "✗");

  function Answer({ text, trace, shade }) {
    const [tip, setTip] = useState("");
    if (!trace || shade === "nothing") return html`<div class="text" dir="auto">${text || html`<span class="quiet">(nothing)</span>`}</div>`;
    const values = trace[shade], most = Math.max(1e-9, ...(values || []).map(Math.abs));
    const colour = (v) => shade === "logprobs" ? `rgba(var(--down), ${(0.75 * (1 - Math.exp(v))).toFixed(3)})` : `rgba(var(${v >= 0 ? "--up" : "--down"}), ${((0.75 * Math.abs(v)) / most).toFixed(3)})`;
    const told = (i) => `${JSON.stringify(trace.pieces[i])}: log-probability ${short(trace.logprobs[i])} (${percent(Math.exp(trace.logprobs[i]))})${trace.values ? `, value ${short(trace.values[i])}` : ""}, advantage ${short(trace.advantages[i])}`;
    return html`<div class="text" dir="auto" onMouseLeave=${() => setTip("")}>${trace.pieces.map((piece, i) => html`<span class="tok" style=${{ background: values ? colour(values[i]) : "" }} onMouseEnter=${() => setTip(told(i))}>${piece}</span>`)}</div>
      <div class="tip" aria-live="off">${tip || "Point at a token for its numbers."}</div>
      <details><summary>Tokens as a table</summary><div class="scroll"><table><thead><tr><th scope="col">token</th><th scope="col" class="number">log-probability</th>${trace.values && html`<th scope="col" class="number">value</th>`}<th scope="col" class="number">advantage</th></tr></thead>
        <tbody>${trace.pieces.slice(0, 500).map((piece, i) => html`<tr><th scope="row"><code>${JSON.stringify(piece)}</code></th><td class="number">${short(trace.logprobs[i])}</td>${trace.values && html`<td class="number">${short(trace.values[i])}</td>`}<td class="number">${short(trace.advantages[i])}</td></tr>`)}</tbody></table></div></details>`;
  }

  function Said({ u, shade }) {
    const verdict = u.correct == null ? "not graded" : u.correct ? "✓ right" : "✗ wrong";
    return html`<article class=${"said" + (u.correct == null ? "" : u.correct ? " is-right" : " is-wrong")}>
      <h4>${u.agent}${u.role ? ` (${u.role})` : ""} <span class=${"badge " + (u.correct == null ? "" : u.correct ? "right" : "wrong")}>${verdict}</span></h4>
      <div class="quiet">${u.answer == null ? "no answer was read" : html`answer <strong>${u.answer}</strong>`}${u.reason ? `: ${u.reason}` : ""}${u.stop === "length" ? "; cut off at the length limit" : ""}</div>
      <${Answer} text=${u.text} trace=${u.trace} shade=${shade} />
      ${u.restated != null && html`<div class="quiet">restated: ${u.restated}</div>`}
      <dl class="terms">${Object.entries(u.rewards).map(([name, value]) => html`<div><dt>${name}</dt><dd>${short(value)}</dd></div>`)}</dl>
      <details><summary>What ${u.agent} was told</summary>${u.heard.map(([role, content]) => html`<div class="quiet">${role}</div><div class="text" dir="auto">${content}</div>`)}</details>
    </article>`;
  }

  function Detail({ d, shade, twin, open, many }) {
    const turns = [...new Set(d.said.map((u) => u.turn))].sort((a, b) => a - b), agents = [...new Set(d.said.map((u) => u.agent))];
    return html`<div class="question"><div class="quiet">${many ? many[d.run].name + ", " : ""}${place(d.when)}${d.kind ? ", " + d.kind : ""}, ${d.id}</div>
        <div class="text" dir="auto">${d.question}</div><div>right answer: <strong dir="auto">${d.label || "–"}</strong>${d.outcome ? html` <span class="quiet">(${d.outcome})</span>` : ""}</div>
        ${twin && html`<button onClick=${() => open(twin)}>the same question ${twin.when === "before" ? "before" : "after"} training</button>`}</div>
      <div class="turns">${turns.map((turn) => html`<section class="scroll"><h3>Turn ${turn}</h3><div style=${{ display: "grid", gap: ".75rem", gridTemplateColumns: `repeat(${agents.length}, minmax(min(100%, 15rem), 1fr))` }}>
        ${agents.map((agent) => { const own = d.said.filter((u) => u.turn === turn && u.agent === agent); return own.length ? html`<div>${own.map((u) => html`<${Said} u=${u} shade=${shade} />`)}</div>` : html`<div class="quiet">${agent} was not asked</div>`; })}</div></section>`)}</div>`;
  }

  function readHash() {
    const given = new URLSearchParams(location.hash.slice(1));
    return { flags: (given.get("show") || "").split(",").filter(Boolean), when: given.get("when") || "all", kind: given.get("kind") || "", words: given.get("search") || "", open: given.get("dialogue") || "" };
  }

  function Dialogues({ data, view, setView }) {
    const { flags, when, kind, words, open } = view;
    const [most, setMost] = useState(PAGE);
    const [shade, setShade] = useState("advantages");
    const search = useRef(null), detail = useRef(null), list = useRef(null);
    const kinds = useMemo(() => [...new Set(data.dialogues.map((d) => d.kind).filter(Boolean))].sort(), [data]);
    const chosen = useMemo(() => {
      const wanted = words.toLowerCase();
      return data.dialogues.filter((d) => flags.every((f) => d.flags.includes(f)) && (when === "all" || (when === "train" ? typeof d.when === "number" : d.when === when)) && (!kind || d.kind === kind) && (!wanted || searchable(d).includes(wanted)));
    }, [data, flags.join(), when, kind, words]);
    const change = (part) => { setMost(PAGE); setView({ ...view, ...part }); };
    const current = chosen.find((d) => d.key === open) || data.dialogues.find((d) => d.key === open) || chosen[0];
    const at = chosen.indexOf(current);
    const go = (step) => {
      const next = chosen[Math.min(chosen.length - 1, Math.max(0, at + step))];
      if (!next) return;
      if (chosen.indexOf(next) >= most) setMost(most + PAGE);
      setView({ ...view, open: next.key });
      requestAnimationFrame(() => list.current?.querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" }));
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
    const select = (d) => { setView({ ...view, open: d.key }); if (matchMedia("(max-width: 760px)").matches) requestAnimationFrame(() => detail.current.scrollIntoView()); };
    return html`<section id="dialogues" aria-label="Dialogues"><h2>Dialogues</h2>
      <p class="quiet">${data.dialogues.length < data.recorded ? `${data.dialogues.length} of ${data.recorded} recorded dialogues. ` : ""}Keys: <kbd>j</kbd> next, <kbd>k</kbd> previous, <kbd>/</kbd> search. The address of the page keeps what you see.</p>
      <div class="tools" role="search"><label>Search <input type="search" ref=${search} value=${words} onInput=${(e) => change({ words: e.target.value })} placeholder="question, answer, words" /></label>
        <label>From <select value=${when} onChange=${(e) => change({ when: e.target.value })}><option value="all">everywhere</option><option value="after">held out, after</option><option value="before">held out, before</option><option value="train">training</option></select></label>
        ${kinds.length > 1 && html`<label>Task <select value=${kind} onChange=${(e) => change({ kind: e.target.value })}><option value="">all</option>${kinds.map((k) => html`<option value=${k}>${k}</option>`)}</select></label>`}
        <label>Shade tokens by <select value=${shade} onChange=${(e) => setShade(e.target.value)}><option value="advantages">advantage</option><option value="values">value</option><option value="logprobs">log-probability</option><option value="nothing">nothing</option></select></label></div>
      <div class="tools" role="group" aria-label="Show only">${Object.entries(data.flags).map(([name, about]) => html`<button title=${about} aria-pressed=${String(flags.includes(name))} onClick=${() => change({ flags: flags.includes(name) ? flags.filter((f) => f !== name) : [...flags, name] })}>${name}</button>`)}</div>
      <p role="status" id="count">${chosen.length} ${chosen.length === 1 ? "dialogue" : "dialogues"}</p>
      ${data.dialogues.length === 0 ? html`<p>No dialogue has been recorded yet.</p>` : html`<div class="dialogues">
        <ul class="list" ref=${list}>${chosen.slice(0, most).map((d) => html`<li key=${d.key}><button aria-current=${String(d === current)} onClick=${() => select(d)}>
          <span class="what" dir="auto">${d.question.slice(0, 200)}</span><span class="quiet">${place(d.when)} <span class="marks" aria-label=${d.flags.join(", ")}>${d.said.filter((u) => u.correct != null).map((u) => html`<span class=${u.correct ? "right" : "wrong"}>${mark(u.correct)}</span>`)}</span></span></button></li>`)}
          ${chosen.length > most && html`<li><button onClick=${() => setMost(most + PAGE)}>show more of ${chosen.length}</button></li>`}</ul>
        <div class="detail" ref=${detail}>${current && html`<${Detail} key=${current.key} d=${current} shade=${shade} twin=${twin} open=${select} many=${data.runs.length > 1 ? data.runs : null} />`}</div></div>`}
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
          if (answer.status === 404) return; // nobody plays here
          if (answer.ok) setAsked(await answer.json());
        } catch { /* the page says that the connection is lost */ }
        if (!stopped) setTimeout(ask, 500);
      };
      ask();
      return () => { stopped = true; };
    }, []);
    if (!asked) return null;
    const say = async (event) => {
      event.preventDefault();
      const answer = await fetch("seat", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ number: asked.number, text }) });
      setTrouble(answer.ok ? "" : await answer.text());
      if (answer.ok) { setText(""); setAsked({}); }
    };
    return html`<section aria-label="Your seat"><h2>Your seat</h2>${asked.number == null ? html`<p role="status">The others are speaking.</p>` : html`<form onSubmit=${say}>
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
    useEffect(() => {
      const follow = () => setViewState(readHash());
      addEventListener("hashchange", follow);
      return () => removeEventListener("hashchange", follow);
    }, []);
    useEffect(() => {
      if (!live) return undefined;
      let tag = "", stopped = false;
      const ask = async () => {
        try {
          const answer = await fetch("data", { headers: tag ? { "If-None-Match": tag } : {} });
          if (answer.status === 200) { tag = answer.headers.get("ETag") || ""; setData(keyed(await answer.json())); }
          setLost(answer.status !== 200 && answer.status !== 304);
        } catch { setLost(true); }
        if (!stopped) setTimeout(ask, 2000);
      };
      ask();
      return () => { stopped = true; };
    }, []);
    const setView = (next) => {
      setViewState(next);
      const hash = new URLSearchParams();
      if (next.flags.length) hash.set("show", next.flags.join());
      if (next.when !== "all") hash.set("when", next.when);
      if (next.kind) hash.set("kind", next.kind);
      if (next.words) hash.set("search", next.words);
      if (next.open) hash.set("dialogue", next.open);
      history.replaceState(null, "", "#" + hash);
    };
    const show = (flag, when) => { setView({ ...view, flags: [flag], when, words: "", kind: "" }); document.getElementById("dialogues").scrollIntoView(); };
    const turn = () => { const next = theme === "dark" ? "light" : "dark"; remembered.set("maporl-theme", next); setTheme(next); };
    const one = data.runs.length === 1;
    const drawn = (chart) => html`<${Chart} key=${chart.id} chart=${chart} dark=${theme === "dark"} />`;
    const to = (id) => (event) => { event.preventDefault(); document.getElementById(id)?.scrollIntoView(); };
    return html`<header><h1>${data.title}${live && html` <span class=${lost ? "wrong" : "live"} role="status">${lost ? "connection lost" : "live"}</span>`}</h1>
        <nav aria-label="Parts of the page"><a href="#charts" onClick=${to("charts")}>Charts</a>${one && data.runs[0].flips.length > 0 && html`<a href="#flips" onClick=${to("flips")}>Changes of mind</a>`}<a href="#dialogues" onClick=${to("dialogues")}>Dialogues</a><button onClick=${turn}>${theme === "dark" ? "light" : "dark"}</button></nav></header>
      <main>
        ${live && html`<${Seat} />`}
        ${one ? html`<${Run} run=${data.runs[0]} level="h2" show=${show}>${data.charts.slice(0, 1).map(drawn)}<//>` : data.runs.map((run) => html`<section><h2>${run.name}</h2><${Run} run=${run} level="h3" show=${show} /></section>`)}
        ${data.differences.length > 0 && html`<section><h2>What differs in the configurations</h2><div class="scroll"><table><thead><tr><th scope="col">key</th>${data.runs.map((r) => html`<th scope="col">${r.name}</th>`)}</tr></thead>
          <tbody>${data.differences.map((row) => html`<tr><th scope="row">${row.key}</th>${row.values.map((v) => html`<td>${v}</td>`)}</tr>`)}</tbody></table></div></section>`}
        <section id="charts" aria-label="Charts"><h2>Over the updates</h2>${data.charts.length === 0 && html`<p>Nothing has been measured yet.</p>`}<div class="charts">${data.charts.slice(one ? 1 : 0).map(drawn)}</div></section>
        ${one && data.runs[0].flips.length > 0 && html`<section id="flips" aria-label="Changes of mind"><h2>Changes of mind between turns</h2><div class="flips">${data.runs[0].flips.map((f) => html`<${Flips} flips=${f} />`)}</div></section>`}
        <${Dialogues} data=${data} view=${view} setView=${setView} />
        ${data.runs.filter((r) => r.config).map((r) => html`<details><summary>Configuration${one ? "" : " of " + r.name}</summary><pre>${r.config}</pre></details>`)}
      </main>`;
  }

  /* A name for every dialogue that stays while the run grows. */
  function keyed(data) {
    const seen = {};
    for (const d of data.dialogues) {
      const name = `${d.run}/${d.when}/${d.id}`;
      seen[name] = (seen[name] || 0) + 1;
      d.key = seen[name] > 1 ? `${name}/${seen[name]}` : name;
    }
    return data;
  }

  async function start() {
    const root = document.getElementById("app"), holder = document.getElementById("data"), live = holder.dataset.live === "yes";
    let data = { title: document.title, charts: [], flags: {}, runs: [], differences: [], dialogues: [], recorded: 0 };
    if (!live) {
      if (typeof DecompressionStream === "undefined") throw new Error("this browser cannot unpack the page's data; it takes one of 2023 or newer");
      const bytes = Uint8Array.from(atob(holder.textContent), (c) => c.charCodeAt(0));
      data = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
    }
    root.textContent = "";
    render(html`<${Page} first=${keyed(data)} live=${live} />`, root);
    const open = readHash();
    if (open.open || open.flags.length || open.words) document.getElementById("dialogues").scrollIntoView();
    document.documentElement.dataset.ready = "yes";
  }
  start().catch((error) => {
    const line = document.createElement("p");
    line.setAttribute("role", "alert");
    line.textContent = "The page cannot be shown: " + error.message;
    document.getElementById("app").prepend(line);
  });
})();
