(function () {
  "use strict";
  var root = document.documentElement;
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var charts = JSON.parse(document.getElementById("charts").textContent);
  var drawn = [];

  // ---- light and dark ----

  var toggle = document.getElementById("theme");

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  }

  function kept(value) { // a page from a file may not be allowed to remember
    try {
      if (value === undefined) { return localStorage.getItem("epitorch-theme"); }
      localStorage.setItem("epitorch-theme", value);
    } catch (error) { /* then it does not */ }
    return null;
  }

  function colours() {
    var style = getComputedStyle(root);
    var ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
    var card = style.getPropertyValue("--card").trim();
    return {
      "font.color": ink, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
      "xaxis.gridcolor": line, "yaxis.gridcolor": line, "xaxis.zerolinecolor": line, "yaxis.zerolinecolor": line,
      "xaxis.linecolor": line, "yaxis.linecolor": line,
      "hoverlabel.bgcolor": card, "hoverlabel.bordercolor": line, "hoverlabel.font.color": ink
    };
  }

  function themed() {
    toggle.textContent = isDark() ? "Light colours" : "Dark colours";
    if (window.Plotly) { drawn.forEach(function (place) { Plotly.relayout(place, colours()); }); }
  }

  var before = kept();
  if (before === "dark" || before === "light") { root.dataset.theme = before; }
  toggle.hidden = false;
  toggle.addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    kept(root.dataset.theme);
    themed();
  });
  dark.addEventListener("change", themed);

  // ---- figures ----

  function legend(figure, place, traces) {
    var byName = Object.create(null);
    traces.forEach(function (trace, index) { (byName[trace.name] = byName[trace.name] || []).push(index); });
    var names = Object.keys(byName);
    if (names.length < 2) { return; }
    names.forEach(function (name) {
      figure.querySelector(".legend").appendChild(entry(place, traces[byName[name][0]], byName[name]));
    });
  }

  function entry(place, trace, indices) {
    var button = document.createElement("button");
    var plain = document.createElement("textarea"); // names are escaped for plotly; this reads them back as text
    plain.innerHTML = trace.name;
    button.type = "button";
    button.textContent = plain.value;
    button.style.setProperty("--swatch", trace.marker.color);
    button.setAttribute("aria-pressed", "true");
    button.classList.toggle("dashed", !!trace.line && trace.line.dash === "dash");
    button.addEventListener("click", function () {
      var shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      Plotly.restyle(place, { visible: shown }, indices);
    });
    return button;
  }

  function draw(figure) {
    var chart = charts[figure.id];
    if (!chart || figure.classList.contains("drawn") || !window.Plotly) { return; }
    var place = figure.querySelector(".plot");
    figure.classList.add("drawn");
    Plotly.newPlot(place, chart.data, chart.layout, { responsive: true, displayModeBar: false }).then(function () {
      drawn.push(place);
      Plotly.relayout(place, colours());
    }, function () { figure.classList.remove("drawn"); }); // the drawn picture stays
    legend(figure, place, chart.data);
  }

  function visible(figure) {
    return !figure.closest("details:not([open])");
  }

  document.querySelectorAll("figure").forEach(function (figure) {
    if (visible(figure)) { draw(figure); }
  });
  document.querySelectorAll("details").forEach(function (box) {
    box.addEventListener("toggle", function () {
      box.querySelectorAll("figure").forEach(function (figure) {
        if (visible(figure)) { draw(figure); }
      });
    });
  });
  themed();
})();
