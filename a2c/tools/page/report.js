"use strict";
// Draws the page from the data in it. A page that `a2c watch` serves also fetches newer data, every few seconds.
// Text from the run is only ever set as textContent.

const AXES = {env_steps: ["decisions", "~s", ",d"], minutes: ["wall time (minutes)", "", ".1f"]};
const CHARTS = [
  {id: "score", table: "episodes", title: "score (points of the game)", lines: [
    {name: "score", label: "one episode", dots: true}, {name: "mean", label: "mean of the last episodes"}]},
  {id: "evaluations", table: "evaluations", title: "score (points of the game)", points: true, lines: [
    {name: "mean", label: "mean"}, {name: "min", label: "lowest"}, {name: "max", label: "highest"}]},
  {id: "losses", table: "metrics", title: "", lines: [
    {name: "loss_policy", label: "policy"}, {name: "loss_value", label: "value"}, {name: "loss_entropy", label: "entropy"}]},
  {id: "entropy", table: "metrics", title: "nats", lines: [{name: "entropy", label: "entropy"}]},
  {id: "explained_variance", table: "metrics", title: "share", low: -1, lines: [
    {name: "explained_variance", label: "explained variance"}]},
  {id: "approx_kl", table: "metrics", title: "nats", lines: [{name: "approx_kl", label: "approx_kl"}]},
  {id: "ratios", table: "metrics", title: "", lines: [
    {name: "ratio", label: "mean, clipped at 1"}, {name: "clip_fraction", label: "share that was clipped"}]},
  {id: "shares", table: "metrics", title: "share of wall time", stacked: true, lines: [
    {name: "share_env", label: "environments"}, {name: "share_act", label: "acting"}, {name: "share_learn", label: "learning"}]},
];
const BUTTONS = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];  // none that uploads
const SETTINGS = {responsive: true, displaylogo: false, modeBarButtons: [BUTTONS]};
const element = (id) => document.getElementById(id);
let data = JSON.parse(element("data").textContent), latest = "";

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function traces(chart, table, axis) {
  const colours = ["--first", "--second", "--third"].map(colour);
  const solid = chart.lines.filter((line) => !line.dots).map((line) => line.name);
  return chart.lines.filter((line) => table[line.name]).map((line) => ({
    x: table[axis],
    y: table[line.name],
    name: line.label === "mean of the last episodes" ? `mean of the last ${data.window} episodes` : line.label,
    mode: line.dots ? "markers" : chart.points ? "lines+markers" : table[axis].length > 1 ? "lines" : "markers",
    connectgaps: true,
    stackgroup: chart.stacked ? "shares" : undefined,
    hovertemplate: "%{y:.4~g}",
    ...paint(line.dots ? colour("--dots") : colours[solid.indexOf(line.name)], line.dots),
  }));
}

function paint(shade, dots) {
  return dots ? {marker: {size: 4, opacity: 0.5, color: shade}} : {line: {width: 2, color: shade}, marker: {color: shade}};
}

function layout(chart, axis) {
  const [title, ticks, hover] = AXES[axis];
  const lines = {gridcolor: colour("--rule"), zerolinecolor: colour("--rule"), linecolor: colour("--rule"), automargin: true};
  const target = chart.id === "score" && data.target !== null;
  return {
    uirevision: axis,  // the zoom stays while the data changes
    margin: {l: 8, r: 8, t: 32, b: 8},  // buttons are on top
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: {color: colour("--text"), family: "system-ui, sans-serif", size: 12},
    hovermode: "x unified",
    hoverlabel: {bgcolor: colour("--page"), bordercolor: colour("--rule"), font: {color: colour("--text")}},
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",  // a finger scrolls the page
    modebar: {bgcolor: "transparent", color: colour("--quiet"), activecolor: colour("--first")},
    showlegend: chart.lines.length > 1,
    legend: {orientation: "h", x: 0.5, xanchor: "center", yref: "container", y: 0, yanchor: "bottom"},
    xaxis: {...lines, title: {text: title}, tickformat: ticks, hoverformat: hover},
    yaxis: {...lines, title: {text: chart.title}, range: chart.stacked ? [0, 1] : undefined,
      autorangeoptions: {clipmin: chart.low}},
    shapes: target ? [{type: "line", xref: "paper", x0: 0, x1: 1, y0: data.target, y1: data.target,
      line: {dash: "dash", width: 1, color: colour("--third")}}] : [],
    annotations: target ? [{xref: "paper", x: 0, y: data.target, text: `target ${data.target}`, showarrow: false,
      xanchor: "left", yanchor: "bottom", font: {color: colour("--third")}}] : [],
  };
}

function draw() {
  const axis = element("axis").value;
  for (const chart of CHARTS) {
    const box = element(chart.id), table = data[chart.table];
    const drawn = table[axis] ? traces(chart, table, axis).filter((trace) => trace.y.some((y) => y !== null)) : [];
    box.closest("section").hidden = !drawn.length && chart.id !== "score";
    if (drawn.length) {
      if (!box.classList.contains("js-plotly-plot")) box.replaceChildren();
      Plotly.react(box, drawn, layout(chart, axis), SETTINGS);
    } else {
      if (box.classList.contains("js-plotly-plot")) Plotly.purge(box);
      box.textContent = every ? "no values yet" : "no values";
    }
  }
}

function fill(id, rows, outer, inner) {
  const made = rows.map((row) => {
    const group = document.createElement(outer);
    row.forEach((text, i) => {
      const cell = document.createElement(inner[i]);
      cell.textContent = text;
      if (inner[i] === "th") cell.scope = "row";
      group.append(cell);
    });
    return group;
  });
  element(id).replaceChildren(...made);
}

function show(newer) {
  data = newer;
  document.title = `${data.title} - a2c`;
  element("title").textContent = data.title;
  fill("summary", data.summary, "div", ["dt", "dd"]);
  fill("card", data.card, "div", ["h3", "p"]);
  fill("config", data.config, "tr", ["th", "td"]);
  fill("about", data.about, "tr", ["th", "td"]);
  draw();
}

async function follow(seconds) {
  try {
    const answer = await fetch("data.json", {cache: "no-store"});
    if (!answer.ok) throw new Error(await answer.text());
    const text = await answer.text();
    if (text !== latest) show(JSON.parse(text));
    latest = text;
    element("state").textContent = `Follows the run, every ${seconds} seconds. Read at ${new Date().toLocaleTimeString()}.`;
  } catch (error) {
    const reason = error instanceof TypeError ? "a2c watch does not answer" : error.message;
    element("state").textContent = `Not up to date: ${reason}. This page tries again.`;
  }
  setTimeout(follow, 1000 * seconds, seconds);
}

const every = Number(document.body.dataset.every);
draw();
element("axis").addEventListener("change", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
if (every) setTimeout(follow, 1000 * every, every);
