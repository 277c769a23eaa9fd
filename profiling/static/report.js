// Shows the data-tip of the mark under the pointer, and switches the theme.
const tip = document.getElementById("tip");

document.addEventListener("mousemove", (event) => {
  const mark = event.target.closest ? event.target.closest("[data-tip]") : null;
  if (!mark) {
    tip.style.display = "none";
    return;
  }
  tip.textContent = mark.dataset.tip;
  tip.style.display = "block";
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  const fits = below + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 10}px`;
});

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
