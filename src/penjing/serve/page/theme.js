// Before the first paint: the theme that was chosen last time, else the system's, now and whenever that changes. Not a
// module, so that it runs at once.
{
  const system = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    let chosen = "";
    try {
      chosen = JSON.parse(localStorage.getItem("penjing.settings") || "{}").theme;
    } catch {
      // No storage (a private window).
    }
    document.documentElement.dataset.theme = ["light", "dark"].includes(chosen) ? chosen : system.matches ? "dark" : "light";
  };
  show();
  system.addEventListener("change", show);
}
