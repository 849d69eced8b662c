// Light and dark, and the start: words and tables at once, curves when plotly, which stands below, is read.

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";

function themed() {
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  if (window.Plotly) redraw();
}

byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  themed();
});
prefersDark.addEventListener("change", themed);
addEventListener("scroll", () => document.activeElement.classList.contains("tokens") || hideTip(), { passive: true });

startRuns();
startGroups();
startReplays();
startTime();
startAge();
startGate();
startConfig();
themed();
document.addEventListener("DOMContentLoaded", startCurves);
